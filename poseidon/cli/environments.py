"""`poseidon environments`: what to run in."""

import click
import msgspec

from poseidon.cli import wire
from poseidon.cli.api import Api
from poseidon.cli.output import ask, table

IDENTIFIER = click.IntRange(min=0)
COUNT = click.IntRange(min=0)
PORT = click.IntRange(0, 65535)


@click.group()
def environments() -> None:
    """List, create, change and remove environments: image, limits and pool size of runners."""


@environments.command("list")
@click.option("--json", "as_json", is_flag=True, help="As JSON, a list.")
def list_(as_json: bool) -> None:
    """Show all environments."""
    known = ask(lambda api: api.environments())
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(known), indent=2).decode())
    else:
        print("\n".join(rows(known)))


def rows(known: list[wire.Environment]) -> list[str]:
    """One line an environment."""
    head = ("ID", "IMAGE", "POOL", "CPU", "MEMORY", "NETWORK", "PORTS")
    return table(
        head,
        [
            (
                it.id,
                it.image,
                it.prewarming_pool_size,
                it.cpu_limit,
                it.memory_limit,
                it.network_access,
                it.exposed_ports,
            )
            for it in known
        ],
    )


@environments.command()
@click.argument("identifier", metavar="ID", type=IDENTIFIER)
@click.option("--image", help="What runners are made of (default: `default`).")
@click.option("--pool-size", type=COUNT, metavar="N", help="Idle runners to keep ready (default: 1).")
@click.option("--cpu", type=COUNT, metavar="MHZ", help="CPU share (default: 0, the executor's default).")
@click.option("--memory", type=COUNT, metavar="MB", help="Memory limit (default: 0, the executor's default).")
@click.option("--network/--no-network", default=None, help="Access to the network (default: none).")
@click.option("--port", "ports", type=PORT, multiple=True, help="A port to expose (again for more).")
def put(  # noqa: PLR0917 - click passes them by name
    identifier: int,
    image: str | None,
    pool_size: int | None,
    cpu: int | None,
    memory: int | None,
    network: bool | None,
    ports: tuple[int, ...],
) -> None:
    """Create environment ID, or change it.

    Of an environment that exists, what isn't given stays as it is. Runners in use are left alone; idle ones are
    replaced if more than the size of the pool is said.
    """
    changes = {
        "image": image,
        "prewarming_pool_size": pool_size,
        "cpu_limit": cpu,
        "memory_limit": memory,
        "network_access": network,
        "exposed_ports": list(ports) or None,
    }
    given: dict[str, object] = {name: value for name, value in changes.items() if value is not None}
    created = ask(lambda api: change(api, identifier, given))
    print(f"environment {identifier} {'created' if created else 'changed'}")


async def change(api: Api, identifier: int, given: dict[str, object]) -> bool:
    """Put the environment with what is *given* and, for the rest, what it has; whether it is new."""
    fresh = wire.Environment(id=identifier, image="default", prewarming_pool_size=1, exposed_ports=[])
    present = {known.id: known for known in await api.environments()}
    before = present.get(identifier, fresh)
    whole = {"exposed_ports": before.exposed_ports or []} | given
    return await api.put_environment(msgspec.structs.replace(before, **whole))


@environments.command()
@click.argument("identifiers", metavar="ID...", type=IDENTIFIER, nargs=-1, required=True)
def rm(identifiers: tuple[int, ...]) -> None:
    """Remove environments with all their runners, those in use included."""

    async def remove(api: Api) -> None:
        for identifier in identifiers:
            await api.remove_environment(identifier)
            print(f"environment {identifier} removed", flush=True)

    ask(remove)
