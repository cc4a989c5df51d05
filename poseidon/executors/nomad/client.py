"""Short requests to Nomad, and its stream: typed answers, bounded in number and time, errors translated.

It doesn't retry and doesn't decide. Tokens are in no error and no log.
"""

import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import httpx
import msgspec
import trio

from poseidon.errors import ExecutorError, ExecutorUnreachable
from poseidon.executors.nomad import wire
from poseidon.executors.nomad.credentials import Credentials
from poseidon.executors.nomad.settings import NomadSettings
from poseidon.executors.nomad.stream import Answer, StreamBroken, open_stream, words_of
from poseidon.executors.trust import Trust

T = TypeVar("T")
Decoder = msgspec.json.Decoder

JOB = Decoder(wire.Job)
JSON = Decoder(dict[str, Any])
RAW = Decoder(msgspec.Raw)
WHOLE_JOB = Decoder(wire.WholeJob)
ALLOCATIONS = Decoder(list[wire.Allocation])
ALLOCATION = Decoder(wire.Allocation)
EVALUATION = Decoder(wire.Evaluation)
EVALUATIONS = Decoder(list[wire.Evaluation])
STUBS = Decoder(list[wire.JobStub])
NODE = Decoder(wire.Node)
REGISTERED = Decoder(wire.Registered)
DEREGISTERED = Decoder(wire.Deregistered)

LONGEST_TEXT = 300
LONGEST_NUMBER = 18
"""Digits that surely fit into 63 bits."""
ENFORCED = "Enforcing job modify index"
_refused_token = re.compile(r"permission denied|acl token|acl token lookup failed", re.IGNORECASE)
_invalid = re.compile(r"\d+ errors? occurred|nonexistent namespace|Job ID does not match|Job must be specified")


class Refused(ExecutorError):
    """Nomad understood and won't do it; asking again is no use."""


class NotFound(Refused):
    """Nomad has no such thing, as of *index* (0: not told)."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


class TokenRefused(ExecutorUnreachable):
    """Nothing was done; with another token it may be."""


class Conflict(Refused):
    """The job isn't as it was taken to be."""


class _Body(httpx.AsyncByteStream):
    """What a request sends. httpx's own is an async generator, which a connection that breaks, or a cancellation,
    leaves suspended: it would only be closed when it is garbage, with a warning."""

    def __init__(self, data: bytes | None) -> None:
        self._data = data
        self._parts: Iterator[bytes] = iter(())

    def __aiter__(self) -> "_Body":
        self._parts = iter([self._data] if self._data else [])
        return self

    async def __anext__(self) -> bytes:
        for part in self._parts:
            return part
        raise StopAsyncIteration


class Client:
    """One cluster."""

    def __init__(self, settings: NomadSettings, http: httpx.AsyncClient, credentials: Credentials) -> None:
        self.settings = settings
        self.credentials = credentials
        self.trust = Trust()
        self._http = http
        self._limiter = trio.CapacityLimiter(settings.limiter)

    async def get(self, path: str, decoder: "Decoder[T]", **query: str) -> wire.Answer[T]:
        """Raises ExecutorUnreachable, Refused."""
        response = await self._ask("GET", path, query, None, self.settings.request_timeout)
        return wire.Answer(self._decoded(response, decoder), index_of(response))

    async def get_whole_job(self, job: str) -> dict[str, Any]:
        """A job with all that there is in it. Raises ExecutorUnreachable, Refused."""
        raw = (await self.get(path_of("job", job), RAW)).body
        with self._decoding():
            WHOLE_JOB.decode(raw)  # whoever changes it may rely on that
            return JSON.decode(raw)

    async def get_list(self, path: str, read: Callable[[bytes], T], **query: str) -> wire.Answer[T]:
        """A list that may be long, read in a thread. Raises ExecutorUnreachable, Refused."""
        response = await self._ask("GET", path, query, None, self.settings.list_timeout)
        index = index_of(response)
        if not index and "X-Nomad-Index" not in response.headers:  # of a table that never held anything it is 0
            raise ExecutorUnreachable(f"{self._name} answers, but not as Nomad does (no index)")
        with self._decoding():
            return wire.Answer(await trio.to_thread.run_sync(read, response.content), index)

    async def trusted(self) -> None:
        """Wait until it is sure that this is the right cluster. Raises ExecutorUnreachable."""
        with trio.move_on_after(self.settings.request_timeout):
            await self.trust.needed()
            return
        raise ExecutorUnreachable(f"{self._name} hasn't listed its jobs yet")

    async def put(self, path: str, body: object, decoder: "Decoder[T]") -> T:
        """Nothing is changed in a cluster that may be another one. Raises ExecutorUnreachable, Refused."""
        await self.trusted()
        response = await self._ask("PUT", path, {}, msgspec.json.encode(body), self.settings.request_timeout)
        return self._decoded(response, decoder)

    async def delete(self, path: str, decoder: "Decoder[T]", **query: str) -> T:
        """As `put`. Raises ExecutorUnreachable, Refused."""
        await self.trusted()
        response = await self._ask("DELETE", path, query, None, self.settings.request_timeout)
        return self._decoded(response, decoder)

    @asynccontextmanager
    async def stream(self, path: str, query: list[tuple[str, str]]) -> AsyncIterator[Answer]:
        """An answer that goes on and on. Raises ExecutorUnreachable, Refused."""
        target = f"{path}?{urlencode([*query, *self._scope.items()])}"
        settings, ours = self.settings, self.credentials
        token = ours.token
        try:
            async with open_stream(settings.url, target, ours.headers, ours.tls, settings.connect_timeout) as answer:
                if answer.status != httpx.codes.OK:
                    self._check(httpx.Response(answer.status, content=await answer.read()))
                yield answer
        except TokenRefused:
            self.credentials.another_than(token)  # for the next time
            raise
        except StreamBroken as error:
            raise ExecutorUnreachable(f"{self._name} can't be reached: {error.message[:LONGEST_TEXT]}") from error

    async def _ask(
        self, method: str, path: str, query: Mapping[str, str], body: bytes | None, within: float
    ) -> httpx.Response:
        token = self.credentials.token
        try:
            return await self._ask_once(method, path, query, body, within)
        except TokenRefused:
            if not self.credentials.another_than(token):
                raise
        return await self._ask_once(method, path, query, body, within)

    async def _ask_once(
        self, method: str, path: str, query: Mapping[str, str], body: bytes | None, within: float
    ) -> httpx.Response:
        # httpx's own limit loses a place for ever with some requests that are cancelled (encode/httpcore#1093)
        async with self._limiter:
            with self._errors(), trio.fail_after(within):
                request = self._http.build_request(
                    method,
                    path,
                    params={**query, **self._scope},
                    content=body,
                    headers=self.credentials.headers | _content(body),
                )
                request.stream = _Body(body)
                response = await self._http.send(request)
        self._check(response)
        return response

    def _decoded(self, response: httpx.Response, decoder: "Decoder[T]") -> T:
        with self._decoding():
            return decoder.decode(response.content)

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        try:
            yield
        except msgspec.DecodeError as error:
            raise ExecutorUnreachable(f"{self._name} answers, but not as Nomad does: {error}") from None

    @property
    def _scope(self) -> dict[str, str]:
        scope = {"namespace": self.settings.namespace}
        return {**scope, "region": self.settings.region} if self.settings.region else scope

    @property
    def _name(self) -> str:
        return f"nomad at {self.settings.url}"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Translates whatever goes wrong with a connection."""
        try:
            yield
        except trio.TooSlowError:
            raise ExecutorUnreachable(f"{self._name} didn't answer in time") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ExecutorUnreachable(f"{self._name} can't be reached: {words_of(error)[:LONGEST_TEXT]}") from error

    def _check(self, response: httpx.Response) -> None:
        """Raise what a status and its plain text mean. Nomad says 500 for nearly everything."""
        status = response.status_code
        if status == httpx.codes.OK:
            return
        text = shown(response.content)
        if status in (401, 403) or (status == 500 and _refused_token.search(text)):
            raise TokenRefused(f"{self._name} refuses the token (nomad.token): {text}")
        if status == 404:
            raise NotFound(f"{self._name} doesn't know it: {text}", index_of(response))
        if ENFORCED in text:
            raise Conflict(text)
        if status == 429:
            raise ExecutorUnreachable(f"{self._name} is asked too often (429)")
        if status in (400, 405, 413) or _invalid.search(text):
            raise Refused(f"{self._name} refuses it: {text}")
        if "No cluster leader" in text:
            raise ExecutorUnreachable(f"{self._name} has no cluster leader at present")
        raise ExecutorUnreachable(f"{self._name} failed with status {status}: {text}")


@contextmanager
def nothing_to_refuse() -> Iterator[None]:
    """For what can't be wrong in itself: whatever Nomad has against it may pass."""
    try:
        yield
    except Refused as error:
        raise ExecutorUnreachable(error.message) from error


@asynccontextmanager
async def open_client(settings: NomadSettings, renew: Callable[[], str] | None = None) -> AsyncIterator[Client]:
    """Nothing is connected yet. Raises ConfigError for certificates that can't be read."""
    credentials = Credentials(settings, renew)
    http = httpx.AsyncClient(
        base_url=settings.url,
        verify=credentials.tls if credentials.tls is not None else False,
        timeout=httpx.Timeout(None, connect=settings.connect_timeout),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=settings.limiter, keepalive_expiry=60),
        trust_env=False,
    )
    async with http:
        yield Client(settings, http, credentials)


def path_of(*parts: str) -> str:
    """A path of the API; ids are quoted whatever is in them."""
    return "/".join(["/v1", *(quote(part, safe="") for part in parts)])


def index_of(response: httpx.Response) -> int:
    """As of which index an answer is true; 0: not told."""
    told = response.headers.get("X-Nomad-Index", "")
    return int(told) if told.isdecimal() and len(told) <= LONGEST_NUMBER else 0


def shown(content: bytes) -> str:
    """What somebody said, fit for a message: one line, no controls, not too long."""
    text = content[: LONGEST_TEXT * 4].decode(errors="replace")
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())[:LONGEST_TEXT]


def _content(body: bytes | None) -> dict[str, str]:
    return {} if body is None else {"Content-Type": "application/json"}
