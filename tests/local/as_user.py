"""Run the tests of the local executor as another uid: imports first, as root, what that uid may not be able to read.

    python as_user.py FOLDER UID PYTEST-ARGUMENTS...

FOLDER holds copies of the packages `poseidon` and `tests.local`, and of those that they need in `site`, readable for
everybody.
"""

import importlib
import os
import pkgutil
import sys
from pathlib import Path

LATE = (
    *("multiprocessing", "concurrent.futures.thread", "encodings.idna", "unittest.mock", "cProfile", "tracemalloc"),
    *("hypothesis", "pytest_trio.plugin", "trio.testing", "_pytest.pastebin", "difflib", "pprint", "readline", "pdb"),
    *("xml.etree.ElementTree", "xml.sax.saxutils", "logging.handlers", "coverage", "sqlite3", "pytest_cov.plugin"),
    *("pytest_timeout", "pytest_randomly", "importlib.metadata", "zoneinfo", "ssl", "email.message", "faulthandler"),
)


def main(folder: str, uid: str, *arguments: str) -> int:
    """Import everything, then drop root for good."""
    sys.path[:] = [folder, f"{folder}/site", *(path for path in sys.path if "site-packages" not in path)]
    import_all("encodings")
    import_all("_pytest")
    import_all("trio")
    import_all("structlog")
    import_all("poseidon.executors")
    for name in LATE:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    # Should something have been forgotten: the same version's library, where everybody can read it.
    library = f"/usr/lib/python3.{sys.version_info.minor}"
    sys.path += [library, f"{library}/lib-dynload"]
    os.chdir(folder)
    os.setgroups([])
    os.setresgid(int(uid), int(uid), int(uid))
    os.setresuid(int(uid), int(uid), int(uid))
    os.environ.clear()
    os.environ.update({"HOME": folder, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"})
    pytest = importlib.import_module("pytest")
    return int(pytest.main(list(arguments)))


def import_all(package: str) -> None:
    """A package with its modules, but those for other systems."""
    module = importlib.import_module(package)
    for found in pkgutil.walk_packages(module.__path__, package + ".", onerror=lambda _: None):
        inside = found.name.removeprefix(package)
        if not any(word in inside for word in ("tests", "windows", "kqueue", "__main__", "mypy")):
            try:
                importlib.import_module(found.name)
            except (ImportError, AssertionError, AttributeError, OSError):  # OSError: a library of another system
                continue


if __name__ == "__main__":
    assert Path(sys.argv[1]).is_dir()
    sys.exit(main(*sys.argv[1:]))
