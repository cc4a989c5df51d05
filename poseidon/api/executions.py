"""/runners/{id}/execute and the WebSocket."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import trio
from quart import Blueprint, Response, g, request
from quart import websocket as current_websocket
from quart.wrappers import Websocket

from poseidon.api.answers import json, problem
from poseidon.api.bodies import parse, raw_body
from poseidon.api.messages import GOING_AWAY, NORMAL, START, TERMINAL, Decoder, final_message, understand
from poseidon.api.parts import Claims, Executions
from poseidon.api.queries import query
from poseidon.api.schemas import ExecuteBody, ExecutionQuery
from poseidon.api.surroundings import Surroundings
from poseidon.core.model import ExecutionId, RunnerId
from poseidon.executors.base import Stream
from poseidon.runners.execution_outcomes import SHUTDOWN, Input, Outcome

log = structlog.get_logger(__name__)


def executions_routes(claims: Claims, executions: Executions, surroundings: Surroundings) -> Blueprint:
    """Commands in runners."""
    routes = Blueprint("executions", __name__, url_prefix="/api/v1/runners/<runner>")

    @routes.post("/execute")
    async def execute(runner: str) -> Response:
        raw = await raw_body()
        claims.used(RunnerId(runner))
        wanted = parse(raw, ExecuteBody)
        execution = await executions.create(RunnerId(runner), wanted.as_command(), time_limit=wanted.time_limit)
        called = surroundings.called(request._get_current_object())  # type: ignore[attr-defined]
        path = f"/api/v1/runners/{runner}/websocket?executionID={execution}"
        return json({"websocketUrl": called.websocket + path})

    @routes.get("/websocket")
    async def no_websocket(runner: str) -> Response:
        executions.find(RunnerId(runner), ExecutionId(query(ExecutionQuery).execution))
        return problem(400, "a WebSocket handshake is expected", headers={"Sec-WebSocket-Version": "13"})

    @routes.websocket("/websocket")
    async def connect(runner: str) -> Response | None:
        socket: Websocket = current_websocket._get_current_object()  # type: ignore[attr-defined]
        execution = ExecutionId(socket.args.get("executionID", ""))
        with _logged(socket):
            await executions.run(RunnerId(runner), execution, _Client(socket))
        return None

    return routes


@contextmanager
def _logged(socket: Websocket) -> Iterator[None]:
    began = trio.current_time()
    try:
        yield
    finally:
        duration = round(trio.current_time() - began, 4)
        log.debug("websocket ended", path=socket.path, duration=duration, caller=g.get("caller", ""))


class _Client:
    """A WebSocket as an execution's client. With the terminal's subprotocol, text frames are control."""

    def __init__(self, socket: Websocket) -> None:
        self._socket = socket
        self._terminal = TERMINAL in socket.requested_subprotocols
        self._decoder = Decoder()

    async def start(self) -> None:
        await self._socket.accept(subprotocol=TERMINAL if self._terminal else None)
        await self._socket.send(START)

    async def receive(self) -> Input:
        return understand(await self._socket.receive(), terminal=self._terminal)

    async def output(self, stream: Stream, data: bytes) -> None:
        message = self._decoder.decode(stream, data)
        if message is not None:
            await self._socket.send(message)

    async def end(self, outcome: Outcome) -> None:
        final = final_message(outcome)
        for message in [*self._decoder.rest(), *([] if final is None else [final])]:
            await self._socket.send(message)
        await self._socket.close(GOING_AWAY if outcome is SHUTDOWN else NORMAL)
