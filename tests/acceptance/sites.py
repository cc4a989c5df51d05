"""Where the acceptance list is checked: a real daemon on sandboxes of this machine, and one on the fake cluster.

Each is started once and shared by many tests, so a test takes a runner of its own and environments of its own number.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import trio

from tests.e2e.daemons import Daemon

Kind = Literal["local", "nomad"]

TOKEN = "a-token-for-the-acceptance-list"
TOP = Path(__file__).parent.parent.parent
ROOT = os.geteuid() == 0
SETUSER = "setpriv --reuid=65534 --regid=65534 --clear-groups" if ROOT else ""
"""What an image's `/sbin/setuser user` does. The fake's containers are this machine."""


@dataclass(frozen=True)
class Site:
    """A daemon with its executor. *cluster* is the URL of its Nomad."""

    kind: Kind
    url: str
    folder: Path
    cluster: str = ""

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @property
    def prefix(self) -> str:
        """The URL's path."""
        return httpx.URL(self.url).path

    async def nomad(self, path: str) -> Any:
        """What the cluster itself says; None for a 404."""
        async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
            answer = await http.get(f"{self.cluster}/v1{path}")
        return None if answer.status_code == 404 else answer.json()

    async def put_job(self, job: dict[str, Any]) -> None:
        """Register a job there, past the daemon."""
        async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
            answer = await http.put(f"{self.cluster}/v1/jobs", json={"Job": job})
        assert answer.status_code == 200, answer.text


@contextmanager
def open_site(kind: Kind, folder: Path) -> Iterator[Site]:
    """A healthy daemon with an empty list of environments; all of it is gone in the end."""
    with _cluster(folder) if kind == "nomad" else _no_cluster() as cluster:
        on = {"NOMAD_ADDRESS": cluster, "NOMAD_SETUSER": SETUSER, "NOMAD_LISTINTERVAL": "5"} if cluster else {}
        settings = {"SERVER_TOKEN": TOKEN, "LOGGING_LEVEL": "debug"} | on
        daemon = Daemon(folder, settings, arguments=("--stop-runners",))
        try:
            trio.run(daemon.start)
            yield Site(kind, daemon.url, folder, cluster)
        finally:
            trio.run(_stop, daemon)


async def _stop(daemon: Daemon) -> None:
    if daemon.process is None or daemon.process.poll() is not None:
        await daemon.clear()
        raise AssertionError(f"the daemon has ended: {daemon.log}")
    assert await daemon.end() == 0, daemon.log
    assert "Traceback" not in daemon.log


@contextmanager
def _no_cluster() -> Iterator[str]:
    yield ""


@contextmanager
def _cluster(folder: Path) -> Iterator[str]:
    """A fake Nomad as a process of its own."""
    with (folder / "nomad").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.fakes.nomad", "--port", "0", "--speed", "50"],
            cwd=TOP,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert " at http" in line, (folder / "nomad").read_text()
        yield line.split(" at ")[1].split()[0]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
