"""Long strings leave a JSON text and come back as they were, whatever stands around them."""

import json
from base64 import b64encode
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from poseidon.api import long_strings
from poseidon.api.bodies import decode, validated
from poseidon.api.long_strings import LONG, decoded, taken_out
from poseidon.api.schemas import FilesBody
from poseidon.errors import BadRequest

long = st.builds(lambda letter, more: letter * (LONG + more), st.sampled_from("aZ9+/=ä"), st.integers(-3, 3))
texts = st.one_of(st.text(max_size=20), st.sampled_from(['"', "\\", '\\"', "\\\\", "\n" * LONG]), long)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=12,
)


def put_back(value: Any, taken: dict[str, str]) -> Any:
    if isinstance(value, str):
        return taken.get(value, value)
    if isinstance(value, list):
        return [put_back(each, taken) for each in value]
    if isinstance(value, dict):
        return {put_back(name, taken): put_back(each, taken) for name, each in value.items()}
    return value


@settings(deadline=None)
@given(values, st.booleans())
def test_what_is_taken_out_can_be_put_back(value: Any, ascii_only: bool) -> None:
    rest, taken = taken_out(bytearray(json.dumps(value, ensure_ascii=ascii_only).encode()))
    strings = {name.decode(): bytes(view).decode() for name, view in taken.items()}
    assert put_back(decode(rest), strings) == value
    assert all(len(view) >= LONG for view in taken.values())


@settings(deadline=None)
@given(st.text(alphabet='"\\[]{},:a \n\0', max_size=60), st.booleans())
def test_what_is_no_json_stays_none(around: str, inside: bool) -> None:
    text = f'{around}"{"A" * LONG}"' if inside else f'"{"A" * LONG}"{around}'
    rest, _ = taken_out(bytearray(text.encode()))
    try:
        expected = type(decode(text.encode()))
    except BadRequest:
        with pytest.raises(BadRequest):
            decode(rest)
    else:
        assert type(decode(rest)) is expected


def test_a_large_text_is_nearly_empty_afterwards() -> None:
    content = "A" * 4_000_000
    rest, taken = taken_out(bytearray(json.dumps({"copy": [{"path": "x", "content": content}] * 3}).encode()))
    assert len(rest) < 500
    assert [len(each) for each in taken.values()] == [len(content)] * 3


@pytest.mark.parametrize("text", ['"",' * 500_000, '"' + "\\" * 1_000_000, '"' + '\\"' * 500_000, "[" * 1_000_000])
def test_hostile_texts_are_not_searched_for_long(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    def counted(*arguments: Any) -> int:
        nonlocal looked
        looked += 1
        return count(*arguments)

    count = long_strings._backslashes
    monkeypatch.setattr(long_strings, "_backslashes", counted)
    rest, taken = taken_out(bytearray(text.encode()))
    assert (bytes(rest), taken) == (text.encode(), {})
    assert looked <= long_strings.MOST_QUOTES


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_base64_is_decoded_piece_by_piece(content: bytes) -> None:
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(long_strings, "PIECE", 16)
        assert trio.run(decoded, memoryview(b64encode(content)), "x") == content


@pytest.mark.parametrize(
    "wrong",
    [
        b"QQ==" * 8,
        b"A" * 14 + b"==" + b"A" * 16,
        b"A" * 17,
        b"A" * 16 + b"Q===",
        b"A" * 16 + b"QQ=",
        b"A" * 20 + b"!AAA",
    ],
)
async def test_wrong_base64_is_refused_wherever_it_is_wrong(wrong: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_strings, "PIECE", 16)
    with pytest.raises(BadRequest, match="content: base64 with padding is expected"):
        await decoded(memoryview(wrong), "copy.0.content")


@pytest.mark.parametrize("quoted", ['\\"', '\\\\\\"', "\\\\"])
def test_what_stands_between_strings_stays(quoted: str) -> None:
    text = bytearray(f'["{quoted}",{" " * LONG}"x"]'.encode())
    assert taken_out(text) == (text, {})


@pytest.mark.parametrize("body", [{"delete": ["x" * LONG]}, {"copy": [{"path": "x" * LONG}]}])
def test_no_path_is_that_long(body: dict[str, Any]) -> None:
    rest, taken = taken_out(bytearray(json.dumps(body).encode()))
    with pytest.raises(BadRequest, match="no path is that long"):
        validated(decode(rest), FilesBody, taken)


def test_names_of_other_requests_mean_nothing() -> None:
    _, taken = taken_out(bytearray(json.dumps("A" * LONG).encode()))
    (name,) = taken
    body = json.dumps({"copy": [{"path": "x", "content": name.decode()}]}).encode()
    rest, others = taken_out(bytearray(body))
    with pytest.raises(BadRequest, match="base64"):
        validated(decode(rest), FilesBody, others)
