"""What holds for all tests of Nomad."""

import pytest

from poseidon.executors.nomad import exec_process


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine makes a kill late, not uncertain."""
    monkeypatch.setattr(exec_process, "KILL_WITHIN", 25.0)
    monkeypatch.setattr(exec_process, "STARTED_WITHIN", 25.0)
