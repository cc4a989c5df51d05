"""Marks among output, however it is cut."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from poseidon.executors.nomad.exec_marks import Mark, Marks

TAG = b"42"
PIECES = st.lists(
    st.one_of(
        st.binary(max_size=20),
        st.sampled_from(
            [b"\x1e", b"\x1e4", b"\x1e42", b"\x1e42 1", b"\x1e42 1 2", b"\x1e43\x1e", b"42\x1e", b" 1\x1e"]
        ),
        st.tuples(st.integers(0, 255), st.integers(0, 1)),
    ),
    max_size=12,
)


def mark(*numbers: int) -> bytes:
    return b"\x1e" + b" ".join([TAG, *(str(number).encode() for number in numbers)]) + b"\x1e"


def taken(marks: Marks, chunks: list[bytes]) -> list[bytes | tuple[int, ...]]:
    """What comes out, neighbouring bytes joined."""
    found: list[bytes | tuple[int, ...]] = []
    for chunk in [*chunks, None]:
        for part in marks.feed(chunk) if chunk is not None else [marks.rest()]:
            if isinstance(part, Mark):
                found.append(part.numbers)
            elif found and isinstance(last := found[-1], bytes):
                found[-1] = last + part
            elif part:
                found.append(part)
    return found


@given(PIECES, st.lists(st.integers(0, 200)))
@example([(3, 0)], [1, 2, 3, 4])
@example([b"\x1e42", (3, 0), b"\x1e"], [3])
@example([b"\x1e42", b" -0", b"\x1e"], [])
@example([b"\x1e42 007\x1e"], [])
@example([b"\x1e42 " + b"9" * 5000 + b"\x1e"], [])
def test_however_output_is_cut_the_same_comes_out(pieces: list[bytes | tuple[int, int]], cuts: list[int]) -> None:
    data = b"".join(mark(*piece) if isinstance(piece, tuple) else piece for piece in pieces)
    points = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    chunks = [data[a:b] for a, b in pairwise(points)]
    assert taken(Marks(TAG), chunks) == taken(Marks(TAG), [data])
    rebuilt = b"".join(mark(*part) if isinstance(part, tuple) else part for part in taken(Marks(TAG), [data]))
    assert rebuilt == data


@given(st.lists(st.binary(max_size=30).filter(lambda data: b"\x1e" not in data), max_size=5), st.integers(0, 255))
def test_a_mark_is_found_wherever_it_is(before: list[bytes], code: int) -> None:
    text = b"".join(before)
    found = taken(Marks(TAG), [text + mark(code, 1, 0) + text])
    assert found == [part for part in (text, (code, 1, 0), text) if part]


@given(st.binary(max_size=300))
def test_never_more_than_a_mark_is_withheld(data: bytes) -> None:
    marks = Marks(TAG)
    out = b"".join(part for part in marks.feed(data) if isinstance(part, bytes))
    assert len(data) - len(out) <= 67


def test_what_cant_become_a_mark_any_more_is_passed_on() -> None:
    marks = Marks(TAG)
    for number in range(70):
        given = b"\x1e42" if not number else b"1"
        out = list(marks.feed(given))
    assert out


def test_output_without_separators_is_passed_on_as_it_is() -> None:
    data = b"x" * 1000
    assert next(iter(Marks(TAG).feed(data))) is data
