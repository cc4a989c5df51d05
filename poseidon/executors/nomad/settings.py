"""The settings of the Nomad executor, as in the table `[nomad]` of poseidon.toml."""

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from poseidon.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NomadSettings:
    """Durations are in seconds, and all of them are here, so that tests can run faster than clusters."""

    address: str = "http://127.0.0.1:4646"
    """http(s)://host:port of a server or client agent."""
    token: str = field(default="", repr=False)
    namespace: str = "default"
    region: str = ""
    """Empty: the agent's own."""
    tls_ca_file: str = ""
    tls_cert_file: str = ""
    """Of a client certificate, with `tls_key_file`."""
    tls_key_file: str = ""
    template_job_file: str = ""
    """HCL or JSON of a job that replaces the built-in one."""
    disable_force_pull: bool = False
    network_mode: str = "bridge"
    """Of the group network of runners with network access."""
    mark_used: bool = True
    """Mirror to each job's meta whether its runner is in use."""
    set_user: str = "/sbin/setuser user"
    """What runs a command without privileges; empty: nothing."""
    direct_exec: bool = True
    """Open executions at the node's own address first."""

    group: str = "default-group"
    task: str = "default-task"
    config_group: str = "config"

    settle: float = 3.0
    """A failed job was recorded dead for 1.3 s before it was rescheduled."""
    list_interval: float = 300.0
    start_timeout: float = 300.0
    connect_timeout: float = 5.0
    request_timeout: float = 15.0
    """Without a leader, agents answer after 5 s."""
    list_timeout: float = 120.0
    evaluation_timeout: float = 10.0
    evaluation_look_ups: float = 0.2
    """Until an evaluation is first looked up, in case that its event was lost; doubles."""
    driver_retry: float = 1.0
    """Until a job is registered once more that found all drivers unhealthy."""
    headers_within: float = 1.0
    """How long the stream's headers are awaited before going on without: a quiet cluster holds them back for 30 s."""
    stream_silence: float = 75.0
    """After so long without anything, heartbeats included (each 30 s), the stream is dead."""
    exec_heartbeat: float = 10.0
    node_address_ttl: float = 600.0

    limiter: int = 64
    """Short requests at the same time."""
    exec_connections: int = 64
    """Executions' connections at the same time: agents take 100 of one client in all."""

    def __post_init__(self) -> None:
        if not _is_address(self.address):
            raise ConfigError(f"nomad.address: expected http(s)://host:port, not {self.address!r}")
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ConfigError("nomad.tls: a client certificate needs both cert_file and key_file")

    @property
    def url(self) -> str:
        """The address without a slash at its end."""
        return self.address.rstrip("/")


def _is_address(address: str) -> bool:
    """Whether there can be something at *address*; what is no name or no port would fail later, and differently."""
    try:
        parts = urlsplit(address)
        host, _ = (parts.hostname or "").encode("idna"), parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(host) and not parts.path.strip("/") and not parts.query
