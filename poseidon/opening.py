"""What the configuration becomes: sockets, executors, settings of the parts."""

import errno
import os
import socket
from contextlib import AsyncExitStack
from functools import partial
from ipaddress import ip_network

from poseidon import __version__
from poseidon.api.auth import Keyring
from poseidon.api.pace import Pace
from poseidon.api.parts import ApiSettings
from poseidon.api.surroundings import Surroundings
from poseidon.config import Config, load_config
from poseidon.config import NomadSettings as NomadConfig
from poseidon.config import ServerSettings as ServerConfig
from poseidon.config_access import UNIX
from poseidon.core.model import Environment, EnvironmentId
from poseidon.errors import ConfigError
from poseidon.executors.base import Executor
from poseidon.executors.local.executor import open_local
from poseidon.executors.local.ledger import SandboxRecord
from poseidon.executors.local.settings import LocalSettings
from poseidon.executors.nomad.settings import NomadSettings
from poseidon.store.ledger import StoreLedger
from poseidon.store.store import Store
from poseidon.telemetry.logging import setup_logging

BACKLOG = 1024


async def open_executors(config: Config, store: Store, stack: AsyncExitStack) -> list[Executor]:
    """Those that are enabled. Raises ConfigError if none is, or if one can't keep what it must promise."""
    executors: list[Executor] = []
    if config.nomad.url:
        from poseidon.executors.nomad.executor import open_nomad  # only who has a cluster pays for importing it

        executors.append(
            await stack.enter_async_context(open_nomad(nomad_settings(config.nomad), partial(read_token, config)))
        )
    if config.uses_local:
        settings = LocalSettings(**config.local.model_dump(exclude={"enabled"}))
        ledger = StoreLedger(store, SandboxRecord)
        executors.append(await stack.enter_async_context(open_local(settings, config.state, ledger)))
    if not executors:
        raise ConfigError("no executor is enabled: set local.enabled or nomad.address")
    return executors


def api_settings(config: ServerConfig, keyring: Keyring, executor: str) -> ApiSettings:
    """As the API wants them."""
    surroundings = Surroundings(
        config.base_url,
        tuple(ip_network(each) for each in config.trusted_proxies if each != UNIX),
        UNIX in config.trusted_proxies,
        config.allowed_origins,
    )
    pace = Pace(config.limits.starts_per_second, config.limits.starts_at_once)
    return ApiSettings(keyring, __version__, executor, surroundings, pace)


def read_token(config: Config) -> str:
    """The cluster's token, as the configuration or its file says by now. Raises ConfigError."""
    fresh = load_config(config.origin, os.environ)
    if fresh.nomad.token != config.nomad.token:
        setup_logging(fresh.logging.level, fresh.logging.format, secrets=config.secrets() + fresh.secrets())
    return fresh.nomad.token


def nomad_settings(wanted: NomadConfig) -> NomadSettings:
    """As the executor wants them."""
    return NomadSettings(
        address=wanted.url,
        token=wanted.token,
        namespace=wanted.namespace,
        region=wanted.region,
        tls_ca_file=wanted.tls.ca_file,
        tls_cert_file=wanted.tls.cert_file,
        tls_key_file=wanted.tls.key_file,
        template_job_file=wanted.template_job_file,
        disable_force_pull=wanted.disable_force_pull,
        network_mode=wanted.network.mode,
        mark_used=wanted.mark_used,
        set_user=wanted.set_user,
        direct_exec=wanted.direct_exec,
        start_timeout=wanted.start_timeout,
        list_interval=wanted.list_interval,
        exec_connections=wanted.exec_connections,
    )


def environments_of(config: Config, executor: str) -> list[Environment]:
    """Those of the configuration."""
    return [
        Environment(
            EnvironmentId(number),
            wanted.image,
            wanted.pool_size,
            wanted.cpu_limit,
            wanted.memory_limit,
            wanted.network_access,
            wanted.exposed_ports,
            wanted.executor or executor,
        )
        for number, wanted in config.environments.items()
    ]


def listen(address: str, port: int) -> list[socket.socket]:
    """Sockets that listen there. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"server.address {address!r}: {error.strerror}") from error
    sockets = []
    for family, kind, protocol, _, where in found[:1]:
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(where)
            bound.listen(BACKLOG)
        except OSError as error:
            bound.close()
            hint = " (is Poseidon running already? server.port sets another)" if error.errno == errno.EADDRINUSE else ""
            raise ConfigError(f"can't listen on {address} port {port}: {error.strerror}{hint}") from error
        bound.setblocking(False)
        sockets.append(bound)
    return sockets
