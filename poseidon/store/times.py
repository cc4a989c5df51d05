"""Times at the edge of the database: UTC ISO-8601 text with milliseconds there, seconds since the epoch here."""

from datetime import UTC, datetime, timedelta
from typing import overload

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MILLISECOND = timedelta(milliseconds=1)


@overload
def to_text(seconds: float) -> str: ...
@overload
def to_text(seconds: None) -> None: ...
@overload
def to_text(seconds: float | None) -> str | None: ...
def to_text(seconds: float | None) -> str | None:
    """Such as '2026-11-30T08:48:41.123Z': sorts as text, and reads well in the sqlite3 shell."""
    if seconds is None:
        return None
    moment = EPOCH + round(seconds * 1000) * MILLISECOND
    return moment.isoformat(timespec="milliseconds")[:-6] + "Z"


@overload
def from_text(text: str) -> float: ...
@overload
def from_text(text: None) -> None: ...
@overload
def from_text(text: str | None) -> float | None: ...
def from_text(text: str | None) -> float | None:
    """Whole milliseconds come back as the very float that they were."""
    if text is None:
        return None
    return (datetime.fromisoformat(text) - EPOCH) // MILLISECOND / 1000
