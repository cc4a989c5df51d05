"""`poseidon import-config`: every key of the original is translated or reported, and what comes out is usable."""

import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poseidon.cli.original import translate
from poseidon.config import Config, load_config
from poseidon.errors import ConfigError
from tests.cli.conftest import Result

Poseidon = Callable[..., Result]

WHOLE = """\
server:
  address: "[::1]"
  port: 7201
  systemdsocketactivation: true
  token: 's3cr\u00e9t "quoted" \\ back'
  tls:
    active: true
    cafile: /etc/ca.pem
    certfile: cert.pem
    keyfile: /etc/key.pem
  interactivestderr: true
  templatejobfile: jobs/template.hcl
  alert:
    prewarmingpoolthreshold: 0.5
    prewarmingpoolreloadtimeout: 300
  loggingfiltertoken: filter
nomad:
  enabled: true
  address: nomad.example
  port: 4747
  token: nomad-s3cret
  tls: {active: true, cafile: ca.pem, certfile: "", keyfile: ""}
  namespace: poseidon
  disableforcepull: true
  network:
    mode: cni/secure-bridge
    dns: {servers: [1.1.1.1]}
aws: {enabled: true, endpoint: wss://aws, functions: [java]}
logger: {level: WARN, formatter: JSONFormatter}
profiling: {cpuenabled: true, cpufile: "", memoryinterval: 100, memorythreshold: 1000}
sentry: {dsn: https://x@sentry, attachstacktrace: true}
influxdb: {url: http://influx, token: influx-s3cret, organization: "", bucket: b, stage: s}
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


def imported(poseidon: Poseidon, here: Path, text: str) -> tuple[Config, list[str]]:
    """The configuration that comes out, and the remarks."""
    (here / "configuration.yaml").write_text(text)
    made = poseidon("import-config", "configuration.yaml", "--force")
    assert (made.code, made.out) == (0, ""), made.err
    checked = load_config(here / "poseidon.toml", {})
    return checked, [line.removeprefix("poseidon: ") for line in made.err.splitlines()[:-1]]


def test_every_key_of_the_original_is_translated_or_reported(poseidon: Poseidon, here: Path) -> None:
    config, remarks = imported(poseidon, here, WHOLE)
    server, nomad = config.server, config.nomad
    assert (server.address, server.port, server.token) == ("::1", 7201, 's3cr\u00e9t "quoted" \\ back')
    assert (server.tls.active, server.tls.min_version) == (True, "1.3")
    assert (server.tls.cert_file, server.tls.key_file) == (str(here / "cert.pem"), "/etc/key.pem")
    assert server.tls.ca_file == "/etc/ca.pem"
    assert server.alert.prewarming_pool_threshold == 0.5
    assert (nomad.url, nomad.token, nomad.namespace) == ("https://nomad.example:4747", "nomad-s3cret", "poseidon")
    assert (nomad.disable_force_pull, nomad.network.mode) == (True, "cni/secure-bridge")
    assert (nomad.tls.ca_file, nomad.tls.cert_file) == (str(here / "ca.pem"), "")
    assert nomad.template_job_file == str(here / "jobs/template.hcl")
    assert (config.logging.level, config.logging.format) == ("warning", "json")
    reported = {line.split(": ")[1] for line in remarks if line.startswith("line ")}
    assert reported == {
        "server.systemdsocketactivation",
        "server.interactivestderr",
        "server.alert.prewarmingpoolreloadtimeout",
        "server.loggingfiltertoken",
        "nomad.network.dns.servers",
        "aws.enabled",
        "aws.endpoint",
        "aws.functions",
        "profiling.cpuenabled",
        "profiling.memoryinterval",
        "profiling.memorythreshold",
        "sentry.dsn",
        "sentry.attachstacktrace",
        "influxdb.url",
        "influxdb.token",
        "influxdb.bucket",
        "influxdb.stage",
    }
    assert "s3cret" not in str(remarks) and "s3cr\u00e9t" not in str(remarks)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "nomad:\nserver:\n  token:\n"])
def test_an_empty_file_is_the_originals_defaults(poseidon: Poseidon, here: Path, text: str) -> None:
    config, remarks = imported(poseidon, here, text)
    assert (config.nomad.url, config.server.port, config.server.token) == ("http://127.0.0.1:4646", 7200, "")
    assert not config.uses_local
    assert remarks == []


def test_the_name_that_the_threshold_had_before_is_known_too(poseidon: Poseidon, here: Path) -> None:
    config, remarks = imported(poseidon, here, "server: {prewarmingpoolalertthreshold: 0.5}")
    assert (config.server.alert.prewarming_pool_threshold, remarks) == (0.5, [])
    environ = {"POSEIDON_SERVER_PREWARMINGPOOLALERTTHRESHOLD": "0.25"}
    assert load_config(None, environ).server.alert.prewarming_pool_threshold == 0.25


def test_without_a_cluster_it_is_told_where_programs_run(poseidon: Poseidon, here: Path) -> None:
    config, [remark] = imported(poseidon, here, "nomad: {enabled: false}")
    assert config.uses_local
    assert "sandboxes of this machine" in remark


def test_an_unknown_key_is_told_with_its_line(poseidon: Poseidon, here: Path) -> None:
    _, remarks = imported(poseidon, here, "server:\n  port: 7201\n  Port: 1\ncolour: red\n7: 8\n[a]: b\n")
    assert [line.split(": ")[:2] for line in remarks] == [
        ["line 3", "server.Port"],
        ["line 4", "colour"],
        ["line 5", "7"],
        ["line 6", "?"],
    ]


WRONG = [
    ("server: {port: x}", "line 1: server.port: expected a whole number"),
    ("server: {port: true}", "line 1: server.port: expected a whole number"),
    ("server:\n  token: [a]", "line 2: server.token: expected text"),
    ("server: {tls: {active: 'yes'}}", "line 1: server.tls.active: expected true or false"),
    ("server: {alert: {prewarmingpoolthreshold: much}}", "expected a number"),
    ("logger: {level: loud}", "logger.level: expected one of trace, debug"),
    ("server: {port: 70000}", "server.port: expected a whole number from 0 to 65535, not 70000"),
    ('server: {token: "a\\nb"}', "server.token: expected a secret of one line"),
    ("server: {tls: {active: true}}", "server.tls: expected cert_file in it"),
    ("server: [", "isn't valid YAML: line 1"),
    ("server: \x07", "isn't valid YAML"),
    ("- a", "isn't a configuration"),
    ("a: 1\n---\nb: 2", "isn't valid YAML: line 2"),
    ("a: *b", "isn't valid YAML: line 1"),
    ("a: !!python/object/apply:os.system [id]", None),
    ("&x {a: *x}", None),
    ("a: " + "[" * 5000, "isn't valid YAML"),
    (b"a: \xff", "isn't UTF-8 text"),
]


@pytest.mark.parametrize(("text", "problem"), WRONG)
def test_a_bad_file_is_told_without_a_traceback_and_leaves_nothing(
    poseidon: Poseidon, here: Path, text: str | bytes, problem: str | None
) -> None:
    (here / "c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    made = poseidon("import-config", "c.yaml")
    assert "Traceback" not in made.err and "internal error" not in made.err
    assert made.code == (0 if problem is None else 1)
    if problem is not None:
        assert made.err.startswith("poseidon: c.yaml: ") and problem in made.err
        assert [path.name for path in here.iterdir()] == ["c.yaml"]


def test_aliases_that_multiply_are_refused(poseidon: Poseidon, here: Path) -> None:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {{{', '.join(f'k{k}: *a{n - 1}' for k in range(9))}}}" for n in range(1, 9)]
    (here / "c.yaml").write_text("\n".join(lines))
    made = poseidon("import-config", "c.yaml")
    assert made.code == 1 and "more than" in made.err


def test_only_its_owner_can_read_the_result(poseidon: Poseidon, here: Path) -> None:
    imported(poseidon, here, "server: {token: s3cret}")
    assert stat.S_IMODE((here / "poseidon.toml").stat().st_mode) == 0o600
    assert sorted(path.name for path in here.iterdir()) == ["configuration.yaml", "poseidon.toml"]


def test_nothing_is_overwritten_unless_that_is_said(poseidon: Poseidon, here: Path) -> None:
    (here / "c.yaml").write_text("")
    (here / "poseidon.toml").write_text("mine")
    (here / "link.toml").symlink_to("nowhere")
    for target in ("poseidon.toml", "link.toml"):
        refused = poseidon("import-config", "c.yaml", "-o", target)
        assert refused.code == 1 and "--force" in refused.err
    assert (here / "poseidon.toml").read_text() == "mine"
    assert poseidon("import-config", "c.yaml", "--force").code == 0
    assert "nomad" in (here / "poseidon.toml").read_text()
    for target in ("no/such/folder", "c.yaml/x", "."):
        refused = poseidon("import-config", "c.yaml", "-o", target, "--force")
        assert refused.code in {1, 2} and "internal" not in refused.err
    assert sorted(path.name for path in here.iterdir()) == ["c.yaml", "link.toml", "poseidon.toml"]


def test_it_can_go_to_stdout(poseidon: Poseidon, here: Path) -> None:
    (here / "c.yaml").write_text("server: {port: 7201}")
    made = poseidon("import-config", "c.yaml", "-o", "-")
    assert "port = 7201" in made.out and not (here / "poseidon.toml").exists()


def test_the_command_that_checks_configurations_is_content(poseidon: Poseidon, here: Path) -> None:
    imported(poseidon, here, WHOLE.replace("tls:\n    active: true", "tls:\n    active: false"))
    assert poseidon("check-config", "poseidon.toml").code == 0


ORIGINALS: dict[str, Any] = {
    "POSEIDON_SERVER_ADDRESS": "127.0.0.1",
    "POSEIDON_SERVER_PORT": "7201",
    "POSEIDON_SERVER_TOKEN": "secret",
    "POSEIDON_SERVER_TLS_CAFILE": "/ca",
    "POSEIDON_SERVER_TEMPLATEJOBFILE": "/t.hcl",
    "POSEIDON_SERVER_SYSTEMDSOCKETACTIVATION": "true",
    "POSEIDON_SERVER_INTERACTIVESTDERR": "true",
    "POSEIDON_SERVER_ALERT_PREWARMINGPOOLTHRESHOLD": "0.5",
    "POSEIDON_NOMAD_ENABLED": "true",
    "POSEIDON_NOMAD_ADDRESS": "nomad.example",
    "POSEIDON_NOMAD_DISABLEFORCEPULL": "true",
    "POSEIDON_NOMAD_NETWORK_MODE": "bridge",
    "POSEIDON_LOGGER_LEVEL": "TRACE",
    "POSEIDON_LOGGER_FORMATTER": "JSONFormatter",
    "POSEIDON_AWS_ENABLED": "false",
    "POSEIDON_SENTRY_DSN": "x",
    "POSEIDON_INFLUXDB_URL": "x",
    "POSEIDON_PROFILING_CPUENABLED": "true",
}


def test_variables_of_the_original_work_as_they_are(here: Path) -> None:
    config = load_config(None, ORIGINALS)
    assert (config.server.port, config.server.token, config.server.tls.ca_file) == (7201, "secret", "/ca")
    assert (config.nomad.template_job_file, config.nomad.url) == ("/t.hcl", "http://nomad.example:4646")
    assert (config.logging.level, config.logging.format) == ("debug", "json")
    told = {line.split(":")[0].removeprefix("POSEIDON_").split("_")[0] for line in config.cautions()}
    assert told <= {"SERVER", "AWS", "SENTRY", "INFLUXDB", "PROFILING"}
    assert any("AWS Lambda isn't supported" in line for line in config.cautions())


def test_a_variable_of_ours_wins_over_the_originals(here: Path) -> None:
    environ = {"POSEIDON_LOGGER_LEVEL": "TRACE", "POSEIDON_LOGGING_LEVEL": "error"}
    assert load_config(None, environ).logging.level == "error"


WORDS = [
    "server",
    "nomad",
    "tls",
    "token",
    "port",
    "active",
    "certfile",
    "logger",
    "level",
    "INFO",
    "true",
    "7200",
    "0.5",
    "2026-99-99",
    "0x",
    ".inf",
    ".nan",
    "1_000",
    "-",
    "{",
    "}",
    "[",
    "]",
    "&a",
    "*a",
    "!!binary",
    "!x",
    "|",
    '"',
    "'",
    "~",
    "<<:",
    "---",
    "?",
    "\x07",
    "\x7f",
    "é",
    "😀",
]
PIECES = st.sampled_from([*WORDS, ": ", ", ", " ", "\n", "\n  ", "\n    ", "\x85"])


@settings(deadline=None, max_examples=300)
@given(st.lists(PIECES, max_size=30).map("".join))
def test_any_text_is_a_configuration_or_refused_in_words(text: str) -> None:
    try:
        found = translate(text, Path("/etc"))
    except ConfigError as error:
        assert "\n" not in error.message
        return
    tree: Any = tomllib.loads(found.as_toml())
    for path, value in found.settings.items():
        node = tree
        for key in path:
            node = node[key]
        assert node == value or value != value
