"""The bench measures everything that it promises to measure, and leaves nothing behind."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.catalogue import BY_NAME, FIGURES, Target
from bench.report import Report

TOP = Path(__file__).parent.parent
PATIENCE = 280
pytestmark = pytest.mark.timeout(PATIENCE + 20)
"""For a busy machine; a quiet one needs a tenth."""


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a quick run has written."""
    folder = tmp_path_factory.mktemp("bench")
    output = folder / "quick.json"
    ended = subprocess.run(
        [sys.executable, "-m", "bench", "--quick", "--output", str(output)],
        cwd=TOP,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert_nothing_left(folder)
    return dict(json.loads(output.read_text()))


def assert_nothing_left(folder: Path) -> None:
    assert list(folder.glob("poseidon-bench-*")) == []
    assert [line for line in _command_lines() if str(folder) in line] == []


def _command_lines() -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.append(f"{(entry / 'cmdline').read_bytes()!r} {os.readlink(entry / 'cwd')}")
            except OSError:
                continue
    return found


@pytest.mark.slow
def test_a_quick_run_measures_every_figure(quick: dict[str, Any]) -> None:
    assert [row["name"] for row in quick["figures"]] == [figure.name for figure in FIGURES]
    assert quick["failures"] == {}


@pytest.mark.slow
def test_each_figure_is_a_number_beside_the_reference_it_names(quick: dict[str, Any]) -> None:
    for row in quick["figures"]:
        figure = BY_NAME[str(row["name"])]
        assert math.isfinite(row["value"]), row
        assert (row["reference"] is not None) == bool(figure.reference), row
        assert bool(row["verdict"]) == (figure.target is not None), row


@pytest.mark.slow
def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path) -> None:
    bench = subprocess.Popen(
        [sys.executable, "-m", "bench", "--only", "pool", "--output", str(tmp_path / "never.json")],
        cwd=TOP,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
    )
    try:
        give_up = time.monotonic() + 30
        while not list(tmp_path.glob("poseidon-bench-*/pool/sandboxes/*/*")) and time.monotonic() < give_up:
            time.sleep(0.02)
        bench.terminate()
        _, told = bench.communicate(timeout=60)
    finally:
        bench.kill()
    assert bench.returncode == 130, told
    assert b"interrupted" in told
    assert not (tmp_path / "never.json").exists()
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("target", "value", "ratio", "verdict"),
    [
        (Target(3, 2), 2.0, None, "ok"),
        (Target(3, 2), 2.5, None, "near"),
        (Target(3, 2), 3.1, None, "miss"),
        (Target(1000, sense="≥"), 1000.0, 0.1, "ok"),
        (Target(1000, sense="≥"), 999.0, 9.0, "miss"),
        (Target(0.5, sense="≥", of="ratio"), 0.1, 0.5, "ok"),
        (Target(0.5, sense="≥", of="ratio"), 9.0, 0.4, "miss"),
        (Target(0.5, sense="≥", of="ratio"), 9.0, None, "miss"),
    ],
)
def test_a_verdict_follows_its_target(target: Target, value: float, ratio: float | None, verdict: str) -> None:
    assert target.verdict(value, ratio) == verdict


def test_what_could_not_be_measured_is_told_beside_the_rest() -> None:
    report = Report(quick=True)
    report.note("claim.core", [1.0, 3.0, 2.0], [0.5])
    report.failed(["claim.core", "claim.http"], ExceptionGroup("", [OSError("no disk")]))
    assert report.failures == {"claim.http": "OSError: no disk"}
    lines = {line.split(" ")[0]: line for line in report.table().splitlines()}
    assert "2.00 ms" in lines["claim.core"]
    assert "4.00" in lines["claim.core"]
    assert "no disk" in lines["claim.http"]


def test_an_unknown_figure_is_refused_by_its_name() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "bench", "--only", "claime"], cwd=TOP, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "no figure is called 'claime'" in ended.stderr


def test_names_are_unique() -> None:
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)
