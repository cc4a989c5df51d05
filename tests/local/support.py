"""What the tests of the local executor share: a ledger on disk, a world that is checked for what is left behind."""

import json
import os
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import trio

from poseidon.core.command import Command
from poseidon.core.model import Allocation, ClientStatus, Environment, EnvironmentId, JobGone, JobId
from poseidon.executors.base import Batch, Exit, Process, Stream
from poseidon.executors.local.executor import LocalExecutor, open_local
from poseidon.executors.local.ledger import SandboxRecord
from poseidon.executors.local.settings import LocalSettings
from poseidon.executors.local.users import PER_SANDBOX, choose_range, taken_ranges

IS_ROOT = os.geteuid() == 0
PATIENCE = 20.0
UIDS = 200


class JsonLedger:
    """A ledger in one file, replaced atomically; a new one on the same file is a restart."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.exists():
            self._write({"instance": secrets.token_hex(6), "next": 1, "records": {}})

    def _read(self) -> dict:  # type: ignore[type-arg]
        return json.loads(self._path.read_text())  # type: ignore[no-any-return]

    def _write(self, content: object) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(content))
        new.rename(self._path)

    @property
    def instance(self) -> str:
        return str(self._read()["instance"])

    async def reserve(self, count: int) -> int:
        content = self._read()
        first = int(content["next"])
        content["next"] += count
        self._write(content)
        return first

    async def save(self, record: SandboxRecord) -> None:
        content = self._read()
        content["records"][record.allocation] = asdict(record)
        self._write(content)

    async def forget(self, allocation: str) -> None:
        content = self._read()
        content["records"].pop(allocation, None)
        self._write(content)

    async def load(self) -> tuple[SandboxRecord, ...]:
        return tuple(SandboxRecord(**record) for record in self._read()["records"].values())


@dataclass(slots=True)
class World:
    """A state folder and a ledger; all sandboxes that were made with them have to be gone in the end."""

    folder: Path
    settings: LocalSettings = field(default_factory=lambda: LocalSettings(uid_count=UIDS, memory_mb=64, processes=40))

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def ledger(self) -> JsonLedger:
        return JsonLedger(self.folder / "ledger.json")

    @asynccontextmanager
    async def daemon(self, **changes: object) -> AsyncIterator[LocalExecutor]:
        """One life of a daemon; the sandboxes live on."""
        settings = replace(self.settings, **changes)  # type: ignore[arg-type]
        async with open_local(settings, self.state, self.ledger) as executor:
            yield executor

    @asynccontextmanager
    async def executor(self, **changes: object) -> AsyncIterator[LocalExecutor]:
        """One that stops what it started."""
        async with self.daemon(**changes) as executor:
            try:
                yield executor
            finally:
                with trio.CancelScope(shield=True):
                    await stop_all(executor)

    def uids(self) -> range:
        """Those of our sandboxes."""
        if not IS_ROOT:
            return range(os.geteuid(), os.geteuid() + 1)
        first, count = choose_range(self.ledger.instance, self.settings.uid_base, UIDS, taken_ranges())
        assert count >= PER_SANDBOX
        return range(first, first + count)

    def processes(self) -> set[int]:
        """All that run as one of our sandboxes."""
        ours = {os.getpid(), os.getppid()}
        return {pid for pid in processes_of(self.uids()) if pid not in ours and is_sandboxed(pid)}

    def cgroups(self) -> list[str]:
        """All of our store."""
        name = f"poseidon-{self.ledger.instance}"
        return [folder for folder, folders, _ in os.walk("/sys/fs/cgroup") if Path(folder).name == name]


def processes_of(uids: range) -> Iterable[int]:
    """The living processes of these uids."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "status").read_text()
            except OSError:
                continue
            lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            if int(lines["Uid"].split()[0]) in uids and lines["State"][0] not in "ZX":
                yield int(entry.name)


def is_sandboxed(pid: int) -> bool:
    """It has a pid namespace of its own, or is the bwrap that watches one: not a process of the test itself."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        mine = os.stat("/proc/self/ns/user").st_ino
        return b"bwrap" in command.split(b"\0")[0] or os.stat(f"/proc/{pid}/ns/user").st_ino != mine
    except OSError:
        return Path(f"/proc/{pid}").exists()


ENVIRONMENT = Environment(EnvironmentId(7), image="some-image", pool_size=1)
NUMBERS = iter(range(10_000))


def new_job() -> JobId:
    """A job's id, never used before."""
    return JobId(f"7-{secrets.token_hex(4)}-{next(NUMBERS)}")


async def until(stream: AsyncIterator[Batch], job: JobId, *statuses: ClientStatus) -> Allocation:
    """Follow *job* until its allocation has one of these statuses."""
    with trio.fail_after(PATIENCE):
        async for batch in stream:
            for value in batch.values:
                if isinstance(value, Allocation) and value.job == job and value.client in statuses:
                    return value
    raise AssertionError("the stream has ended")


async def until_gone(stream: AsyncIterator[Batch], job: JobId) -> JobGone:
    """Follow *job* until it is gone."""
    with trio.fail_after(PATIENCE):
        async for batch in stream:
            for value in batch.values:
                if isinstance(value, JobGone) and value.job == job:
                    return value
    raise AssertionError("the stream has ended")


async def start(executor: LocalExecutor, environment: Environment = ENVIRONMENT) -> Allocation:
    """A running sandbox."""
    job = new_job()
    async with executor.follow(None) as stream:
        await executor.start(job, environment)
        found = await until(stream, job, ClientStatus.RUNNING, ClientStatus.FAILED)
    assert found.client is ClientStatus.RUNNING, (await executor.look_up(job), reasons(executor))
    return found


def reasons(executor: LocalExecutor) -> list[str]:
    """Why sandboxes have ended."""
    return [record.reason for record in executor._site.book]


async def stop_all(executor: LocalExecutor) -> None:
    """Stop everything, and wait until it is proven gone."""
    with trio.fail_after(PATIENCE):
        for job in (await executor.snapshot()).jobs:
            await executor.stop(job.job)
        while (await executor.snapshot()).jobs:
            await trio.sleep(0.002)


@dataclass(frozen=True, slots=True)
class Result:
    """What a command gave."""

    out: str
    err: str
    exit: Exit

    @property
    def code(self) -> int:
        return self.exit.code


async def drain(process: Process) -> tuple[bytes, bytes]:
    """All output until both streams have ended."""
    found = {Stream.STDOUT: b"", Stream.STDERR: b""}
    while chunk := await process.receive():
        found[chunk[0]] += chunk[1]
    return found[Stream.STDOUT], found[Stream.STDERR]


async def run(
    executor: LocalExecutor,
    allocation: Allocation,
    line: str = "",
    *,
    argv: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
    privileged: bool = False,
    tty: bool = False,
    cwd: str = "",
    stdin: bytes = b"",
) -> Result:
    """Run a command to its end."""
    command = Command(line=line, argv=argv, environment=environment or {}, privileged=privileged, tty=tty, cwd=cwd)
    with trio.fail_after(PATIENCE):
        async with executor.execute(allocation, command) as process, trio.open_nursery() as nursery:
            nursery.start_soon(feed, process, stdin)
            out, err = await drain(process)
            ended = await process.wait()
    return Result(out.decode(), err.decode(), ended)


async def feed(process: Process, data: bytes) -> None:
    """Send it all, then the end."""
    await process.send(data)
    await process.close_stdin()


async def read_until(process: Process, text: str) -> str:
    """Read output until *text* has come."""
    found = b""
    with trio.fail_after(PATIENCE):
        while text.encode() not in found:
            chunk = await process.receive()
            assert chunk, f"the output ended: {found!r}"
            found += chunk[1]
    return found.decode()
