"""SIGHUP: all of the new configuration or nothing of it, and the log says which."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import trio

from poseidon import daemon as daemon_module
from poseidon.api.auth import Keyring
from poseidon.api.tls import open_tls
from poseidon.config import load_config
from poseidon.daemon import Stopping
from poseidon.reloading import Reloading, keys_of
from tests.certificates import Authority
from tests.logs import undone

__all__ = ["undone"]


class Daemon:
    """As much of it as a reload touches, with a configuration to write."""

    def __init__(self, folder: Path, text: str) -> None:
        self.file = folder / "poseidon.toml"
        self.file.write_text(text)
        config = load_config(self.file, {})
        self.keyring = Keyring(keys_of(config))
        self.tls = open_tls(config.server.tls)
        self._reloading = Reloading(config, self.keyring, self.tls, environ={})
        self.told: list[str] = []
        self._reloading.followers.append(lambda fresh: self.told.append(fresh.nomad.token))

    def reload(self, text: str, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
        """What was logged, by event."""
        self.file.write_text(f'{text}\n[logging]\nformat = "json"\n')
        capsys.readouterr()
        self._reloading.reload()
        return {line["event"]: line for line in map(json.loads, capsys.readouterr().err.splitlines())}


def names(keyring: Keyring, *tokens: str) -> list[str | None]:
    return [key.name if key else None for key in map(keyring.find, tokens)]


def test_new_tokens_count_and_old_ones_no_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("first")
    text = "[server]\ntoken_file = 'token'"
    daemon = Daemon(tmp_path, text)
    (tmp_path / "token").write_text("second")
    told = daemon.reload(f"{text}\n[server.tokens.x]\ntoken = 'third'", capsys)
    assert names(daemon.keyring, "first", "second", "third") == [None, "server.token", "x"]
    assert list(told) == ["configuration reloaded"]
    assert told["configuration reloaded"]["callers"] == ["server.token", "x"]


@pytest.mark.parametrize("mistake", ["[server]\ntoken = 7", "[server", "[server]\ntoken_file = 'gone'"])
def test_a_mistake_changes_nothing(tmp_path: Path, mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = Daemon(tmp_path, "[server]\ntoken = 'first'\n[logging]\nformat = 'json'")
    daemon.reload("[server]\ntoken = 'first'", capsys)
    [line] = daemon.reload(mistake, capsys).values()
    assert (line["level"], len(line["problems"])) == ("error", 1)
    assert names(daemon.keyring, "first") == ["server.token"]
    assert "configuration reloaded" in daemon.reload("[server]\ntoken = 'next'", capsys)
    assert names(daemon.keyring, "first", "next") == [None, "server.token"]


def test_certificates_are_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = Authority(tmp_path)
    text = f"[server.tls]\nactive = true\ncert_file = '{authority.issue()}'\n[server.tokens.x]\ntoken = "
    daemon = Daemon(tmp_path, text + "'first'")
    assert daemon.tls
    before = daemon.tls.context
    daemon.reload(text + "'second'", capsys)
    assert daemon.tls.context is not before
    before = daemon.tls.context
    Path(text.split("'")[1]).unlink()
    told = daemon.reload(text + "'third'", capsys)
    assert "No such file" in str(told["configuration not reloaded: it has mistakes"]["problems"])
    assert daemon.tls.context is before
    assert names(daemon.keyring, "second", "third") == ["x", None]


def test_what_waits_for_a_restart_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = Daemon(tmp_path, "[server]\nport = 1")
    told = daemon.reload(
        "[server]\nport = 2\ntoken = 'x'\ntls = {active = true, cert_file = 'c'}\n[environments.3]\nimage = 'a'", capsys
    )
    waiting = told["changed settings wait for a restart"]["settings"]
    assert waiting == ["environments.3", "server.port", "server.tls.active"]
    assert daemon.tls is None


def test_secrets_of_before_and_after_are_hidden_from_then_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import structlog

    daemon = Daemon(tmp_path, "[server]\ntoken = 'the first secret'")
    daemon.reload("[server]\ntoken = 'the second secret'", capsys)
    structlog.get_logger().warning("x", url="/?a=the first secret&b=the second secret")
    assert "secret" not in capsys.readouterr().err


def test_the_cluster_is_told_of_its_new_token_and_of_no_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = Daemon(tmp_path, "[nomad]\ntoken = 'first'")
    daemon.reload("[nomad]\ntoken = 7", capsys)
    told = daemon.reload("[nomad]\ntoken = 'second'", capsys)
    assert daemon.told == ["second"]
    assert list(told) == ["configuration reloaded"]


@pytest.mark.parametrize("terminal", [True, False])
async def test_sighup_is_the_end_of_a_terminal_and_elsewhere_a_wish_to_reload(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "on_terminal", lambda: terminal)
    stopping = Stopping()
    reloading = Daemon(tmp_path, "")._reloading
    reloaded = trio.Event()
    monkeypatch.setattr(Reloading, "reload", lambda _: reloaded.set())
    async with trio.open_nursery() as nursery:
        await nursery.start(stopping.listen)
        if not terminal:
            await nursery.start(reloading.listen)
        signal.raise_signal(signal.SIGHUP)
        with trio.fail_after(30):
            await (stopping.wanted if terminal else reloaded).wait()
        assert stopping.wanted.is_set() == terminal
        nursery.cancel_scope.cancel()
