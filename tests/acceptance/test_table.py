"""docs/contract.md names only tests that exist."""

import re
from pathlib import Path

TOP = Path(__file__).parent.parent.parent
PAGE = TOP / "docs" / "contract.md"


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE.read_text())
    assert len(named) > 100
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in _text(file)]
    assert missing == []


def test_every_acceptance_test_is_named_or_goes_beyond_the_list() -> None:
    """What the original's list promises is told on the page; the two modules left out have their own tables."""
    page = PAGE.read_text()
    listed = [path for path in Path(__file__).parent.glob("test_*.py") if path.name in LISTED]
    missing = [
        f"{path.name}::{name}"
        for path in listed
        for name in re.findall(r"^async def (test_\w+)", path.read_text(), re.MULTILINE)
        if f"{path.name}::{name}" not in page and name not in BEYOND
    ]
    assert missing == []


LISTED = {"test_environments.py", "test_runners.py", "test_files.py", "test_executions.py", "test_websocket.py"}
BEYOND = {
    "test_the_version_is_a_quoted_string",
    "test_statistics_count_what_is_idle_and_used",
    "test_an_idle_runner_is_none_for_clients",
    "test_a_fault_of_json_is_400_and_an_unknown_runner_410",
    "test_any_name_and_any_byte_is_copied",
    "test_output_comes_as_it_is_written_without_a_newline",
    "test_the_url_is_absolute_and_of_the_host_that_was_asked",
}


def _text(file: str) -> str:
    path = TOP / file if "/" in file else Path(__file__).parent / file
    return path.read_text() if path.exists() else ""
