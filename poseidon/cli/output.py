"""What commands print: tables, times, and the one way to talk to the daemon once."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import TypeVar

import click
import trio

from poseidon.cli.api import Api, open_api
from poseidon.cli.failures import printable
from poseidon.cli.target import Options, find_target

T = TypeVar("T")


def ask(work: Callable[[Api], Awaitable[T]]) -> T:
    """Do *work* with the daemon that the command line means."""
    target = find_target(click.get_current_context().find_object(Options) or Options())

    async def connected() -> T:
        async with open_api(target) as api:
            return await work(api)

    return trio.run(connected)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of aligned columns; numbers to the right."""
    cells = [list(head), *([printable(shown(cell)) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    right = [all(is_number(row[column]) for row in cells[1:]) and len(cells) > 1 for column in range(len(head))]
    return ["  ".join(map(aligned, row, widths, right)).rstrip() for row in cells]


def aligned(cell: str, width: int, right: bool) -> str:
    """*cell* in its column."""
    return cell.rjust(width) if right else cell.ljust(width)


def is_number(cell: str) -> bool:
    """Whether it wants to stand to the right."""
    return cell == "-" or cell.isdigit()


def shown(value: object) -> str:
    """*value* for a person."""
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.1f}"
        case list() | tuple():
            return ",".join(map(str, value)) or "-"
        case _:
            return str(value)


def ago(then: str | float | None, now: datetime) -> str:
    """How long ago (or, of the future, in how long) a time of the API is: `5 s`, `in 3 min`."""
    moment = parsed(then)
    if moment is None:
        return "-"
    seconds = (now - moment).total_seconds()
    return duration(seconds) if seconds > -1 else f"in {duration(-seconds)}"


def parsed(then: str | float | None) -> datetime | None:
    """A time as the API gives it: ISO 8601, or seconds since the epoch."""
    try:
        match then:
            case str():
                moment = datetime.fromisoformat(then)
                return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
            case int() | float():
                return datetime.fromtimestamp(then, UTC)
    except (ValueError, OverflowError, OSError):
        pass
    return None


def duration(seconds: float) -> str:
    """In the largest unit that leaves two digits or so."""
    for unit, size, most in (("s", 1, 120), ("min", 60, 120 * 60), ("h", 3600, 72 * 3600)):
        if seconds < most:
            return f"{max(seconds, 0) / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
