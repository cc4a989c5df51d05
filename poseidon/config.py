"""The settings: the tables of poseidon.toml as one frozen value, built once and passed on by part.

Each setting is explained, with its default, in poseidon.toml at the top of the project.
"""

import ipaddress
import json
import os
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from poseidon.config_access import (
    ClusterToken,
    LimitSettings,
    Origin,
    Proxy,
    TlsSettings,
    Token,
    TokenName,
    TokenSettings,
    WebAddress,
    digest_of,
)
from poseidon.config_kinds import Section
from poseidon.config_original import left_out, renamed
from poseidon.config_sources import Sources, gather, validated
from poseidon.errors import ConfigError

SEARCHED = (Path("poseidon.toml"), Path("/etc/poseidon/poseidon.toml"))
SYSTEM_STATE = Path("/var/lib/poseidon")
SINGLE_TOKEN = "server.token"  # noqa: S105 - a name
"""How the token without a name is called in logs."""

Seconds = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Port = Annotated[int, Field(ge=1, le=65535)]


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


def _number(key: object) -> object:
    """A table's name as the number that it stands for; only its plain form, so that no two names mean the same."""
    plain = isinstance(key, str) and key.isascii() and key.isdigit() and str(int(key)) == key
    return int(str(key)) if plain else key


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError(f"expected an absolute path, not {json.dumps(path)}")
    return path


def _ip(text: str) -> str:
    return str(ipaddress.ip_address(text))


def _ipv4(text: str) -> str:
    return str(ipaddress.IPv4Address(text))


def _network(text: str) -> str:
    return str(ipaddress.IPv4Network(text))


def _range(bounds: tuple[int, ...]) -> tuple[int, ...]:
    if bounds and (len(bounds) != len(("first", "last")) or bounds[0] > bounds[1]):
        raise ValueError("expected nothing, or a first and a last port")
    return bounds


Network = Annotated[str, AfterValidator(_network)]
AbsolutePath = Annotated[str, AfterValidator(_absolute)]


class AlertSettings(Section):
    """[server.alert]"""

    prewarming_pool_threshold: Annotated[float, Field(ge=0, le=1)] = 0.0


class ServerSettings(Section):
    """[server]"""

    address: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 7200
    token: Token = ""
    """With all rights: the token itself, wherever it came from, or its hash. Without any token none is asked for."""
    token_file: str = ""
    tokens: Mapping[TokenName, TokenSettings] = {}
    max_body_mb: Annotated[int, Field(ge=1, le=4096)] = 100
    claim_wait: Seconds = 10.0
    drain_timeout: Seconds = 15.0
    stall_timeout: Annotated[float, Field(gt=0)] = 60.0
    execution_expiry: Annotated[float, Field(gt=0)] = 300.0
    max_time_limit: Count = 0
    max_executions_per_runner: Count = 32
    alert: AlertSettings = AlertSettings()
    tls: TlsSettings = TlsSettings()
    base_url: WebAddress = ""
    trusted_proxies: tuple[Proxy, ...] = ()
    allowed_origins: tuple[Origin, ...] = ()
    limits: LimitSettings = LimitSettings()

    @property
    def all_tokens(self) -> Mapping[str, TokenSettings]:
        """Those with names, and the one without, by the name of its setting."""
        single = {SINGLE_TOKEN: TokenSettings(role="admin", token=self.token)} if self.token else {}
        return {**single, **self.tokens}


class StoreSettings(Section):
    """[store]"""

    path: str = ""
    """As written; `Config.database` is where the database is."""
    synchronous: Annotated[Literal["FULL", "NORMAL"], BeforeValidator(_upper)] = "FULL"
    retention_days: Annotated[float, Field(gt=0)] = 30.0


class LocalSettings(Section):
    """[local]: the sandboxes of this machine; but for `enabled` as the local executor's own settings."""

    enabled: bool = True
    images: Mapping[str, AbsolutePath] = {}
    require_image: bool = False
    shown: tuple[AbsolutePath, ...] = ()
    require: tuple[Literal["memory", "processes", "cpu", "users", "network", "isolation"], ...] = ()
    memory_mb: Annotated[int, Field(ge=16, le=2**31 - 1)] = 256
    overhead_mb: Count = 24
    processes: Annotated[int, Field(ge=1, le=2**22)] = 128
    open_files: Annotated[int, Field(ge=16, le=2**20)] = 256
    workspace_mb: Count = 0
    tmp_mb: Count = 0
    shm_mb: Count = 0
    memory_budget_mb: Count = 0
    max_runners: Count = 0
    cpu_quota: Annotated[float, Field(ge=0)] = 0.0
    cpu_shares: Annotated[int, Field(ge=2, le=2**18)] = 1024
    uid_base: Count = 0
    uid_count: Count = 0
    abandon_after: Annotated[float, Field(gt=0)] = 24.0
    start_concurrency: Count = 0
    start_timeout: Annotated[float, Field(gt=0)] = 30.0
    network_blocked: tuple[Network, ...] = ("169.254.0.0/16",)
    name_servers: tuple[Annotated[str, AfterValidator(_ipv4)], ...] = ()
    port_address: Annotated[str, AfterValidator(_ip)] = "127.0.0.1"
    port_host: str = ""
    port_range: Annotated[tuple[Port, ...], AfterValidator(_range)] = ()
    user_cgroup: str = ""


class NomadTlsSettings(Section):
    """[nomad.tls]"""

    active: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""


class NomadNetworkSettings(Section):
    """[nomad.network]"""

    mode: str = "bridge"


class NomadSettings(Section):
    """[nomad]: a cluster; used if it has an address."""

    enabled: bool = True
    address: str = ""
    port: Port = 4646
    token: ClusterToken = ""
    token_file: str = ""
    namespace: Annotated[str, Field(min_length=1)] = "default"
    region: str = ""
    template_job_file: str = ""
    disable_force_pull: bool = False
    mark_used: bool = True
    set_user: str = "/sbin/setuser user"
    direct_exec: bool = True
    start_timeout: Annotated[float, Field(gt=0)] = 300.0
    list_interval: Annotated[float, Field(gt=0)] = 300.0
    exec_connections: Annotated[int, Field(ge=2)] = 64
    tls: NomadTlsSettings = NomadTlsSettings()
    network: NomadNetworkSettings = NomadNetworkSettings()

    @property
    def url(self) -> str:
        """http(s)://host:port; empty: no cluster is used."""
        if not self.enabled or not self.address:
            return ""
        if "://" in self.address:
            return self.address.rstrip("/")
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{'https' if self.tls.active else 'http'}://{host}:{self.port}"


class EnvironmentSettings(Section):
    """[environments.N]: an environment that is put at start."""

    image: Annotated[str, Field(min_length=1)]
    executor: Literal["", "local", "nomad"] = ""
    pool_size: Count = 1
    cpu_limit: Count = 0
    memory_limit: Count = 0
    network_access: bool = False
    exposed_ports: tuple[Port, ...] = ()


class LoggingSettings(Section):
    """[logging]"""

    level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)] = "info"
    format: Annotated[Literal["auto", "console", "json"], BeforeValidator(_lower)] = "auto"


EnvironmentNumber = Annotated[int, BeforeValidator(_number), Field(ge=0, le=2**63 - 1)]


class Settings(Section):
    """Everything that can be set."""

    server: ServerSettings = ServerSettings()
    store: StoreSettings = StoreSettings()
    local: LocalSettings = LocalSettings()
    nomad: NomadSettings = NomadSettings()
    environments: Mapping[EnvironmentNumber, EnvironmentSettings] = {}
    logging: LoggingSettings = LoggingSettings()


class Config(Settings):
    """The settings, and what follows from them."""

    origin: Path | None
    """The file they came from, if any."""
    database: Path
    """The database's file, absolute."""
    state: Path
    """The folder for everything that outlives the daemon: the database's."""
    remarks: tuple[str, ...] = ()
    """What is to be told of where they came from."""

    @property
    def uses_local(self) -> bool:
        """Whether sandboxes of this machine are used: beside a cluster only if that is said in so many words."""
        return self.local.enabled and (not self.nomad.url or "enabled" in self.local.model_fields_set)

    def cautions(self) -> tuple[str, ...]:
        """What is allowed but rarely meant; a line each."""
        if self.server.all_tokens or _is_loopback(self.server.address):
            return self.remarks
        return (
            f"server.address {self.server.address} can be reached by others, and no server.token is set",
            *self.remarks,
        )

    def secrets(self) -> list[str]:
        """What must never be shown."""
        return [self.nomad.token, *(each.token for each in self.server.all_tokens.values())]


def load_config(path: Path | None, environ: Mapping[str, str]) -> Config:
    """Read *path*, else the first file of `SEARCHED` that exists, else only the variables. Raises ConfigError."""
    sources = gather(Settings, find_file(path), renamed(environ), left_out)
    settings = validated(Settings, sources)
    _refuse_doubles(settings.server)
    database = _database(settings.store.path, sources, environ)
    tables = {name: getattr(settings, name) for name in Settings.model_fields}
    return Config(
        **tables, origin=sources.file, database=database, state=database.parent, remarks=tuple(sources.remarks)
    )


def _refuse_doubles(server: ServerSettings) -> None:
    """A token with two roles would have whichever comes last."""
    known: dict[bytes, str] = {}
    for name, each in server.all_tokens.items():
        path = name if name == SINGLE_TOKEN else f"server.tokens.{name}"
        other = known.setdefault(digest_of(each.token), path)
        if other != path:
            raise ConfigError(f"{path}: the same token as {other}")


def find_file(path: Path | None) -> Path | None:
    """The configuration file, absolute; one that is asked for must exist."""
    if path is not None and not path.is_file():
        raise ConfigError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
    found = path or next((file for file in SEARCHED if file.is_file()), None)
    return found.absolute() if found else None


def _database(path: str, sources: Sources, environ: Mapping[str, str]) -> Path:
    if not path:
        return default_state(environ, root=os.geteuid() == 0).absolute() / "poseidon.db"
    return sources.base(("store", "path")) / Path(path).expanduser()


def default_state(environ: Mapping[str, str], *, root: bool) -> Path:
    """systemd's state folder, else the system's for root, else the user's."""
    if given := environ.get("STATE_DIRECTORY"):
        return Path(given.split(":")[0])
    if root:
        return SYSTEM_STATE
    state = Path(environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():  # the XDG specification: a relative one is to be ignored
        state = Path(environ.get("HOME") or pwd.getpwuid(os.geteuid()).pw_dir, ".local", "state")
    return state / "poseidon"


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
