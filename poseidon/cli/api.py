"""The daemon's HTTP API from the client's side: one method a call, errors in words for a person."""

from base64 import b64encode
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import TypeVar

import httpx
import msgspec

from poseidon.cli import wire
from poseidon.cli.failures import CommandFailed, DaemonRefused, DaemonUnreachable, UnexpectedAnswer, printable
from poseidon.cli.target import Target, authorities

T = TypeVar("T")

ONCE = httpx.Limits(max_keepalive_connections=0)
"""A connection for each call: one that is kept may be closed by the daemon in the very moment of the next call."""

TIMEOUT = httpx.Timeout(60, connect=5)
"""A claim may wait for a runner, a large copy takes its time; whoever listens accepts at once."""


class Api:
    """Calls to one daemon."""

    def __init__(self, target: Target, http: httpx.AsyncClient) -> None:
        self.target = target
        self._http = http

    async def health(self) -> str:
        """Empty if the daemon is well, else what ails it."""
        answer = await self._call("GET", "/health", expected=(204, 503))
        return "" if answer.status_code == HTTPStatus.NO_CONTENT else self._read(answer, wire.Problem).message

    async def status(self) -> bytes:
        """The state of everything, as JSON."""
        return (await self._call("GET", "/status")).content

    async def environments(self) -> list[wire.Environment]:
        """All environments."""
        answer = await self._call("GET", "/execution-environments")
        return sorted(self._read(answer, wire.Environments).execution_environments or [], key=lambda known: known.id)

    async def put_environment(self, environment: wire.Environment) -> bool:
        """Create or replace it; whether it is new."""
        path = f"/execution-environments/{environment.id}"
        answer = await self._call("PUT", path, msgspec.to_builtins(environment), expected=(201, 204))
        return answer.status_code == HTTPStatus.CREATED

    async def remove_environment(self, environment: int) -> None:
        """Remove it with all its runners."""
        await self._call("DELETE", f"/execution-environments/{environment}", expected=(204,))

    async def runners(self) -> list[wire.Runner]:
        """All runners that aren't gone."""
        answer = await self._call("GET", "/runners")
        return [known for known in self._read(answer, wire.Runners).runners if known.phase != "gone"]

    async def claim(self, environment: int, *, inactivity_timeout: int) -> str:
        """A runner of one's own."""
        body = {"executionEnvironmentId": environment, "inactivityTimeout": inactivity_timeout}
        return self._read(await self._call("POST", "/runners", body), wire.Claimed).runner_id

    async def release(self, runner: str, *, idle_too: bool = False) -> bool:
        """Destroy a runner; False if it was gone already."""
        path = f"/runners/{runner}" + ("?any=true" if idle_too else "")
        answer = await self._call("DELETE", path, expected=(204, 410))
        return answer.status_code == HTTPStatus.NO_CONTENT

    async def copy(self, runner: str, files: Mapping[str, bytes]) -> None:
        """Put *files* into the workspace, by their paths there."""
        copied = [{"path": path, "content": b64encode(content).decode()} for path, content in files.items()]
        await self._call("PATCH", f"/runners/{runner}/files", {"copy": copied, "delete": []}, expected=(204,))

    async def execute(self, runner: str, body: Mapping[str, object]) -> str:
        """Prepare an execution; the address of its WebSocket."""
        answer = await self._call("POST", f"/runners/{runner}/execute", dict(body))
        return self._read(answer, wire.Created).websocket_url

    async def _call(
        self, method: str, path: str, body: object = None, *, expected: Collection[int] = (200,)
    ) -> httpx.Response:
        content = None if body is None else msgspec.json.encode(body)
        with self._transport_errors():
            answer = await self._http.request(method, f"/api/v1{path}", content=content)
        if answer.status_code not in expected:
            raise self._refusal(answer)
        return answer

    @contextmanager
    def _transport_errors(self) -> Iterator[None]:
        url = self.target.url
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            start = "start it with `poseidon serve`, or name another one with --url"
            raise DaemonUnreachable(f"no daemon answers at {url} ({_reason(error)}); {start}") from error
        except httpx.TimeoutException as error:
            raise DaemonUnreachable(f"the daemon at {url} didn't answer in time") from error
        except httpx.DecodingError as error:
            raise UnexpectedAnswer(f"{url} answers with what can't be decoded: {error}") from error
        except httpx.TransportError as error:
            raise DaemonUnreachable(f"lost the connection to {url}: {str(error) or type(error).__name__}") from error
        except (httpx.InvalidURL, UnicodeError) as error:
            raise CommandFailed(f"{url!r} is no URL of a daemon: {error}") from error

    def _refusal(self, answer: httpx.Response) -> CommandFailed:
        """Why the daemon doesn't do what we asked."""
        status = answer.status_code
        if status == HTTPStatus.UNAUTHORIZED:
            return DaemonRefused(self._token_refused(), http_status=status)
        try:
            problem = msgspec.json.decode(answer.content, type=wire.Problem)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return self._strange(answer) if answer.content else DaemonRefused(self._bare(answer), http_status=status)
        return DaemonRefused(problem.message, http_status=status)

    def _token_refused(self) -> str:
        said = "refuses this token" if self.target.token else "wants a token"
        return f"the daemon at {self.target.url} {said}: give it with --token-file or POSEIDON_TOKEN"

    def _bare(self, answer: httpx.Response) -> str:
        request = answer.request
        return f"{request.method} {request.url} was answered with {answer.status_code} {answer.reason_phrase}"

    def _strange(self, answer: httpx.Response) -> UnexpectedAnswer:
        start = printable(answer.text[:60])
        return UnexpectedAnswer(f"unexpected answer (is this a Poseidon daemon?): {self._bare(answer)}: {start!r}")

    def _read(self, answer: httpx.Response, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._strange(answer) from error


@asynccontextmanager
async def open_api(target: Target) -> AsyncIterator[Api]:
    """Connections to the daemon. Proxies of the environment are ignored: the token is meant for the daemon alone."""
    headers = {"Poseidon-Token": target.token} if target.token else {}
    headers |= {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    verify = authorities(target) if target.url.startswith("https:") else False  # saves loading certificates
    with _usable(target):
        http = httpx.AsyncClient(
            base_url=target.url, headers=headers, timeout=TIMEOUT, limits=ONCE, trust_env=False, verify=verify
        )
    async with http:
        yield Api(target, http)


@contextmanager
def _usable(target: Target) -> Iterator[None]:
    try:
        yield
    except (httpx.InvalidURL, UnicodeError) as error:
        raise CommandFailed(f"can't call {target.url!r} with this token: {error}") from error


def _reason(error: BaseException | None) -> str:
    """Why there is no connection; an error without words has been made of one that has some."""
    if isinstance(error, httpx.ConnectTimeout):
        return "timed out"
    while error is not None:
        if text := str(error):
            return printable(text)
        error = error.__cause__ or error.__context__
    return "no connection"


def parse(content: bytes, kind: type[T]) -> T:
    """*content* as *kind*."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UnexpectedAnswer(f"unexpected answer (is this a Poseidon daemon?): {error}") from error
