"""check-config, doctor and db: what needs no daemon."""

import os
import socket
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from poseidon.cli import checks
from poseidon.cli.checks import Level
from poseidon.store.lock import take_lock
from tests.cli.conftest import Result
from tests.cli.fake_daemon import FakeDaemon

Poseidon = Callable[..., Result]


def test_no_configuration_is_a_fine_one(poseidon: Poseidon) -> None:
    result = poseidon("check-config")
    assert result == Result(0, "no file: fine; the daemon listens on 127.0.0.1:7200\n", "")


def test_a_named_configuration_is_checked(poseidon: Poseidon) -> None:
    Path("my.toml").write_text("[server]\nport = 7300\n")
    expected = f"{Path('my.toml').absolute()}: fine; the daemon listens on 127.0.0.1:7300\n"
    assert poseidon("check-config", "my.toml").out == expected
    assert poseidon("--config", "my.toml", "check-config").out == expected


def test_what_is_allowed_but_rarely_meant_is_told(poseidon: Poseidon) -> None:
    Path("my.toml").write_text('[server]\naddress = "0.0.0.0"\n')
    result = poseidon("check-config", "my.toml")
    assert result.code == 0
    assert result.err.startswith("poseidon: careful: server.address 0.0.0.0")


def test_each_problem_of_a_configuration_is_a_line(poseidon: Poseidon) -> None:
    Path("my.toml").write_text('[server]\nport = "x"\nnonsense = 1\n')
    result = poseidon("check-config", "my.toml")
    assert result.code == 1
    assert len(result.err.splitlines()) == 2
    assert all(line.startswith("poseidon: ") for line in result.err.splitlines())


def test_files_of_certificates_are_looked_into(poseidon: Poseidon) -> None:
    Path("my.toml").write_text('[server.tls]\nactive = true\ncert_file = "c.pem"\n')
    assert "cert_file" in poseidon("check-config", "my.toml").err
    Path("c.pem").write_text("nothing")
    result = poseidon("check-config", "my.toml")
    assert (result.code, "no certificate with its key" in result.err) == (1, True)


def test_a_missing_configuration_is_told(poseidon: Poseidon) -> None:
    assert poseidon("check-config", "nowhere.toml").code == 1


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "state" / "poseidon.db"


def test_a_database_is_made_checked_and_copied(poseidon: Poseidon, database: Path) -> None:
    assert poseidon("db", "upgrade").code == 0
    assert poseidon("db", "check").out.startswith(f"{database} is fine, with schema ")
    assert poseidon("db", "backup", "copy.db").code == 0
    with closing(sqlite3.connect("copy.db")) as copy:
        assert copy.execute("SELECT count(*) FROM runners").fetchone() == (0,)
    again = poseidon("db", "backup", "copy.db")
    assert again.code == 1
    assert "exists already" in again.err


def test_a_damaged_database_is_told(poseidon: Poseidon, database: Path) -> None:
    poseidon("db", "upgrade")
    database.write_bytes(b"not a database" * 1000)
    for command in ["check", "upgrade"]:
        result = poseidon("db", command)
        assert result.code == 1
        assert result.err.startswith("poseidon: ")
        assert str(database) in result.err


def test_an_unfit_row_is_a_problem(poseidon: Poseidon, database: Path) -> None:
    poseidon("db", "upgrade")
    with closing(sqlite3.connect(database)) as raw:
        raw.execute("PRAGMA foreign_keys = OFF")
        raw.execute("CREATE TABLE child (id INTEGER REFERENCES meta(rowid_of_nobody))")
        raw.execute("DROP TABLE child")
        raw.execute("CREATE TABLE kid (parent TEXT REFERENCES meta(key))")
        raw.execute("INSERT INTO kid VALUES ('nobody')")
        raw.commit()
    result = poseidon("db", "check")
    assert result.code == 1
    assert "kid" in result.err


def test_a_missing_database_is_told(poseidon: Poseidon, database: Path) -> None:
    for words in [["check"], ["backup", "copy.db"], ["forget-cluster"]]:
        assert poseidon("db", *words) == Result(1, "", f"poseidon: there is no database {database}\n")


def test_a_lost_cluster_is_forgotten(poseidon: Poseidon, database: Path) -> None:
    poseidon("db", "upgrade")
    assert poseidon("db", "forget-cluster") == Result(0, f"{database}: 0 runners of 0 jobs given up\n", "")


def test_a_database_in_use_is_not_upgraded(poseidon: Poseidon, database: Path) -> None:
    poseidon("db", "upgrade")
    lock = take_lock(database)
    try:
        result = poseidon("db", "upgrade")
    finally:
        os.close(lock)
    assert result.code == 1
    assert f"process {os.getpid()}" in result.err


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def test_the_doctor_finds_this_machine_fit(poseidon: Poseidon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSEIDON_SERVER_PORT", str(free_port()))
    result = poseidon("doctor")
    assert result.code == 0, result.out
    names = {line[6:22].strip() for line in result.out.splitlines() if not line.startswith(" ")}
    assert names >= {
        "python",
        "venv",
        "sqlite",
        "state",
        "port",
        "mode",
        "runner python",
        "user namespaces",
        "bubblewrap",
        "cgroups",
        "network",
    }


def test_the_doctor_changes_nothing(poseidon: Poseidon, database: Path) -> None:
    poseidon("doctor")
    assert not database.parent.exists()


def test_the_doctor_knows_our_own_daemon_from_others(
    poseidon: Poseidon, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSEIDON_SERVER_PORT", daemon.url.rsplit(":", 1)[1])
    assert f"Poseidon runs at {daemon.url}" in poseidon("doctor").out
    daemon.instead["GET /api/v1/health"] = (200, "text/html", "<html>")
    result = poseidon("doctor")
    assert result.code == 1
    assert "FAIL  port" in result.out
    assert "→ set server.port" in result.out


def test_the_doctor_begins_with_the_configuration(poseidon: Poseidon) -> None:
    Path("poseidon.toml").write_text("nonsense = 1\n")
    result = poseidon("doctor")
    assert result.code == 1
    assert result.out.startswith("FAIL  configuration")


def test_a_state_folder_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert checks.state_folder(tmp_path / "file" / "state").level is Level.FAIL
    assert checks.state_folder(tmp_path / "a" / "b").level is Level.OK


@pytest.mark.parametrize(
    ("switches", "root", "level"),
    [
        ({}, False, Level.OK),
        ({"user/max_user_namespaces": "0"}, True, Level.FAIL),
        ({"kernel/unprivileged_userns_clone": "0"}, False, Level.FAIL),
        ({"kernel/unprivileged_userns_clone": "0"}, True, Level.OK),
        ({"kernel/apparmor_restrict_unprivileged_userns": "1"}, False, Level.FAIL),
        ({"kernel/apparmor_restrict_unprivileged_userns": "0", "user/max_user_namespaces": "9"}, False, Level.OK),
    ],
)
def test_the_kernels_switches_are_read(tmp_path: Path, switches: dict[str, str], root: bool, level: Level) -> None:
    for name, value in switches.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(value + "\n")
    assert checks.user_namespaces(tmp_path, root=root).level is level


def test_a_program_that_fails_is_told_by_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo bubblewrap 9 && exit\necho no permission >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(checks, "bundled", lambda: fake)
    finding = checks.bubblewrap()
    assert finding.level is Level.FAIL
    assert finding.text.endswith("makes no sandbox: no permission")
    assert finding.remedy


def test_missing_programs_are_found() -> None:
    assert checks.programs("bash", "surely-not-there").text == "surely-not-there can't be found"


def test_cgroups_that_cannot_be_written_are_a_warning(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "mountinfo").write_text(f"1 0 0:1 / {tmp_path}/none rw - cgroup2 cgroup rw\n")
    finding = checks.cgroups(tmp_path)
    assert finding.level is Level.WARN
    assert "memory, pids, cpu" in finding.remedy
