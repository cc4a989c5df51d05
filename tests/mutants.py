"""Plants faults in a copy of the core, one at a time, and demands that a test notices each.

`python -m tests.mutants [--list] [--recordings] [NAME …]`. With `--recordings` only by tests that play what a real
cluster told, to see which rules they hold. The working tree is never touched. Exits with 1 if a fault survives.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutant_list import MUTANTS, UNRECORDED, Mutant

ROOT = Path(__file__).parent.parent
QUICK_FIRST = (
    "tests/core/test_fleet.py",
    "tests/core/test_pool.py",
    "tests/core/test_model.py",
    "tests/core/test_recognition.py",
    "tests/core/test_permutations.py",
    "tests/core/test_recordings.py",
    "tests/core/test_recordings_acts.py",
    "tests/core/test_fleet_machine.py",
)
RECORDINGS = ("tests/core/test_recordings.py", "tests/core/test_recordings_acts.py")
AT_ONCE = 2
LONGEST = 240
"""Seconds for one fault; a suite that hangs has noticed it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a fault: *killer* is the test that noticed it, None if it survived."""

    mutant: Mutant
    killer: str | None
    seconds: float


def main(arguments: Sequence[str]) -> int:
    """Plant those that are named, or all."""
    options = {argument for argument in arguments if argument.startswith("--")}
    names = [argument for argument in arguments if argument not in options]
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    unknown = (set(names) - {mutant.name for mutant in chosen}) | (options - {"--list", "--recordings"})
    if unknown:
        print(f"no such fault: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    if "--list" in options:
        for mutant in chosen:
            print(f"{mutant.name:32} {mutant.fault}")
        return 0
    return plant_all(chosen, RECORDINGS if "--recordings" in options else QUICK_FIRST)


def plant_all(chosen: Sequence[Mutant], tests: Sequence[str]) -> int:
    """Report each verdict as it comes; the unchanged core must pass first."""
    killer, _ = run_tests(None, tests)
    if killer is not None:
        print(f"the tests fail without any fault planted: {killer}", file=sys.stderr)
        return 2
    survivors = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for verdict in pool.map(lambda mutant: judge(mutant, tests), chosen):
            excused = UNRECORDED.get(verdict.mutant.name, "") if tests is RECORDINGS else ""
            survivors += verdict.killer is None and not excused
            print(f"{verdict.mutant.name:32} {told(verdict, excused)} ({verdict.seconds:.1f} s)", flush=True)
    print(f"{survivors} of {len(chosen)} faults survived")
    return 1 if survivors else 0


def told(verdict: Verdict, excused: str) -> str:
    if verdict.killer:
        return f"killed by {verdict.killer}"
    return f"shown by no recording: {excused}" if excused else "SURVIVED"


def judge(mutant: Mutant, tests: Sequence[str]) -> Verdict:
    killer, seconds = run_tests(mutant, tests)
    return Verdict(mutant, killer, seconds)


def run_tests(mutant: Mutant | None, tests: Sequence[str]) -> tuple[str | None, float]:
    """The first test that fails, if any, and how long it took."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        copy(folder)
        if mutant is not None:
            plant(mutant, folder)
        options = ("-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider")
        command = [sys.executable, "-m", "pytest", *options, *tests]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LONGEST, check=False)
        except subprocess.TimeoutExpired:
            return f"a time limit of {LONGEST} s", time.monotonic() - began
    if done.returncode == 0:
        return None, time.monotonic() - began
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed.group(1) if failed else (done.stdout + done.stderr)[-2000:], time.monotonic() - began


def copy(folder: Path) -> None:
    """Just what the core's tests need: the core itself, so that nothing else is imported by mistake."""
    for part in ("poseidon/core", "tests/core", "tests/recordings"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("poseidon/__init__.py", "tests/__init__.py", "pyproject.toml"):
        shutil.copyfile(ROOT / file, folder / file)


def plant(mutant: Mutant, folder: Path) -> None:
    """Each edit must fit exactly once: the list has to follow the code."""
    for file, old, new in mutant.edits:
        path = folder / "poseidon" / "core" / file
        text = path.read_text()
        if text.count(old) != 1:
            raise SystemExit(
                f"fault {mutant.name!r} doesn't fit {file} any more: {old!r} is there {text.count(old)} times"
            )
        path.write_text(text.replace(old, new))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
