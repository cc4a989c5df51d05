"""What keeps a daemon from starting is told in one line, without a traceback, and nothing is left behind."""

import os
import socket
import sqlite3
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.e2e.daemons import environ, free_port, open_client, open_daemon


async def serve(
    folder: Path, *arguments: str, port: int | None = None, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run a daemon that is expected to end by itself."""
    command = [sys.executable, "-m", "poseidon", "serve", *arguments]
    with trio.fail_after(30):
        return await trio.to_thread.run_sync(
            partial(
                subprocess.run,
                command,
                env=environ(folder, free_port() if port is None else port, **settings),
                capture_output=True,
                text=True,
                cwd=folder,
                timeout=25,
            )
        )


def check(ended: subprocess.CompletedProcess[str], *phrases: str) -> None:
    """It failed, said so in a line that a person understands, and showed nothing of its insides."""
    assert ended.returncode == 1, ended  # 2 is for wrong usage
    line = ended.stderr.strip().splitlines()[-1]
    assert line.startswith("poseidon: "), ended.stderr
    for phrase in phrases:
        assert phrase in line
    assert "Traceback" not in ended.stderr


async def test_a_second_daemon_on_the_same_store_says_so_and_ends(tmp_path: Path) -> None:
    async with open_daemon(tmp_path) as daemon, open_client(daemon) as client:
        assert daemon.process is not None
        check(await serve(tmp_path), "poseidon.db", str(daemon.process.pid))
        assert await client.put() == 201


async def test_an_environment_that_cannot_be_is_named(tmp_path: Path) -> None:
    ended = await serve(tmp_path, ENVIRONMENTS_5_IMAGE="x", ENVIRONMENTS_5_MEMORY_LIMIT="1")
    check(ended, "environments.5: ", "memoryLimit")


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check(await serve(tmp_path, port=port), str(port), "in use", "server.port")


async def test_bad_settings_are_named_with_their_file(tmp_path: Path) -> None:
    file = tmp_path / "poseidon.toml"
    file.write_text("[server]\nprot = 8080\n")
    check(await serve(tmp_path, "--config", str(file)), "prot", "poseidon.toml")
    file.write_text("[server\n")
    check(await serve(tmp_path, "--config", str(file)), "poseidon.toml")
    file.unlink()
    check(await serve(tmp_path, SERVER_CLAIMWAIT="soon"), "POSEIDON_SERVER_CLAIMWAIT")


async def test_a_file_that_is_no_database_is_refused_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "poseidon.db"
    file.write_bytes(b"this is no database" * 1000)
    check(await serve(tmp_path), "poseidon.db")
    assert file.read_bytes() == b"this is no database" * 1000


async def test_a_newer_database_is_refused(tmp_path: Path) -> None:
    async with open_daemon(tmp_path):
        pass
    with sqlite3.connect(tmp_path / "poseidon.db") as database:
        before = database.execute("SELECT version_num FROM alembic_version").fetchone()[0]
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    check(await serve(tmp_path), "newer")
    with sqlite3.connect(tmp_path / "poseidon.db") as database:
        database.execute("UPDATE alembic_version SET version_num = ?", [before])


async def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    check(await serve(tmp_path, STORE_PATH=str(tmp_path / "file" / "poseidon.db")), str(tmp_path / "file"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount the small disk")
async def test_a_full_disk_refuses_claims_and_recovers(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)], check=True)
    try:
        async with open_daemon(tmp_path, STORE_PATH=str(disk / "poseidon.db")) as daemon, open_client(daemon) as client:
            await client.put()
            await client.full()
            kept = await client.claim()
            await client.full()
            filler = disk / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as out:
                while True:
                    out.write(b"x" * 4096)
            statuses = set()
            with trio.fail_after(60):
                while 500 not in statuses:
                    answer = await client.http.post("/runners", json={"executionEnvironmentId": 1})
                    statuses.add(answer.status_code)
            assert answer.json()["errorCode"] in ("UNKNOWN", "NOMAD_OVERLOAD")
            await daemon.until_health(503)
            filler.unlink()
            await daemon.until_health(204)
            await client.full()
            assert (await client.run(kept, "true")).last == {"type": "exit", "data": 0}
            await client.claim()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
