"""All of it again without root: the same tests, run by another uid in another process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.local.support import IS_ROOT, processes_of

UID = 23456
HERE = Path(__file__).parent
CONFIGURATION = """
[tool.pytest.ini_options]
addopts = "--strict-markers --import-mode=importlib -ra --assert=plain -p no:cacheprovider"
trio_mode = true
timeout = 60
pythonpath = ["."]
filterwarnings = ["error", "ignore::pytest.PytestAssertRewriteWarning"]
"""


UNUSED = shutil.ignore_patterns(
    "__pycache__",
    "mypy*",
    "ruff*",
    "uv*",
    "pip*",
    "libcst*",
    "grimp*",
    "setuptools*",
    "sqlalchemy*",
    "babel*",
    "*.pth",
    "schemathesis*",
)


def copy_packages(folder: Path) -> None:
    """What the other uid must be able to read."""
    without = shutil.ignore_patterns("__pycache__", "test_unprivileged.py", "test_limits.py", "test_wire.py")
    shutil.copytree(HERE.parent.parent / "poseidon", folder / "poseidon", ignore=without)
    shutil.copytree(HERE, folder / "tests/local", ignore=without)
    (folder / "tests/__init__.py").write_text("")
    (folder / "pyproject.toml").write_text(CONFIGURATION)
    shutil.copytree(Path(pytest.__file__).parent.parent, folder / "site", ignore=UNUSED)  # a venv may be root's alone
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() or path.name == "bwrap" else 0o644)


@pytest.mark.skipif(not IS_ROOT, reason="the tests run without root already")
@pytest.mark.timeout(300)
def test_everything_holds_without_root(readable: Path) -> None:
    copy_packages(readable)
    own = readable / "own"
    own.mkdir()
    os.chown(own, UID, UID)
    found = subprocess.run(
        [sys.executable, HERE / "as_user.py", readable, str(UID), "-q", "--basetemp", own / "tmp", "tests/local"],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    print(found.stdout[-20_000:], found.stderr[-5_000:])
    assert found.returncode == 0
    assert not list(processes_of(range(UID, UID + 1)))
