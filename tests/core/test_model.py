"""Names of jobs, and words of a shell."""

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poseidon.core.command import Command, quote
from poseidon.core.model import Changes, Job, JobId, Position, environment_of

UUID = "0331c7d8-03c1-11ef-b832-fa163e7afdf8"


@pytest.mark.parametrize("environment", [0, 1, 10, 100, 2**63 - 1])
def test_a_job_of_our_form_names_its_environment(environment: int) -> None:
    assert environment_of(JobId(f"{environment}-{UUID}")) == environment


STRANGE = [
    "",
    f"{2**63}-{UUID}",
    f"{'9' * 5000}-{UUID}",
    "10",
    "-",
    "10-",
    f"-{UUID}",
    UUID,
    f"template-10-{UUID}",
    "template-10",
    f"01-{UUID}",
    f"-1-{UUID}",
    f"+1-{UUID}",
    f" 1-{UUID}",
    f"1 -{UUID}",
    f"1_0-{UUID}",
    f"1.0-{UUID}",
    f"٣-{UUID}",
    f"²-{UUID}",
    f"10-{UUID}-1",
    f"10-{UUID}\n",
    f"10-{{{UUID}}}",
    f"10-urn:uuid:{UUID}",
    f"10-{UUID.replace('-', '')}",
    f"10-{UUID[:-1]}",
    f"10-{UUID[:-1]}g",
    "10-mine",
]


@pytest.mark.parametrize("name", STRANGE)
def test_any_other_name_has_no_environment(name: str) -> None:
    assert environment_of(name) is None


@given(st.text())
def test_no_name_whatever_is_an_error(name: str) -> None:
    environment_of(name)
    environment_of(f"10-{name}")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1, max_size=20))
def test_quoted_words_arrive_intact(words: list[str]) -> None:
    line = "printf '%s\\0' " + " ".join(quote(word) for word in words)
    said = subprocess.run(["/bin/sh", "-c", line], capture_output=True, check=True)
    assert said.stdout.decode() == "".join(word + "\0" for word in words)


def test_a_command_is_a_line_for_bash_or_an_exact_vector() -> None:
    assert Command("echo it's").arguments() == ("/bin/bash", "-c", "echo it's")
    assert Command(argv=("ls", "a b")).arguments() == ("ls", "a b")


def test_changes_are_true_only_if_there_are_any() -> None:
    assert not Changes()
    assert Changes(position=Position())
    assert Changes(ended=(JobId("x"),))
    assert Changes(jobs=(Job(JobId("x"), environment=1),))  # type: ignore[arg-type]
