"""`poseidon token new`: what it prints is what the daemon takes."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from poseidon.config import load_config
from poseidon.config_access import digest_of
from tests.cli.conftest import Result


@pytest.mark.parametrize("role", ["client", "admin", "read-only"])
def test_what_it_says_to_configure_accepts_the_token(
    poseidon: Callable[..., Result], tmp_path: Path, role: str
) -> None:
    made = poseidon("token", "new", "--name", "code-ocean", "--role", role)
    assert made.code == 0
    token = made.out.removesuffix("\n")
    assert re.fullmatch(r"[A-Za-z0-9_-]{43}", token)
    assert token not in made.err
    settings = made.err[made.err.index("[server") :]
    assert tomllib.loads(settings)["server"]["tokens"]["code-ocean"]["role"] == role
    (tmp_path / "c.toml").write_text(settings)
    kept = load_config(tmp_path / "c.toml", {}).server.tokens["code-ocean"]
    assert (kept.role, digest_of(kept.token)) == (role, digest_of(token))


def test_no_two_are_the_same(poseidon: Callable[..., Result]) -> None:
    assert poseidon("token", "new").out != poseidon("token", "new").out


@pytest.mark.parametrize("words", [("--name", "a b"), ("--name", ""), ("--role", "root")])
def test_a_wrong_name_or_role_is_a_wrong_usage(poseidon: Callable[..., Result], words: tuple[str, ...]) -> None:
    made = poseidon("token", "new", *words)
    assert (made.code, made.out) == (2, "")


def test_a_hash_is_never_sent_as_a_token(poseidon: Callable[..., Result], tmp_path: Path) -> None:
    from poseidon.cli.target import Options, find_target

    (tmp_path / "c.toml").write_text(f'[server]\ntoken = "sha256:{"0" * 64}"\n')
    assert find_target(Options(config=tmp_path / "c.toml")).token == ""
