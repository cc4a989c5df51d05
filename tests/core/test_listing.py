"""Whatever a file is called, both programs tell it, and the parser reads it; and no output confuses the parser."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from poseidon.core.listing import (
    FIELDS,
    Entry,
    LongListing,
    MalformedListing,
    find_words,
    found,
    listed,
    ls_words,
)

Tree: TypeAlias = Mapping[bytes, "Tree | bytes | None"]
"""Names with what they are: a folder, a link's target, or a file."""

special = st.sampled_from(
    [
        b" ",
        b"\n",
        b'"',
        b"\\",
        b" -> ",
        b'" -> "',
        b"-",
        b":",
        b"total 5",
        b'":',
        b"\xff",
        b"\xc3",
        b"?",
        b"\\n",
        b"\t",
        b"'",
    ]
)
names = st.lists(st.one_of(special, st.binary(min_size=1, max_size=3)), min_size=1, max_size=5).map(b"".join)
names = names.map(lambda name: name.translate(None, b"/\0")).filter(lambda name: name not in {b"", b".", b".."})
targets = names | st.just(b"/dev/null")
trees: st.SearchStrategy[Tree] = st.recursive(
    st.dictionaries(names, st.none() | targets, max_size=4),
    lambda inner: st.dictionaries(names, st.none() | targets | inner, max_size=4),
    max_leaves=10,
)


def make(folder: bytes, tree: Tree) -> None:
    for name, what in tree.items():
        path = folder + b"/" + name
        if what is None:
            os.close(os.open(path, os.O_CREAT))
        elif isinstance(what, bytes):
            os.symlink(what, path)
        else:
            os.mkdir(path)
            make(path, what)


def visible(tree: Tree, prefix: bytes = b"./") -> Iterator[tuple[str, str, str]]:
    """Names, kinds and targets, as they are to be told."""
    for name, what in tree.items():
        if name.startswith(b"."):
            continue
        path = (prefix + name).decode("utf-8", "replace")
        if what is None:
            yield path, "-", ""
        elif isinstance(what, bytes):
            yield path, "l", what.decode("utf-8", "replace")
        else:
            yield path, "d", ""
            yield from visible(what, prefix + name + b"/")


def told(words: tuple[str, ...], folder: str) -> bytes:
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, check=True).stdout


@example({b'" -> ': b"/dev/null", b'x" -> "y': b'a" -> "b', b"\\": b"\\\\"})
@settings(deadline=None, max_examples=40)
@given(trees)
def test_any_tree_is_told_byte_for_byte(tree: Tree) -> None:
    with TemporaryDirectory() as folder:
        make(os.fsencode(folder), tree)
        for recursive in (True, False):
            by_find = found(told(find_words("./", recursive=recursive), folder), "./", recursive=recursive)
            by_ls = listed(told(ls_words("./", recursive=recursive), folder), "./", recursive=recursive)
            assert by_find is not None
            assert by_ls is not None
            expected = sorted(
                visible(tree) if recursive else (each for each in visible(tree, b"") if "/" not in each[0])
            )
            assert sorted((entry.name, entry.kind, entry.target) for entry in by_find) == expected
            assert sorted(map(facts, by_ls)) == sorted(map(facts, by_find))


def facts(entry: Entry) -> tuple[object, ...]:
    return (
        *(entry.name, entry.kind, entry.size, entry.owner, entry.group),
        *(entry.permissions, entry.modified, entry.target),
    )


@given(st.one_of(st.binary(max_size=200), st.lists(special, max_size=30).map(b"".join)), st.booleans())
def test_no_output_is_too_strange(raw: bytes, recursive: bool) -> None:
    for parse in (found, listed):
        with suppress(MalformedListing):
            entries = parse(raw, "./", recursive=recursive)
            assert (entries is None) == (raw == b"")


FACTS = (b"1", b"-rw-r--r--", b"5", b"me", b"us", b"17.9", b"x", b"")


@pytest.mark.parametrize(
    ("position", "value"),
    [(0, b""), (0, b"x"), (1, b"-rw-r--r-"), (1, b"-rw-r--r--+"), (2, b""), (2, b"1e3"), (2, b"9" * 21), (5, b"now")],
)
def test_facts_that_cannot_be_are_refused(position: int, value: bytes) -> None:
    start = b"\0".join((b"0", b"drwxr-xr-x", *FACTS[2:6], b"", b"")) + b"\0"
    entry = [*FACTS]
    assert found(start + b"\0".join(entry) + b"\0", "./", recursive=True) == [
        Entry("./x", "-", 5, "me", "us", "rw-r--r--", 17)
    ]
    entry[position] = value
    with pytest.raises(MalformedListing):
        found(start + b"\0".join(entry) + b"\0", "./", recursive=True)


def test_output_that_was_cut_is_refused() -> None:
    whole = b"\0".join((b"0", b"drwxr-xr-x", *FACTS[2:6], b"", b"", *FACTS)) + b"\0"
    for end in range(1, len(whole)):
        if whole[:end].count(b"\0") % FIELDS or not whole[:end].endswith(b"\0"):
            with pytest.raises(MalformedListing):
                found(whole[:end], "./", recursive=True)


def test_too_many_entries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poseidon.core.listing.MOST", 3)
    lines = [b'-rw-r--r-- 1 a b 1 2 "%d"' % number for number in range(4)]
    assert len(listed(b"\n".join([b"total 0", *lines[:3]]), "./", recursive=False) or ()) == 3
    with pytest.raises(LongListing):
        listed(b"\n".join([b"total 0", *lines]), "./", recursive=False)


@pytest.mark.parametrize(
    ("line", "entry"),
    [
        (b'-rw-r--r--. 1 a b 1 2 "x"', Entry("x", "-", 1, "a", "b", "rw-r--r--", 2)),
        (b'-rw-r--r--+ 1 a b 1 -2 "x"', Entry("x", "-", 1, "a", "b", "rw-r--r--", -2)),
        (b'crw--w----  1 root tty  4, 64 2 "tty"', Entry("tty", "c", 0, "root", "tty", "rw--w----", 2)),
        (b'-rw-r--r-- 1 a two words 1 2 "x"', Entry("x", "-", 1, "a", "two words", "rw-r--r--", 2)),
        (b'lrwxrwxrwx 1 a b 1 2 "x"', Entry("x", "l", 1, "a", "b", "rwxrwxrwx", 2)),
        (b'lrwxrwxrwx 1 a b 1 2 "x" -> "y\\n"', Entry("x", "l", 1, "a", "b", "rwxrwxrwx", 2, "y\n")),
        (b'-????????? ? ? ? ? ? "x"', None),
        (b"ls: something", None),
    ],
)
def test_lines_of_ls_are_understood(line: bytes, entry: Entry | None) -> None:
    assert listed(b"total 0\n" + line + b"\n", "./", recursive=False) == ([entry] if entry else [])


def test_a_path_is_never_taken_for_an_option_or_pattern(tmp_path: Path) -> None:
    awkward = ("-delete", "(", "!", "-x", "--help", "[", ".[x]", ".*", ".a\\b", ".hidden")
    for name in awkward:
        (tmp_path / name).touch()
        for words, parse in ((find_words, found), (ls_words, listed)):
            entries = parse(told(words(name, recursive=True), str(tmp_path)), name, recursive=True)
            assert [entry.name for entry in entries or ()] == [name]
    assert len(list(tmp_path.iterdir())) == len(awkward)
