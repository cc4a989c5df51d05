"""The wire of executions, piece by piece."""

import pytest

from poseidon.api.messages import Decoder, final_message, understand
from poseidon.core.model import Reason
from poseidon.executors.base import Stream
from poseidon.runners.execution_outcomes import (
    CLIENT_GONE,
    OUT_OF_MEMORY,
    SHUTDOWN,
    TIMEOUT,
    EndOfInput,
    Input,
    Outcome,
    Resize,
    Signal,
)

FAILED = '{"type":"error","data":"Error executing the request"}'
STOPPED = '{"type":"error","data":"the allocation stopped as expected"}'
KILLED = '{"type":"error","data":"the allocation was OOM Killed"}'


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (Outcome.exited(0), '{"type":"exit","data":0}'),
        (Outcome.exited(255), '{"type":"exit","data":255}'),
        (Outcome.exited(256 + 3), '{"type":"exit","data":3}'),
        (Outcome.exited(-9), '{"type":"exit","data":247}'),
        (TIMEOUT, '{"type":"timeout"}'),
        (OUT_OF_MEMORY, KILLED),
        (CLIENT_GONE, None),
        (SHUTDOWN, FAILED),
        (Outcome.failed("whatever"), FAILED),
    ],
)
def test_every_outcome_has_its_message(outcome: Outcome, message: str | None) -> None:
    assert final_message(outcome) == message


def test_every_reason_has_its_message() -> None:
    special = {
        Reason.INACTIVE: '{"type":"timeout"}',
        Reason.OUT_OF_MEMORY: KILLED,
        Reason.RELEASED: STOPPED,
        Reason.STOPPED: STOPPED,
    }
    for reason in Reason:
        assert final_message(Outcome.runner_gone(reason)) == special.get(reason, FAILED), reason


def test_characters_wait_for_their_rest_in_each_stream_for_itself() -> None:
    decoder = Decoder()
    assert decoder.decode(Stream.STDOUT, b"\xe2\x82") is None
    assert decoder.decode(Stream.STDERR, b"\xc3\xa4") == '{"type":"stderr","data":"ä"}'
    assert decoder.decode(Stream.STDOUT, b"\xac!") == '{"type":"stdout","data":"€!"}'
    assert decoder.decode(Stream.STDERR, b"\xf0\x9f") is None
    assert decoder.rest() == ['{"type":"stderr","data":"\ufffd"}']


@pytest.mark.parametrize(
    ("frame", "terminal", "meaning"),
    [
        ("text", False, b"text"),
        (b"\xff", False, b"\xff"),
        (b"\xff", True, b"\xff"),
        ('{"type":"eof"}', False, b'{"type":"eof"}'),
        ('{"type":"eof"}', True, EndOfInput()),
        ('{"type":"resize","rows":1,"columns":2}', True, Resize(1, 2)),
        ('{"type":"signal","signal":"INT"}', True, Signal(2)),
        ('{"type":"signal","signal":"SEGV"}', True, b""),
        ("text", True, b""),
    ],
)
def test_frames_are_understood(frame: str | bytes, terminal: bool, meaning: Input) -> None:
    assert understand(frame, terminal=terminal) == meaning
