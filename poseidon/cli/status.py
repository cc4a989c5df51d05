"""`poseidon status`: health, pools, runners and services at a glance, once or again and again."""

import os
import shutil
import sys
from contextlib import suppress
from datetime import UTC, datetime

import click
import msgspec
import trio

from poseidon.cli import wire
from poseidon.cli.api import Api, parse
from poseidon.cli.failures import FAILED, CommandFailed, DaemonUnreachable, printable
from poseidon.cli.output import ago, ask, shown, table

HOME_AND_CLEAR = "\x1b[H\x1b[J"
CLEAR_LINE_END = "\x1b[K"


@click.command()
@click.option("--watch", "-w", is_flag=True, help="Show it again and again, until Ctrl-C.")
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds between looks."
)
@click.option("--json", "as_json", is_flag=True, help="The daemon's own answer (with --watch one line each time).")
def status(watch: bool, interval: float, as_json: bool) -> int:
    """Show health, pools, runners and services of the daemon.

    Exit codes: 0 if the daemon is well, 1 if it isn't or can't be reached; so `poseidon status > /dev/null` is a check.
    With --watch a daemon that can't be reached is shown as such and looked for again.
    """
    if not watch:
        return ask(lambda api: show(api, as_json=as_json))
    with suppress(KeyboardInterrupt):
        ask(lambda api: follow(api, interval, as_json=as_json))
    return 0


async def show(api: Api, *, as_json: bool) -> int:
    """Once; the exit code."""
    health = await api.health()
    content = await api.status()
    print(indented(content) if as_json else "\n".join(report(health, content, datetime.now(UTC))))
    return FAILED if health else 0


async def follow(api: Api, interval: float, *, as_json: bool) -> None:
    """For ever."""
    while True:
        display(await line(api) if as_json else await picture(api), redraw=not as_json)
        await trio.sleep(interval)


async def line(api: Api) -> list[str]:
    """The daemon's state in one line of JSON."""
    try:
        return [msgspec.json.encode(parse(await api.status(), object)).decode()]
    except DaemonUnreachable as error:
        return [msgspec.json.encode({"error": error.message}).decode()]


async def picture(api: Api) -> list[str]:
    """The daemon's state, or why there is none."""
    now = datetime.now(UTC)
    try:
        lines = report(await api.health(), await api.status(), now)
    except CommandFailed as error:
        lines = [printable(error.message)]
    return [f"{now.astimezone():%H:%M:%S}  {api.target.url}  (Ctrl-C ends)", "", *lines]


def display(lines: list[str], *, redraw: bool) -> None:
    """In place on a terminal, one after the other elsewhere."""
    if redraw and os.isatty(sys.stdout.fileno()):
        width, height = shutil.get_terminal_size()
        lines = [line[:width] for line in lines[: height - 1]]
        sys.stdout.write(HOME_AND_CLEAR + "".join(f"{line}{CLEAR_LINE_END}\n" for line in lines))
    else:
        sys.stdout.write("\n".join(lines) + ("\n\n" if redraw else "\n"))
    sys.stdout.flush()


def indented(content: bytes) -> str:
    """JSON for a person."""
    return msgspec.json.format(msgspec.json.encode(parse(content, object)), indent=2).decode()


def report(health: str, content: bytes, now: datetime) -> list[str]:
    """The whole picture."""
    state = parse(content, wire.Status)
    condition = "draining" if state.draining else printable(health) or "well"
    counts = ", ".join(f"{state.runners.get(phase, 0)} {phase}" for phase in ("idle", "used", "starting"))
    head = [f"poseidon {state.version}: {condition}, up {ago(state.started_at, now)}", f"runners: {counts}"]
    parts = [head, pools(state), services(state, now), executors(state), abilities(state), store(state)]
    return "\n\n".join("\n".join(part) for part in parts if part).split("\n")


def pools(state: wire.Status) -> list[str]:
    """One line an environment."""
    if not state.environments:
        return ["no environments (see poseidon environments put --help)"]
    head = ("ENVIRONMENT", "IMAGE", "WANTED", "IDLE", "STARTING", "USED", "WAITING", "STATE")
    rows = [
        (pool.id, pool.image, pool.wanted, pool.idle, pool.starting, pool.used, pool.waiting, condition(pool))
        for pool in state.environments
    ]
    return table(head, rows)


def condition(pool: wire.Pool) -> str:
    """How a pool does."""
    return ": ".join(part for part in (pool.status, pool.message) if part)


def services(state: wire.Status, now: datetime) -> list[str]:
    """One line a service."""
    rows = [(it.name, it.state, ago(it.since, now), it.crashes, it.error) for it in state.services]
    return table(("SERVICE", "STATE", "SINCE", "CRASHES", "LAST ERROR"), rows) if rows else []


def executors(state: wire.Status) -> list[str]:
    """One line an executor."""
    rows = [(it.name, "reachable" if it.reachable else it.trouble or "starting", news(it)) for it in state.executors]
    return table(("EXECUTOR", "STATE", "NEWS"), rows) if rows else []


def news(executor: wire.Executor) -> str:
    """How fresh what we know is."""
    stream = executor.stream
    if stream is None:
        return "at once"
    figures = [(stream.age, "heard {:.1f} s ago"), (stream.lag, "newest told after {:.3f} s")]
    parts = [phrase.format(seconds) for seconds, phrase in figures if seconds is not None]
    return ", ".join([*parts, f"{stream.breaks} breaks"])


def abilities(state: wire.Status) -> list[str]:
    """One line a promise of an executor."""
    rows = [(it.executor, it.name, it.holds, it.how) for it in state.abilities]
    return table(("EXECUTOR", "PROMISE", "HOLDS", "HOW"), rows) if rows else []


def store(state: wire.Status) -> list[str]:
    """The database's figures in one line."""
    figures = ", ".join(f"{name} {shown(value)}" for name, value in state.store.items())
    return [f"store: {printable(figures)}"] if figures else []
