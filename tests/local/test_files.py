"""Files of a sandbox are listed, read and written from inside of it: no name or link leads to the host."""

import os
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field

import pytest
import trio

from poseidon.core.model import Allocation, EnvironmentId, Phase, Runner, RunnerId
from poseidon.errors import FilesFailed, FilesNotAccessible
from poseidon.executors.base import Executor
from poseidon.executors.local.executor import LocalExecutor
from poseidon.runners.files import Files
from poseidon.runners.files_archive import File
from tests.local.support import IS_ROOT, PATIENCE, World, run, start

needs_root = pytest.mark.skipif(not IS_ROOT, reason="only root has two users in a sandbox")
USERS = [False, pytest.param(True, marks=needs_root)]
HARD = ("new\nline", "-rf", "it's", 'quo"te\\', "$(touch pwned)", "x -> y", " ", "*", "ä")
RUNNING = "for path in /proc/[0-9]*/comm; do read -r name <$path && echo $name; done 2>/dev/null; true"
RUNNER = RunnerId("7-runner")


@dataclass
class Scene:
    """A sandbox whose files are worked on, as by the API; what that asks of claims."""

    executor: LocalExecutor
    allocation: Allocation
    files: Files = field(init=False)

    def __post_init__(self) -> None:
        self.files = Files(self)

    def used(self, runner: RunnerId) -> Runner:
        return Runner(
            runner, EnvironmentId(7), self.allocation.job, self.allocation.id, "", "", "", Phase.USED, ready_at=0
        )

    def place(self, _: Runner) -> tuple[Executor, Allocation]:
        return self.executor, self.allocation

    def hold(self, _: RunnerId) -> AbstractContextManager[None]:
        return nullcontext()

    async def shell(self, line: str, *, privileged: bool = False) -> str:
        """Run it as a learner's program; what it printed."""
        result = await run(self.executor, self.allocation, line, privileged=privileged)
        assert result.code == 0, result
        return result.out

    async def copy(self, *files: File, delete: tuple[str, ...] = ()) -> None:
        with trio.fail_after(PATIENCE):
            await self.files.update(RUNNER, delete=delete, copy=files)

    async def names(self, path: str = "./", *, privileged: bool = False) -> dict[str, str]:
        """What lies there, with the targets of links."""
        with trio.fail_after(PATIENCE):
            entries = await self.files.list(RUNNER, path, recursive=True, privileged=privileged)
        return {entry.name: entry.target for entry in entries}

    async def read(self, path: str, *, privileged: bool = False) -> bytes:
        with trio.fail_after(PATIENCE):
            async with self.files.read(RUNNER, path, privileged=privileged) as download:
                content = b"".join([piece async for piece in download])
        assert len(content) == download.size
        return content

    async def refused(self, path: str, *, privileged: bool = False) -> bool:
        try:
            await self.read(path, privileged=privileged)
        except FilesNotAccessible:
            return True
        return False


@asynccontextmanager
async def opened(world: World) -> AsyncIterator[Scene]:
    async with world.executor() as executor:
        yield Scene(executor, await start(executor))


@pytest.mark.parametrize("privileged", USERS)
async def test_what_was_copied_is_listed_and_read_as_it_was(world: World, privileged: bool) -> None:
    content = {f"{folder}/{name}": os.urandom(70_000) for folder in HARD for name in HARD[:2]}
    async with opened(world) as scene:
        await scene.copy(*(File(name, data) for name, data in content.items()))
        assert set(await scene.names(privileged=privileged)) == {f"./{name}" for name in (*HARD, *content)}
        for name, data in content.items():
            assert await scene.read(name, privileged=privileged) == data
        assert await scene.shell("ls /workspace/pwned 2>/dev/null || echo none") == "none\n"


async def test_an_entry_tells_owner_rights_and_size(world: World) -> None:
    async with opened(world) as scene:
        await scene.copy(File("folder/"), File("folder/a", b"12345"))
        await scene.shell("echo mine >own")
        found = {entry.name: entry for entry in await scene.files.list(RUNNER, "./", recursive=True, privileged=False)}
    facts = {name: (each.kind, each.permissions, each.owner, each.size) for name, each in found.items()}
    owner = "root" if IS_ROOT else "user"
    assert facts["./folder"][:3] == ("d", "rwxrwxrwt", owner)
    assert facts["./folder/a"] == ("-", "rwxr--r--", owner, 5)
    assert facts["./own"] == ("-", "rw-r--r--", "user", 5)


@needs_root
async def test_a_user_sees_no_more_than_its_rights_allow(world: World) -> None:
    async with opened(world) as scene:
        await scene.shell(
            "mkdir -m 700 closed && echo x >closed/file && echo x >file && chmod 600 file", privileged=True
        )
        await scene.shell("mkdir open && ln -s /workspace/closed/file open/link")
        for path in ("closed", "closed/file"):
            with pytest.raises(FilesNotAccessible):
                await scene.names(path)
        assert await scene.names() == {
            "./closed": "",
            "./file": "",
            "./open": "",
            "./open/link": "/workspace/closed/file",
        }
        for path in ("file", "closed/file", "open/link"):
            assert await scene.refused(path)
            assert await scene.read(path, privileged=True) == b"x\n"
        assert "./closed/file" in await scene.names(privileged=True)


async def test_a_link_that_cannot_be_read_is_told_without_its_target(world: World) -> None:
    async with opened(world) as scene:
        assert await scene.names("/proc/self/cwd") == {"/proc/self/cwd": "/workspace"}
        assert await scene.names("/proc/1/cwd") == {"/proc/1/cwd": ""}
        assert await scene.refused("/proc/1/environ")
        assert await scene.read("/proc/self/comm") == b"cat\n"


@pytest.mark.parametrize("privileged", USERS)
async def test_no_link_leads_to_the_host(world: World, privileged: bool) -> None:
    secret = world.folder / "secret"
    secret.write_text("secret")
    secret.chmod(0o666)
    world.folder.chmod(0o777)
    async with opened(world) as scene:
        links = (
            secret,
            f"/proc/1/root{secret}",
            f"/proc/self/root{secret}",
            "../" * 20 + str(secret)[1:],
            "/etc/shadow",
        )
        for number, target in enumerate(links):
            await scene.shell(f"ln -s '{target}' l{number}")
            for path in (f"l{number}", str(target)):
                assert await scene.refused(path, privileged=privileged), path
        await scene.shell(f"ln -s '{world.folder}' folder")
        with pytest.raises(FilesNotAccessible):
            await scene.names("folder/", privileged=privileged)
        for path in ("folder/written", f"{world.folder}/written", f"/proc/1/root{world.folder}/written", "l0"):
            with suppress(FilesFailed):  # some of them can be made inside
                await scene.copy(File(path, b"x"))
        await scene.copy(delete=("folder/secret", str(secret)))
    assert secret.read_text() == "secret"
    assert not (world.folder / "written").exists()


@pytest.mark.parametrize("privileged", USERS)
async def test_only_regular_files_are_read(world: World, privileged: bool) -> None:
    async with opened(world) as scene:
        await scene.shell("mkfifo fifo && ln -s fifo link && mkdir folder && ln -s /dev/zero zero")
        for path in ("fifo", "link", "folder", "zero", "/dev/zero", "/dev/stdin", "/dev/tty", "/dev/tcp/127.0.0.1/1"):
            assert await scene.refused(path, privileged=privileged), path


@pytest.mark.parametrize("privileged", USERS)
async def test_who_leaves_a_download_leaves_nothing_running(world: World, privileged: bool) -> None:
    async with opened(world) as scene:
        await scene.shell("head -c 9000000 /dev/zero >large")
        with trio.CancelScope() as scope:
            async with scene.files.read(RUNNER, "large", privileged=privileged) as download:
                assert download.size == 9_000_000
                scope.cancel()
                await trio.lowlevel.checkpoint()
        assert "cat" not in (await scene.shell(RUNNING)).split()
        assert len(await scene.read("large", privileged=privileged)) == 9_000_000


async def test_who_leaves_a_copy_leaves_nothing_running(world: World) -> None:
    async with opened(world) as scene:
        with trio.move_on_after(0.02):
            await scene.copy(File("a/" * 50 + "x", bytes(9_000_000)))
        await scene.copy(File("after", b"1"))
        assert await scene.read("after") == b"1"
        assert "tar" not in (await scene.shell(RUNNING)).split()
