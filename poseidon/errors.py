"""Every error that Poseidon raises on purpose.

PoseidonError                      500 UNKNOWN
├── ConfigError                    a setting is missing or wrong (start-up only)
├── ServiceKeepsCrashing           a part of the daemon fails again and again; ends it
├── StoreError                     500 UNKNOWN   the database can't be used
│   ├── StoreLocked                another daemon holds it
│   ├── StoreTooNew                made by a newer Poseidon
│   └── StoreCorrupt               not a database, or damaged
├── BadRequest                     400           what the client sent can't be understood or isn't allowed
│   └── Unsupported                400           this executor can't do what the environment asks for
├── Unauthorized                   401
├── Forbidden                      403           the token's role, or where the request comes from, doesn't allow it
├── Misdirected                    421           meant for another host
├── EnvironmentNotFound            404
├── ExecutionNotFound              404
├── RunnerGone                     410           no runner in use has this id (any more)
├── FilesNotAccessible             424           file not found, or no permission
├── Overloaded                     500 NOMAD_OVERLOAD   no runner in time; try again
│   └── Draining                   500 NOMAD_OVERLOAD   the daemon is about to stop
├── FilesFailed                    500 UNKNOWN   a file operation inside the runner failed
└── ExecutorError                  500 NOMAD_INTERNAL_SERVER_ERROR
    ├── ExecutorUnreachable        500 NOMAD_UNREACHABLE   retry later; unknown whether it was done
    ├── PlacementFailed            500 NOMAD_OVERLOAD      no room for this job now
    │   └── BudgetExhausted        runners have all that they may; another pool could spare one
    ├── AllocationGone             the allocation that a command was meant for doesn't run
    └── ConnectionLost             an execution's connection ended without an exit code

Messages are lower case, without a full stop. Foreign errors are translated where they enter.
"""

from typing import ClassVar


class PoseidonError(Exception):
    """Base of all. *message* is meant for the client and holds no secrets."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "UNKNOWN"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigError(PoseidonError):
    """A setting is missing or wrong; the message names file, key and what was expected."""


class ServiceKeepsCrashing(PoseidonError):
    """A part of the daemon crashed too often; only a new start of the whole may help."""


class StoreError(PoseidonError):
    """The database can't be used."""


class StoreLocked(StoreError):
    """Another daemon works on this database."""


class StoreTooNew(StoreError):
    """The database was made by a newer Poseidon."""


class StoreCorrupt(StoreError):
    """The file isn't a database, or is damaged."""


class BadRequest(PoseidonError):
    """What the client sent can't be understood or isn't allowed."""

    status = 400


class Unsupported(BadRequest):
    """The executor can't do what the environment asks for."""


class Unauthorized(PoseidonError):
    """The token is missing or wrong."""

    status = 401


class Forbidden(PoseidonError):
    """Known, but not allowed: by the token's role, or by where the request comes from."""

    status = 403


class Misdirected(PoseidonError):
    """The request is meant for a host that we aren't, for all we know."""

    status = 421


class EnvironmentNotFound(PoseidonError):
    """No environment has this id."""

    status = 404


class ExecutionNotFound(PoseidonError):
    """No execution with this id waits for its WebSocket."""

    status = 404


class RunnerGone(PoseidonError):
    """No runner in use has this id (any more)."""

    status = 410


class FilesNotAccessible(PoseidonError):
    """A file doesn't exist or can't be read."""

    status = 424


class Overloaded(PoseidonError):
    """No runner became free in time. *retry_after* in seconds is a hint for the client."""

    code = "NOMAD_OVERLOAD"

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Draining(Overloaded):
    """The daemon is about to stop and takes no new work."""


class FilesFailed(PoseidonError):
    """A file operation inside the runner failed; the message holds what the tool said."""


class ExecutorError(PoseidonError):
    """What runs our jobs failed."""

    code = "NOMAD_INTERNAL_SERVER_ERROR"


class ExecutorUnreachable(ExecutorError):
    """The executor didn't answer; whether the request was carried out is unknown."""

    code = "NOMAD_UNREACHABLE"


class PlacementFailed(ExecutorError):
    """The executor has no room for this job; the message says what is exhausted."""

    code = "NOMAD_OVERLOAD"


class BudgetExhausted(PlacementFailed):
    """The executor's runners have all that they may: one runner less, and this one would fit."""


class AllocationGone(ExecutorError):
    """The allocation that a command was meant for doesn't run (any more)."""


class ConnectionLost(ExecutorError):
    """The connection of an execution ended before its exit code came."""


class LeftRunning(ConnectionLost):
    """A command was lost while it began, and may run on: what it runs in must not be used any more."""
