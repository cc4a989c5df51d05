"""The fake daemon, and the command line against it: in this process, as a process, or in a real terminal."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from poseidon.cli.main import main
from tests.cli.fake_daemon import FakeDaemon, serving
from tests.cli.screen import Screen

PATIENCE = 20


@dataclass(frozen=True)
class Result:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def nobody_elses_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No configuration but what the test makes."""
    for name in [name for name in os.environ if name.startswith("POSEIDON_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("POSEIDON_STORE_PATH", str(tmp_path / "state" / "poseidon.db"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    """A daemon with one environment, where the command line finds it."""
    folder = tmp_path / "runners"
    folder.mkdir()
    with serving(folder) as fake:
        fake.add_environment(1)
        monkeypatch.setenv("POSEIDON_URL", fake.url)
        yield fake


@pytest.fixture
def poseidon(capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`poseidon WORDS…` within this process."""

    def call(*words: str) -> Result:
        capfd.readouterr()
        code = main(words)
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return call


class Child(subprocess.Popen[bytes]):
    """A process whose streams are pipes, unless the test says otherwise."""

    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]


def start(*words: str, **options: Any) -> Child:
    """`poseidon WORDS…` as a process of its own."""
    command = [sys.executable, "-m", "poseidon", *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return Child(command, env=environment, **(streams | options))


@pytest.fixture
def process() -> Iterator[Callable[..., Child]]:
    """Starts `poseidon WORDS…`; it is gone after the test."""
    started: list[Child] = []

    def begin(*words: str, **options: Any) -> Child:
        started.append(start(*words, **options))
        return started[-1]

    yield begin
    for child in started:
        child.kill()
        child.communicate()


@pytest.fixture
def screen() -> Iterator[Callable[..., Screen]]:
    """`poseidon WORDS…` in a terminal."""
    opened: list[Screen] = []

    def begin(*words: str, rows: int = 24, columns: int = 80) -> Screen:
        opened.append(Screen([sys.executable, "-m", "poseidon", *words], rows, columns))
        return opened[-1]

    yield begin
    for terminal in opened:
        terminal.close()


def wait_until(holds: Callable[[], bool]) -> None:
    """Poll until *holds*."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
