"""The `poseidon` command against a real daemon."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import trio

from tests.e2e.daemons import Daemon, environ, open_client, open_daemon


async def poseidon(daemon: Daemon, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    with trio.fail_after(60):
        return await trio.to_thread.run_sync(
            partial(
                subprocess.run,
                [sys.executable, "-m", "poseidon", *arguments],
                env=environ(daemon.folder, daemon.port),
                capture_output=True,
                text=True,
                input=stdin,
                cwd=daemon.folder,
            )
        )


async def test_run_passes_output_input_and_exit_code(tmp_path: Path) -> None:
    (tmp_path / "sum.py").write_text("import sys\nprint(sum(map(int, sys.stdin)), sys.argv[1])\nsys.exit(7)\n")
    async with open_daemon(tmp_path) as daemon, open_client(daemon) as client:
        done = await poseidon(daemon, "run", "sum.py", "a b'c", stdin="1\n2\n39\n")
        assert (done.stdout, done.returncode) == ("42 a b'c\n", 7)
        assert "created 1" in done.stderr
        done = await poseidon(daemon, "run", "--", "sh", "-c", "echo out; echo err >&2; kill -9 $$")
        assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 137)
        done = await poseidon(daemon, "run", "--time-limit", "1", "--", "sleep", "60")
        assert done.returncode == 124
        done = await poseidon(daemon, "run", "--environment", "77", "--", "true")
        assert done.returncode == 255
        assert "77" in done.stderr
        await client.full()
        assert (await client.statistics())["usedRunners"] == 0


async def test_operators_see_and_change_what_there_is(tmp_path: Path) -> None:
    async with open_daemon(tmp_path) as daemon, open_client(daemon) as client:
        done = await poseidon(daemon, "environments", "put", "5", "--image", "python", "--pool-size", "2")
        assert done.returncode == 0, done.stderr
        await client.full(5)
        listed = await poseidon(daemon, "environments", "list")
        assert "python" in listed.stdout
        status = await poseidon(daemon, "status")
        assert status.returncode == 0
        assert "python" in status.stdout
        runner = await client.claim(5)
        assert runner in (await poseidon(daemon, "runners", "list")).stdout
        assert (await poseidon(daemon, "runners", "stop", runner)).returncode == 0
        assert (await client.http.delete(f"/runners/{runner}")).status_code == 410
        assert (await poseidon(daemon, "environments", "rm", "5")).returncode == 0
        assert (await client.http.get("/execution-environments")).json() == {"executionEnvironments": []}
        assert (await poseidon(daemon, "db", "check")).returncode == 0
        assert (await poseidon(daemon, "db", "backup", str(tmp_path / "copy.db"))).returncode == 0
    (tmp_path / "copy.db").unlink()


async def test_doctor_finds_this_machine_able(tmp_path: Path) -> None:
    async with open_daemon(tmp_path) as daemon:
        done = await poseidon(daemon, "doctor")
        assert done.returncode == 0, done.stdout + done.stderr
