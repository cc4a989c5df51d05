"""What each route takes and answers, for the OpenAPI document: one entry per route and method.

The routes themselves are registered beside their handlers; a test holds that both lists are the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from poseidon.api import shapes
from poseidon.api.bodies import Body
from poseidon.api.frames import TERMINAL
from poseidon.api.queries import Query
from poseidon.api.schemas import (
    AnyQuery,
    ClaimBody,
    EnvironmentBody,
    ExecuteBody,
    ExecutionQuery,
    FetchQuery,
    FilesBody,
    RunBody,
    WaitQuery,
)
from poseidon.api.schemas_files import ListingQuery, RawQuery

JSON, HTML, BINARY = "application/json", "text/html", "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Answer:
    """One status. *shape* is the body's type; None: it is empty."""

    text: str
    shape: Any = None
    media: str = JSON
    headers: tuple[str, ...] = ()
    """Those of `HEADERS` that it may have."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further types of the body, with what OpenAPI says of each."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. Beside *answers* it has those that every one has, see `openapi.py`."""

    method: str
    path: str
    tag: str
    title: str
    answers: Mapping[int, Answer]
    body: type[Body] | None = None
    query: type[Query] | None = None
    text: str = ""
    is_open: bool = False
    """For everybody: no token is asked for."""
    is_browsable: bool = False
    """The token may be HTTP Basic's password."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Added as it is."""


HEADERS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "Retry-After": ("Seconds to wait before another try.", {"type": "integer", "minimum": 1}),
    "Content-Length": ("Bytes of the file.", {"type": "integer", "minimum": 0}),
    "Content-Disposition": ("The file's name.", {"type": "string"}),
    "Allow": ("The methods that the path has.", {"type": "string"}),
    "Upgrade": ("websocket", {"type": "string"}),
    "Sec-WebSocket-Version": ("The version that is spoken.", {"type": "string"}),
    "WWW-Authenticate": ("How a browser may bring the token.", {"type": "string"}),
}


GONE = Answer("No runner in use has this id: it never had, is idle, or is gone.", shapes.Gone)
NO_ENVIRONMENT = Answer("No environment has this id.", shapes.Problem)
OVERLOAD = Answer(
    "`NOMAD_OVERLOAD`: no room, come back after Retry-After. Other codes: the service or the executor fails.",
    shapes.Fault,
    headers=("Retry-After",),
)
DONE = Answer("Done.")

STATUS = (
    Operation(
        "GET",
        "/health",
        "service",
        "Is all well?",
        {204: Answer("All is well."), 503: Answer("What ails.", shapes.Fault)},
        is_open=True,
    ),
    Operation("GET", "/version", "service", "Which version is it?", {200: Answer("The version.", str)}, is_open=True),
    Operation("GET", "/status", "service", "Everything, for operators", {200: Answer("As of now.", shapes.Status)}),
    Operation(
        "GET",
        "/statistics/execution-environments",
        "service",
        "The pools in numbers",
        {200: Answer("By the environment's id.", dict[str, shapes.Pool])},
    ),
)

ENVIRONMENTS = (
    Operation(
        "GET",
        "/execution-environments",
        "environments",
        "All environments",
        {200: Answer("All of them.", shapes.EnvironmentList)},
        query=FetchQuery,
    ),
    Operation(
        "GET",
        "/execution-environments/{identity}",
        "environments",
        "One environment, and how its pool is doing",
        {200: Answer("The environment.", shapes.Environment), 404: NO_ENVIRONMENT},
        query=FetchQuery,
    ),
    Operation(
        "PUT",
        "/execution-environments/{identity}",
        "environments",
        "Create or change an environment",
        {
            201: Answer("Created."),
            204: Answer("Changed, or refreshed by the same again."),
            404: Answer("It was removed while its pool was waited for.", shapes.Problem),
            500: OVERLOAD,
        },
        EnvironmentBody,
        query=WaitQuery,
        text="Answers when it is durable; the pool is filled in the background. A change of size only scales. Any "
        "other change replaces idle runners, the same again refreshes them one by one; used ones always finish.",
    ),
    Operation(
        "DELETE",
        "/execution-environments/{identity}",
        "environments",
        "Remove an environment with all its runners",
        {204: DONE, 404: NO_ENVIRONMENT},
    ),
)

RUNNERS = (
    Operation(
        "POST",
        "/runners",
        "runners",
        "Claim a runner",
        {200: Answer("It is yours, durably.", shapes.Claim), 404: NO_ENVIRONMENT, 500: OVERLOAD},
        ClaimBody,
        text="Waits, first come, first served, while the pool is empty.",
    ),
    Operation("GET", "/runners", "runners", "All that live", {200: Answer("Idle and used ones.", shapes.RunnerList)}),
    Operation(
        "GET",
        "/runners/{runner}",
        "runners",
        "One runner, living or gone",
        {200: Answer("What is known.", shapes.RunnerInDetail), 404: Answer("There never was one.", shapes.Problem)},
    ),
    Operation(
        "DELETE",
        "/runners/{runner}",
        "runners",
        "Give a runner back; it is destroyed",
        {204: DONE, 410: GONE},
        query=AnyQuery,
    ),
    Operation(
        "PATCH",
        "/runners/{runner}/files",
        "files",
        "Delete and copy files",
        {204: DONE, 410: GONE},
        FilesBody,
        text="First everything in `delete` is removed, then everything in `copy` is written. What fails doesn't keep "
        "the rest from being done; then the answer is 500.",
    ),
    Operation(
        "POST",
        "/runners/{runner}/execute",
        "executions",
        "Prepare an execution",
        {200: Answer("Whoever opens this URL first starts it.", shapes.PreparedExecution), 410: GONE, 500: OVERLOAD},
        ExecuteBody,
    ),
    Operation(
        "GET",
        "/runners/{runner}/websocket",
        "executions",
        "Start an execution, and talk with it",
        {
            101: Answer("The execution begins.", headers=("Upgrade",)),
            400: Answer("Not a WebSocket's handshake.", shapes.Problem, headers=("Sec-WebSocket-Version",)),
            403: Answer("A page of another host asks for it, or the token's role doesn't allow it.", shapes.Problem),
            404: Answer("No execution with this id waits.", shapes.Problem),
            410: GONE,
            500: OVERLOAD,
        },
        query=ExecutionQuery,
        text="A WebSocket. Each text frame from the service is one `WebSocketToClient` message: `start` first, exactly "
        "one final one last, then the close. Each frame to the service is stdin, text or binary, as it is. With the "
        "subprotocol `poseidon.terminal.v1` binary frames are stdin, and text frames `WebSocketFromClient` messages. "
        "The messages alone are in `websocket-schema.json`.",
        more={
            "x-websocket": {
                "subprotocols": [TERMINAL],
                "toClient": {"$ref": "#/components/schemas/WebSocketToClient"},
                "fromClient": {"$ref": "#/components/schemas/WebSocketFromClient"},
            }
        },
    ),
)

DESCRIPTION = (
    Operation(
        "GET",
        "/openapi.json",
        "service",
        "This document",
        {200: Answer("OpenAPI 3.1.", dict[str, object])},
        is_browsable=True,
    ),
    Operation(
        "GET",
        "/websocket-schema.json",
        "service",
        "The messages of the executions' WebSocket",
        {200: Answer("JSON Schema 2020-12.", dict[str, object])},
        is_browsable=True,
    ),
    Operation(
        "GET", "/docs", "service", "A page to try the API on", {200: Answer("It.", str, HTML)}, is_browsable=True
    ),
    Operation(
        "GET",
        "/docs/start.js",
        "service",
        "A part of the page",
        {200: Answer("It.", str, "text/javascript")},
        is_browsable=True,
    ),
    Operation(
        "GET",
        "/docs/{asset}",
        "service",
        "Parts of the page",
        {
            200: Answer("One.", more={media: {} for media in ("text/javascript", "text/css", "image/svg+xml")}),
            404: Answer("There is no such part.", shapes.Problem),
        },
        is_browsable=True,
    ),
)

NOT_ACCESSIBLE = Answer("There is no such file, or it can't be read with these rights.", shapes.Problem)

FILES = (
    Operation(
        "GET",
        "/runners/{runner}/files",
        "files",
        "List files",
        {200: Answer("All of them.", shapes.FileList), 410: GONE, 424: NOT_ACCESSIBLE},
        query=ListingQuery,
        text="Hidden files are left out. No link is followed.",
    ),
    Operation(
        "GET",
        "/runners/{runner}/files/raw",
        "files",
        "Download a file",
        {
            200: Answer("Its content.", more={BINARY: {}}, headers=("Content-Length", "Content-Disposition")),
            410: GONE,
            424: NOT_ACCESSIBLE,
        },
        query=RawQuery,
        text="Regular files only. The connection is cut before the end if the file becomes shorter meanwhile.",
    ),
)

RUNS = (
    Operation(
        "POST",
        "/runs",
        "runs",
        "Run one command on a runner of its own",
        {200: Answer("How it went, whatever its outcome.", shapes.Run), 404: NO_ENVIRONMENT, 500: OVERLOAD},
        RunBody,
        text="Claims a runner, copies the files, runs the command without a terminal, and destroys the runner. Answers "
        "when it is over; a client that hangs up ends it.",
    ),
)

OPERATIONS = (*STATUS, *DESCRIPTION, *ENVIRONMENTS, *RUNNERS, *FILES, *RUNS)
