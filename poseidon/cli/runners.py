"""`poseidon runners`: which there are, and stopping them."""

from datetime import UTC, datetime

import click
import msgspec

from poseidon.cli import wire
from poseidon.cli.api import Api
from poseidon.cli.failures import CommandFailed
from poseidon.cli.output import ago, ask, table


@click.group()
def runners() -> None:
    """List runners, and stop them."""


@runners.command("list")
@click.option("--environment", "-e", type=int, metavar="ID", help="Only those of this environment.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, a list.")
def list_(environment: int | None, as_json: bool) -> None:
    """Show all runners, idle ones and those in use."""
    known = ask(lambda api: selected(api, environment))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(known), indent=2).decode())
    else:
        print("\n".join(rows(known, datetime.now(UTC))))


async def selected(api: Api, environment: int | None) -> list[wire.Runner]:
    """All runners, or those of one environment."""
    return [known for known in await api.runners() if environment in (None, known.environment_id)]


def rows(known: list[wire.Runner], now: datetime) -> list[str]:
    """One line a runner."""
    head = ("RUNNER", "ENVIRONMENT", "PHASE", "NODE", "READY", "CLAIMED", "EXPIRES")
    return table(
        head,
        [
            (
                it.id,
                it.environment_id,
                it.phase,
                it.node,
                *(ago(at, now) for at in (it.ready_at, it.claimed_at, it.expires_at)),
            )
            for it in known
        ],
    )


@runners.command()
@click.argument("identifiers", metavar="[ID]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All of them, idle ones and those in use.")
@click.option("--environment", "-e", type=int, metavar="ID", help="With --all: only those of this environment.")
def stop(identifiers: tuple[str, ...], everything: bool, environment: int | None) -> int:
    """Stop runners, with whatever runs in them.

    Pools are filled again at once: to have fewer runners, change the environment's pool size. Exit code 1 if one of
    the named runners wasn't there (any more).
    """
    if everything == bool(identifiers):
        raise click.UsageError("name the runners to stop, or say --all")
    if environment is not None and not everything:
        raise click.UsageError("--environment goes with --all")
    return ask(lambda api: stop_all(api, environment) if everything else stop_named(api, identifiers))


async def stop_all(api: Api, environment: int | None) -> int:
    """Stop those that are there now; the exit code."""
    known = await selected(api, environment)
    stopped = [await api.release(runner.id, idle_too=True) for runner in known]
    print(f"{sum(stopped)} runners stopped")
    return 0


async def stop_named(api: Api, identifiers: tuple[str, ...]) -> int:
    """Stop each of them; the exit code."""
    missing = []
    for identifier in identifiers:
        if await api.release(identifier, idle_too=True):
            print(f"runner {identifier} stopped", flush=True)
        else:
            missing.append(identifier)
    if missing:
        raise CommandFailed(f"no such runner (any more): {', '.join(missing)}")
    return 0
