"""CodeOcean as a client: exactly its requests, and the ways in which it puts them together."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import trio

from tests.acceptance.codeocean_socket import Conversation, HandshakeRefused, Socket, open_socket
from tests.acceptance.codeocean_wire import (
    EnvironmentNotFound,
    NotAvailable,
    PrewarmingPoolDepleted,
    Refused,
    RunnerNotFound,
    Unhandled,
    WorkspaceError,
    body,
    check,
    fresh,
    persistent,
    query,
    submission,
)

UNUSED = 180
"""The client's unused_runner_expiration_time in seconds."""
ENTRY = ("name", "entryType", "size", "owner", "group", "permissions", "modificationTime")

Typing = Callable[[Socket], Awaitable[None]]


@dataclass
class Ran:
    """What a learner gets to see of one run."""

    result: str
    code: int | None
    heard: Conversation
    files: list[str] = field(default_factory=list)

    @property
    def stdout(self) -> str:
        return self.heard.text("stdout")

    @property
    def stderr(self) -> str:
        return self.heard.text("stderr")


@dataclass
class CodeOcean:
    """One process of the client, with one learner. *runners*: the learner's, by environment, kept for good."""

    url: str
    token: str
    http: httpx.AsyncClient
    runners: dict[int, str] = field(default_factory=dict)

    async def request(self, method: str, path: str, value: object = None) -> httpx.Response:
        content = None if value is None else body(value)
        return await self.http.request(method, path, content=content)

    # The calls

    async def put(self, number: int, *, size: int = 2, **changes: object) -> int:
        """Tell of an environment; the status."""
        environment = {
            "id": number,
            "image": "openhpi/co_execenv_python:3.8",
            "prewarmingPoolSize": size,
            "cpuLimit": 20,
            "memoryLimit": 64,
            "networkAccess": False,
            "exposedPorts": [],
        }
        answer = await self.request("PUT", f"/execution-environments/{number}", environment | changes)
        check(answer, 201, 204)
        return answer.status_code

    async def environments(self) -> list[dict[str, Any]]:
        answer = await self.request("GET", "/execution-environments")
        check(answer, 200)
        return list(answer.json()["executionEnvironments"] or [])

    async def remove(self, number: int) -> None:
        check(await self.request("DELETE", f"/execution-environments/{number}"), 204)

    async def ensure(self, number: int) -> None:
        """Have the environment there, whoever has put it."""
        if all(each["id"] != number for each in await self.environments()):
            await self.put(number)

    async def claim(self, number: int, permitted: int = 10) -> str:
        timeout = max(UNUSED, permitted)
        answer = await self.request(
            "POST", "/runners", {"executionEnvironmentId": number, "inactivityTimeout": timeout}
        )
        check(answer, 200, also={404: EnvironmentNotFound})
        identity = answer.json()["runnerId"]
        assert isinstance(identity, str)
        assert identity.strip()
        return identity

    async def release(self, runner: str) -> None:
        """In the callback of the close, an unexpected answer takes all other executions along."""
        answer = await self.request("DELETE", f"/runners/{runner}")
        if answer.status_code not in {204, 410}:
            raise Unhandled(f"DELETE answered {answer.status_code}")

    async def copy(self, runner: str, files: Mapping[str, bytes]) -> None:
        answer = await self.request("PATCH", f"/runners/{runner}/files", submission(files))
        if answer.status_code == 400:
            raise Unhandled("the client destroys a stranger's runner now")
        check(answer, 204)

    async def listing(
        self, runner: str, path: str = "./", *, recursive: bool = True, privileged: bool = False
    ) -> list[dict[str, Any]]:
        asked = query(path=path, recursive=recursive, privilegedExecution=privileged)
        answer = await self.request("GET", f"/runners/{runner}/files?{asked}")
        check(answer, 200, also={424: WorkspaceError})
        files = answer.json()["files"]
        if not isinstance(files, list):
            raise Unhandled(f"files is {files!r}")
        for entry in files:
            assert all(name in entry for name in ENTRY), entry
            assert len(entry["permissions"]) == 9, entry
        return files

    async def download(self, runner: str, path: str, *, privileged: bool = False) -> tuple[bytes, httpx.Headers]:
        """A file's content, over a connection of its own."""
        asked = query(path=path, privilegedExecution=privileged)
        async with fresh(self.url, self.token) as http:
            answer = await http.get(f"/runners/{runner}/files/raw?{asked}")
        check(answer, 200, also={424: WorkspaceError})
        return answer.content, answer.headers

    async def execute(self, runner: str, command: str, *, limit: int = 10, privileged: bool = False) -> Socket:
        """Create an execution, and open its WebSocket at once."""
        wanted = {"command": command, "timeLimit": limit, "privilegedExecution": privileged}
        answer = await self.request("POST", f"/runners/{runner}/execute", wanted)
        check(answer, 200)
        url = answer.json()["websocketUrl"]
        assert isinstance(url, str)
        return await open_socket(url, self.token)

    async def health(self) -> None:
        check(await self.request("GET", "/health"), 204, also={503: PrewarmingPoolDepleted})

    async def version(self) -> str:
        answer = await self.request("GET", "/version")
        check(answer, 200, 404)
        said = answer.json() if answer.status_code == 200 else "N/A"
        assert isinstance(said, str)
        return said

    async def statistics(self) -> dict[str, dict[str, int]]:
        answer = await self.request("GET", "/statistics/execution-environments")
        check(answer, 200)
        said = answer.json()
        if not isinstance(said, dict):
            raise Unhandled(f"the dashboard can't read {said!r}")
        return said

    # How it puts them together

    async def run(
        self, number: int, files: Mapping[str, bytes], command: str, *, limit: int = 10, types: Typing | None = None
    ) -> Ran:
        """A learner's click on "run"."""
        try:
            await self._prepared(number, files)
            socket = await self.execute(self.runners[number], command, limit=limit)
        except (Refused, HandshakeRefused):
            return Ran("container depleted", None, Conversation())
        return await self._until_closed(number, socket, types, lists=True)

    async def score(
        self, number: int, files: Mapping[str, bytes], commands: Sequence[str], *, limit: int = 10
    ) -> list[Ran]:
        """One copy, then a command for each test file, all in one runner as long as it lasts."""
        await self._prepared(number, files)
        results: list[Ran] = []
        for command in commands:
            if results and results[-1].result == "timeout":
                self.runners[number] = await self.claim(number, limit)
                await self.copy(self.runners[number], files)
            results.append(await self.command(number, command, limit=limit))
        return results

    async def command(self, number: int, command: str, *, limit: int = 10, privileged: bool = False) -> Ran:
        """One execution for a test, or in an administrator's shell: nothing is copied, a lost runner is replaced."""
        if number not in self.runners:
            self.runners[number] = await self.claim(number, limit)
        try:
            socket = await self.execute(self.runners[number], command, limit=limit, privileged=privileged)
        except RunnerNotFound:
            self.runners[number] = await self.claim(number, limit)
            socket = await self.execute(self.runners[number], command, limit=limit, privileged=privileged)
        return await self._until_closed(number, socket, None, lists=False)

    async def synchronise(self, known: Sequence[int]) -> None:
        """Put what is known, delete what is there besides. (Ids that aren't integers are never known.)"""
        there = [each["id"] for each in await self.environments()]
        for number in known:
            await self.put(number)
        for number in there:
            if number not in known:
                await self.remove(number)

    async def check_image(self, number: int, *, tries: int = 60) -> str:
        """After an environment was made or changed: its user's name, if nothing is said on stderr."""
        await self.put(number, size=1)
        for _ in range(tries):
            try:
                ran = await self.command(number, "whoami")
            except Refused:
                await trio.sleep(1)
                continue
            if ran.result == "exit":
                if ran.stderr:
                    raise UnfitImage(ran.stderr)
                return ran.stdout.strip()
            await trio.sleep(1)
        raise NotAvailable("no runner came")

    async def _prepared(self, number: int, files: Mapping[str, bytes]) -> None:
        """A runner with exactly these files: the stored one if it takes them, else another."""
        if number not in self.runners:
            self.runners[number] = await self.claim(number)
        try:
            await self.copy(self.runners[number], files)
        except (Refused, httpx.TransportError):
            self.runners[number] = await self.claim(number)
            await self.copy(self.runners[number], files)

    async def _until_closed(self, number: int, socket: Socket, types: Typing | None, *, lists: bool) -> Ran:
        async with trio.open_nursery() as nursery:
            if types is not None:
                nursery.start_soon(types, socket)
            heard = await socket.closed()
            nursery.cancel_scope.cancel(reason="the connection has closed")
        result, code = heard.result
        ran = Ran(result, code, heard)
        if heard.destroys:
            await self.release(self.runners.pop(number))
        elif lists and result == "exit":
            ran.files = await self._listed(self.runners[number])
        return ran

    async def _listed(self, runner: str) -> list[str]:
        """In the callback of the close: other failures than these take all other executions along."""
        try:
            return [entry["name"] for entry in await self.listing(runner) if entry["entryType"] == "-"]
        except (RunnerNotFound, WorkspaceError):
            return []
        except Refused as error:
            raise Unhandled(f"the listing failed: {error!r}") from None


class UnfitImage(Exception):
    """The image's check has said something on stderr."""


@asynccontextmanager
async def open_codeocean(url: str, token: str) -> AsyncIterator[CodeOcean]:
    async with persistent(url, token) as http:
        yield CodeOcean(url, token, http)
