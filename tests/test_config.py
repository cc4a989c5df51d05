"""Settings: every source, its precedence, and what is said when one is wrong."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from poseidon import config as config_module
from poseidon.config import Config, EnvironmentSettings, Settings, default_state, load_config
from poseidon.config_access import TokenSettings, digest_of, hashed
from poseidon.config_kinds import leaves
from poseidon.config_sources import TOOLING, variable_name
from poseidon.errors import ConfigError
from poseidon.executors.local.settings import LocalSettings

EXAMPLE = Path(__file__).parent.parent / "poseidon.toml"


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration of this machine may play a part."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config_module, "SEARCHED", (Path("poseidon.toml"), tmp_path / "etc" / "poseidon.toml"))


def load(tmp_path: Path, text: str = "", **environ: str) -> Config:
    file = tmp_path / "given.toml"
    file.write_text(text)
    return load_config(file, environ)


def problems(tmp_path: Path, text: str = "", **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, **environ)
    return caught.value.message.replace(f"{tmp_path}/", "").splitlines()


def uncommented() -> str:
    """poseidon.toml with each `#setting = value` and `#[table]` set; prose has a space after its hash."""
    return re.sub(r"^#(?=[\[a-z_])", "", EXAMPLE.read_text(), flags=re.MULTILINE)


# The file that explains everything


def test_the_example_as_it_is_changes_nothing(tmp_path: Path) -> None:
    assert load(tmp_path, EXAMPLE.read_text()).model_dump(exclude={"origin"}) == load(tmp_path).model_dump(
        exclude={"origin"}
    )


def test_the_example_shows_the_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, uncommented())
    assert config.environments == {10: EnvironmentSettings(image=config.environments[10].image)}
    [token] = config.server.tokens.values()
    assert token == TokenSettings(token=token.token)
    tables = {name: getattr(config, name) for name in Settings.model_fields if name != "environments"}
    assert Settings(**tables | {"server": config.server.model_copy(update={"tokens": {}})}) == Settings()


def test_the_example_has_every_setting() -> None:
    tables = tomllib.loads(uncommented())
    for path, _ in leaves(Settings):
        node = tables
        for key in path:
            node = next(iter(node.values())) if key == "N" else node[key]


def test_each_setting_of_the_example_is_explained_right_above_it() -> None:
    before = ""
    for line in EXAMPLE.read_text().splitlines():
        if re.match(r"#[a-z_]+ = ", line):
            assert before.startswith("# "), f"{line!r} lacks an explanation"
        before = line


def test_no_two_settings_have_the_same_variable() -> None:
    names = [variable_name(path).replace("_", "") for path, _ in leaves(Settings)]
    assert len(names) == len(set(names))
    assert not {name.replace("_", "") for name in TOOLING} & set(names)


def test_the_local_executors_settings_are_all_here() -> None:
    shown = {name: info.default for name, info in config_module.LocalSettings.model_fields.items() if name != "enabled"}
    own = {field.name: getattr(LocalSettings(), field.name) for field in fields(LocalSettings)}
    assert shown == own


# Which file


def test_no_configuration_is_a_working_configuration() -> None:
    config = load_config(None, {})
    assert config.origin is None
    assert (config.server.address, config.server.port) == ("127.0.0.1", 7200)
    assert config.local.enabled


def test_the_file_in_the_working_folder_comes_before_the_systems(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "poseidon.toml").write_text("[server]\nport = 1\n")
    assert load_config(None, {}).origin == tmp_path / "etc" / "poseidon.toml"
    (tmp_path / "poseidon.toml").write_text("[server]\nport = 2\n")
    config = load_config(None, {})
    assert (config.origin, config.server.port) == (tmp_path / "poseidon.toml", 2)


def test_a_file_that_is_asked_for_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml: no such file"):
        load_config(Path("missing.toml"), {})
    with pytest.raises(ConfigError, match="not a file"):
        load_config(tmp_path, {})


def test_a_file_that_is_no_toml_is_named_with_its_line(tmp_path: Path) -> None:
    assert problems(tmp_path, "[server]\nport =\n") == [
        "given.toml: isn't valid TOML: Invalid value (at line 2, column 7)"
    ]


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "given.toml"
    file.write_bytes(b'token = "\xff"')
    with pytest.raises(ConfigError, match=r"given\.toml: isn't UTF-8 text \(byte 9\)"):
        load_config(file, {})


# Problems


WRONG = [
    ("[server]\nport = 'abc'", 'server.port: expected a whole number from 0 to 65535, not "abc"'),
    ("[server]\nport = 70000", "server.port: expected a whole number from 0 to 65535, not 70000"),
    ("[server]\nport = true", "server.port: expected a whole number from 0 to 65535, not true"),
    ("[server]\nport = 2026-11-30", "server.port: expected a whole number from 0 to 65535"),
    ("[server]\naddress = 5", "server.address: expected text of at least 1 character, not 5"),
    ("[server]\nclaim_wait = -1", "server.claim_wait: expected a number of at least 0, not -1"),
    ("[server]\nclaim_wait = inf", "server.claim_wait: expected a number of at least 0, not Infinity"),
    ("[server]\nstall_timeout = nan", "server.stall_timeout: expected a number above 0, not NaN"),
    (
        "[server.alert]\nprewarming_pool_threshold = 2",
        "server.alert.prewarming_pool_threshold: expected a number from 0 to 1, not 2",
    ),
    ("[store]\nsynchronous = 'OFF'", 'store.synchronous: expected one of "FULL", "NORMAL", not "OFF"'),
    ("[local]\nenabled = 'yes'", 'local.enabled: expected true or false, not "yes"'),
    ("[local]\nimages = {java = 'jdk'}", 'local.images.java: expected an absolute path, not "jdk"'),
    ("[local]\nimages = {java = 5}", "local.images.java: expected text, not 5"),
    (
        "[local]\nrequire = ['cpus']",
        'local.require.0: expected one of "memory", "processes", "cpu", "users", "network", "isolation", not "cpus"',
    ),
    ("server = 5", "server: expected a table"),
    ("[server]\nprot = 1", "server.prot: unknown setting; did you mean server.port?"),
    ("[store]\ndrain_timeout = 1", "store.drain_timeout: unknown setting; did you mean server.drain_timeout?"),
    ("[sever]\nport = 1", "sever: unknown setting; did you mean server?"),
    ("[server]\nqqqq = 1", "server.qqqq: unknown setting"),
    ("[environments.x]\nimage = 'a'", "environments.x: expected a whole number, not below 0, as the table's name"),
    ("[environments.010]\nimage = 'a'", "environments.010: expected a whole number, not below 0, as the table's name"),
    ("[environments.1]", "environments.1.image: missing; expected text of at least 1 character"),
    (
        "[environments.1]\nimage = 'a'\nexposed_ports = [0]",
        "environments.1.exposed_ports.0: expected a whole number from 1 to 65535, not 0",
    ),
    (
        "[environments.1]\nimage = 'a'\nexposed_ports = 80",
        "environments.1.exposed_ports: expected a list, each item a whole number from 1 to 65535, not 80",
    ),
]


@pytest.mark.parametrize(("text", "problem"), WRONG)
def test_a_wrong_setting_is_named_with_what_was_expected(tmp_path: Path, text: str, problem: str) -> None:
    assert problems(tmp_path, text) == [f"given.toml: {problem}"]


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    text = "[server]\nport = 'x'\ncolour = 1\n[logging]\nlevel = 'loud'\n"
    told = problems(tmp_path, text, POSEIDON_STORE_RETENTION_DAYS="many", POSEIDON_XYZZY="1")
    assert [line.split(": ")[:2] for line in sorted(told)] == [
        ["POSEIDON_STORE_RETENTION_DAYS", 'expected a number above 0, not "many"'],
        ["POSEIDON_XYZZY", "unknown variable"],
        ["given.toml", "logging.level"],
        ["given.toml", "server.colour"],
        ["given.toml", "server.port"],
    ]


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    cases = [
        "[server]\ntoken = 31337",
        "[server]\ntoken = ['s3cret']",
        "[server.token]\ns3cret_less = 's3cret'",
        "server = 's3cret'",
        "token = 's3cret'",
    ]
    for text in cases:
        assert "31337" not in str(problems(tmp_path, text))
        assert "'s3cret'" not in str(problems(tmp_path, text)) and '"s3cret"' not in str(problems(tmp_path, text))
    assert "s3cret" not in repr(load(tmp_path, "[server]\ntoken = 's3cret'"))
    assert "s3cret" not in str(problems(tmp_path, POSEIDON_SERVER="s3cret"))


# Variables


def test_variables_win_over_the_file(tmp_path: Path) -> None:
    config = load(tmp_path, "[server]\nport = 1\nclaim_wait = 3", POSEIDON_SERVER_PORT="2")
    assert (config.server.port, config.server.claim_wait) == (2, 3.0)


def test_underscores_in_variables_dont_matter(tmp_path: Path) -> None:
    config = load(tmp_path, POSEIDON_SERVER_ALERT_PREWARMINGPOOLTHRESHOLD="0.5", POSEIDON_SERVER_MAXBODYMB="7")
    assert (config.server.alert.prewarming_pool_threshold, config.server.max_body_mb) == (0.5, 7)


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("1", True), ("On", True), ("no", False), ("FALSE", False)]
)
def test_variables_know_the_usual_words_for_true_and_false(tmp_path: Path, text: str, value: bool) -> None:
    assert load(tmp_path, POSEIDON_LOCAL_ENABLED=text).local.enabled is value


@pytest.mark.parametrize("text", ["80 443", "80,443", '"80 443"', "[80, 443]", "[80,\n443,]"])
def test_a_list_is_words_or_json_or_toml(tmp_path: Path, text: str) -> None:
    config = load(tmp_path, POSEIDON_ENVIRONMENTS_10_EXPOSED_PORTS=text, POSEIDON_ENVIRONMENTS_10_IMAGE="a")
    assert config.environments[10].exposed_ports == (80, 443)


@pytest.mark.parametrize("text", ['{"10": {"image": "b", "pool_size": 4}}', '{10 = {image = "b", pool_size = 4}}'])
def test_a_table_is_json_or_toml_and_replaces_the_files(tmp_path: Path, text: str) -> None:
    config = load(tmp_path, "[environments.3]\nimage = 'a'", POSEIDON_ENVIRONMENTS=text)
    assert config.environments == {10: EnvironmentSettings(image="b", pool_size=4)}


def test_a_variable_inside_a_table_wins_over_the_tables(tmp_path: Path) -> None:
    config = load(tmp_path, POSEIDON_SERVER='{"port": 5, "claim_wait": 2}', POSEIDON_SERVER_PORT="6")
    assert (config.server.port, config.server.claim_wait) == (6, 2.0)


WRONG_VARIABLES = [
    ({"POSEIDON_SERVER_PORT": "abc"}, 'POSEIDON_SERVER_PORT: expected a whole number from 0 to 65535, not "abc"'),
    ({"POSEIDON_SERVER_PORT": ""}, 'POSEIDON_SERVER_PORT: expected a whole number from 0 to 65535, not ""'),
    ({"POSEIDON_SERVER_PROT": "1"}, "POSEIDON_SERVER_PROT: unknown variable; did you mean POSEIDON_SERVER_PORT?"),
    ({"POSEIDON_": "1"}, "POSEIDON_: unknown variable"),
    ({"POSEIDON_SERVER": "{'a"}, "POSEIDON_SERVER: expected a table"),
    ({"POSEIDON_SERVER": "{}\nx = 1"}, "POSEIDON_SERVER: expected a table"),
    ({"POSEIDON_SERVER": '{"port": "x"}'}, 'POSEIDON_SERVER: port: expected a whole number from 0 to 65535, not "x"'),
    (
        {"POSEIDON_SERVER_PORT": "1", "POSEIDON_SERVERPORT": "1"},
        "POSEIDON_SERVER_PORT: sets the same as POSEIDON_SERVERPORT",
    ),
]


@pytest.mark.parametrize(("environ", "problem"), WRONG_VARIABLES)
def test_a_wrong_variable_is_named(tmp_path: Path, environ: dict[str, str], problem: str) -> None:
    assert problems(tmp_path, **environ) == [problem]


def test_variables_of_the_command_line_are_no_settings(tmp_path: Path) -> None:
    assert load(tmp_path, **dict.fromkeys(TOOLING, "anything"), OTHER="x") == load(tmp_path)


def test_choices_may_be_written_in_any_case(tmp_path: Path) -> None:
    config = load(tmp_path, "[store]\nsynchronous = 'normal'", POSEIDON_LOGGING_LEVEL="INFO")
    assert (config.store.synchronous, config.logging.level) == ("NORMAL", "info")


def test_images_can_be_given_by_a_variable(tmp_path: Path) -> None:
    assert load(tmp_path, POSEIDON_LOCAL_IMAGES='{"a/b:1": "/srv/b"}').local.images == {"a/b:1": "/srv/b"}


# Secrets


def test_a_token_can_lie_in_a_file_beside_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("from-file\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load(tmp_path, "[server]\ntoken_file = 'token'").server.token == "from-file"


def test_a_token_can_be_a_systemd_credential(tmp_path: Path) -> None:
    (tmp_path / "server.token").write_text("from-systemd")
    assert load(tmp_path, CREDENTIALS_DIRECTORY=str(tmp_path)).server.token == "from-systemd"
    assert load(tmp_path, CREDENTIALS_DIRECTORY=str(tmp_path / "none")).server.token == ""


def test_of_several_tokens_the_nearest_counts(tmp_path: Path) -> None:
    (tmp_path / "server.token").write_text("from-systemd")
    (tmp_path / "other").write_text("from-variable-file")
    text = "[server]\ntoken = 'from-toml'"
    credentials = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert load(tmp_path, text).server.token == "from-toml"
    assert load(tmp_path, text, **credentials).server.token == "from-systemd"
    assert load(tmp_path, text, **credentials, POSEIDON_SERVER_TOKEN_FILE="other").server.token == "from-variable-file"
    assert load(tmp_path, text, POSEIDON_SERVER='{"token_file": "other"}').server.token == "from-variable-file"
    assert load(tmp_path, text, **credentials, POSEIDON_SERVER_TOKEN="from-variable").server.token == "from-variable"


def test_a_token_file_that_gives_no_token_is_an_error(tmp_path: Path) -> None:
    for content in ("", " \n", "two\nlines"):
        (tmp_path / "token").write_text(content)
        (problem,) = problems(tmp_path, "[server]\ntoken_file = 'token'")
        assert problem == "given.toml: server.token_file: token: expected one line with the secret"
    (problem,) = problems(tmp_path, POSEIDON_SERVER_TOKEN_FILE="none")
    assert problem == "POSEIDON_SERVER_TOKEN_FILE: none: No such file or directory"


def test_token_and_token_file_together_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("x")
    told = problems(tmp_path, "[server]\ntoken = 's3cret'\ntoken_file = 'token'")
    assert told == ["given.toml: server.token_file: give this or server.token, not both"]


# Where the data lies


def test_data_lies_where_systemd_says() -> None:
    config = load_config(None, {"STATE_DIRECTORY": "/srv/state:/srv/other", "HOME": "/home/u"})
    assert (config.database, config.state) == (Path("/srv/state/poseidon.db"), Path("/srv/state"))


@pytest.mark.parametrize(
    ("environ", "root", "folder"),
    [
        ({"HOME": "/home/u"}, False, "/home/u/.local/state/poseidon"),
        ({"HOME": "/home/u", "XDG_STATE_HOME": "/data"}, False, "/data/poseidon"),
        ({"HOME": "/home/u", "XDG_STATE_HOME": "data"}, False, "/home/u/.local/state/poseidon"),
        ({"HOME": "/root"}, True, "/var/lib/poseidon"),
        ({"STATE_DIRECTORY": "/srv"}, True, "/srv"),
    ],
)
def test_data_lies_in_a_folder_of_the_users_own(environ: dict[str, str], root: bool, folder: str) -> None:
    assert default_state(environ, root=root) == Path(folder)


def test_a_relative_path_starts_where_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    assert load(tmp_path, "[store]\npath = 'data/p.db'").database == tmp_path / "data" / "p.db"
    assert load(tmp_path, POSEIDON_STORE_PATH="data/p.db").database == tmp_path / "cwd" / "data" / "p.db"


# Cautions


def test_an_open_address_without_a_token_is_pointed_out(tmp_path: Path) -> None:
    assert len(load(tmp_path, POSEIDON_SERVER_ADDRESS="0.0.0.0").cautions()) == 1
    for harmless in ("127.0.0.1", "::1", "localhost"):
        assert not load(tmp_path, POSEIDON_SERVER_ADDRESS=harmless).cautions()
    assert not load(tmp_path, POSEIDON_SERVER_ADDRESS="::", POSEIDON_SERVER_TOKEN="x").cautions()


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("", ""),
        ('address = "nomad.example"', "http://nomad.example:4646"),
        ('address = "10.0.0.7"\nport = 14646\ntls.active = true', "https://10.0.0.7:14646"),
        ('address = "::1"', "http://[::1]:4646"),
        ('address = "https://nomad.example:443/"', "https://nomad.example:443"),
        ('address = "nomad.example"\nenabled = false', ""),
    ],
)
def test_a_cluster_is_used_if_it_has_an_address(tmp_path: Path, text: str, url: str) -> None:
    file = tmp_path / "given.toml"
    file.write_text(f"[nomad]\n{text}\n")
    assert load_config(file, {}).nomad.url == url


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("", True),
        ("[local]\nenabled = false", False),
        ('[nomad]\naddress = "nomad.example"', False),
        ('[nomad]\naddress = "nomad.example"\n[local]\nenabled = true', True),
    ],
)
def test_beside_a_cluster_sandboxes_are_used_only_if_that_is_said(tmp_path: Path, text: str, used: bool) -> None:
    file = tmp_path / "given.toml"
    file.write_text(text)
    assert load_config(file, {}).uses_local is used


def test_the_originals_names_of_variables_set_the_cluster() -> None:
    environ = {
        "POSEIDON_NOMAD_ADDRESS": "nomad.example",
        "POSEIDON_NOMAD_TLS_ACTIVE": "true",
        "POSEIDON_NOMAD_TLS_CAFILE": "/ca.pem",
        "POSEIDON_NOMAD_DISABLEFORCEPULL": "true",
        "POSEIDON_NOMAD_NETWORK_MODE": "cni/secure-bridge",
    }
    nomad = load_config(None, environ).nomad
    assert (nomad.url, nomad.tls.ca_file) == ("https://nomad.example:4646", "/ca.pem")
    assert (nomad.disable_force_pull, nomad.network.mode) == (True, "cni/secure-bridge")


# Tokens with names


HASH = "sha256:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of "secret"


def test_tokens_have_names_and_roles(tmp_path: Path) -> None:
    (tmp_path / "dashboard").write_text(f"{HASH}\n")
    text = """[server]
    token = "main"
    [server.tokens.codeocean]
    token = "second"
    [server.tokens.dashboard]
    role = "read-only"
    token_file = "dashboard"
    """
    tokens = load(tmp_path, text).server.all_tokens
    assert {name: each.role for name, each in tokens.items()} == {
        "server.token": "admin",
        "codeocean": "client",
        "dashboard": "read-only",
    }
    assert digest_of(tokens["dashboard"].token) == digest_of("secret")
    assert hashed("secret") == hashed(HASH) == HASH


def test_tokens_can_come_by_a_variable_and_from_systemd(tmp_path: Path) -> None:
    (tmp_path / "server.tokens.x.token").write_text("from-systemd")
    config = load(tmp_path, "[server.tokens.x]\ntoken = 'own'", CREDENTIALS_DIRECTORY=str(tmp_path))
    assert config.server.tokens["x"].token == "from-systemd"
    (tmp_path / "t").write_text("from-file")
    config = load(tmp_path, POSEIDON_SERVER_TOKENS='{"x": {"token_file": "t", "role": "admin"}}')
    assert (config.server.tokens["x"].token, config.server.tokens["x"].role) == ("from-file", "admin")


WRONG_TOKENS = [
    ("[server.tokens.x]", "server.tokens.x: expected token or token_file in it"),
    (
        "[server.tokens.x]\ntoken = 'a'\nrole = 'root'",
        'server.tokens.x.role: expected one of "admin", "client", "read-only", not "root"',
    ),
    ("[server.tokens.'a b']\ntoken = 'a'", "server.tokens.a b: expected letters, digits, - and _ as the table's name"),
    ("[server.tokens.x]\ntoken = 'sha256:12'", "server.tokens.x.token: expected 64 hexadecimal digits after sha256:"),
    ("[server]\ntoken = 'sha256:s3cret'", "server.token: expected 64 hexadecimal digits after sha256:"),
    ("[server]\ntokens = 's3cret'", "server.tokens: expected a table"),
]


@pytest.mark.parametrize(("text", "problem"), WRONG_TOKENS)
def test_a_wrong_token_table_is_named(tmp_path: Path, text: str, problem: str) -> None:
    told = problems(tmp_path, text)
    assert told == [f"given.toml: {problem}"]
    assert "s3cret" not in str(told)


@pytest.mark.parametrize("setting", ["server.token", "nomad.token", "server.tokens.x.token"])
@pytest.mark.parametrize("secret", ["a\\nb", "a\\u0007b", "a\\u2192b", " a", "a\\u0085"])
def test_a_secret_that_no_header_can_carry_is_refused(tmp_path: Path, setting: str, secret: str) -> None:
    told = problems(tmp_path, f'{setting} = "{secret}"')
    assert [line.split(": ")[:2] for line in told] == [["given.toml", setting]]
    assert "Latin-1" in told[0]


def test_a_bad_secret_is_refused_wherever_it_comes_from(tmp_path: Path) -> None:
    assert "Latin-1" in problems(tmp_path, POSEIDON_SERVER_TOKEN="a\nb")[0]
    (tmp_path / "token").write_text("a→b")
    assert "Latin-1" in problems(tmp_path, "[server]\ntoken_file = 'token'")[0]
    assert "ASCII" in problems(tmp_path, "[nomad]\ntoken = 'geheïm'")[0]
    assert "a→b" not in str(problems(tmp_path, "[server]\ntoken_file = 'token'"))


def test_no_two_tokens_are_the_same(tmp_path: Path) -> None:
    text = f"[server]\ntoken = 'secret'\n[server.tokens.x]\ntoken = '{HASH}'"
    assert problems(tmp_path, text) == ["server.tokens.x: the same token as server.token"]


def test_any_token_is_a_reason_not_to_warn_of_an_open_address(tmp_path: Path) -> None:
    text = f"[server.tokens.x]\ntoken = '{HASH}'"
    assert not load(tmp_path, text, POSEIDON_SERVER_ADDRESS="0.0.0.0").cautions()


# Proxies, origins, names


WRONG_ADDRESSES = [
    ("base_url = 'ex.org'", 'server.base_url: expected http(s)://host[:port], not "ex.org"'),
    ("base_url = 'ftp://ex.org'", 'server.base_url: expected http(s)://host[:port], not "ftp://ex.org"'),
    ("base_url = 'http://a@ex.org'", 'server.base_url: expected http(s)://host[:port], not "http://a@ex.org"'),
    ("base_url = 'http://ex.org:x'", 'server.base_url: expected http(s)://host[:port], not "http://ex.org:x"'),
    (
        "trusted_proxies = ['10.0.0.0/8', 'proxy']",
        'server.trusted_proxies.1: expected an address, a network or "unix", not "proxy"',
    ),
    (
        "allowed_origins = ['https://ex.org/a']",
        'server.allowed_origins.0: expected http(s)://host[:port] without a path, not "https://ex.org/a"',
    ),
    ("limits.connections = -1", "server.limits.connections: expected a whole number from 0 to 1048576, not -1"),
    ("tls.active = true", "server.tls: expected cert_file in it, if it is active"),
]


@pytest.mark.parametrize(("text", "problem"), WRONG_ADDRESSES)
def test_a_wrong_address_is_named(tmp_path: Path, text: str, problem: str) -> None:
    assert problems(tmp_path, f"[server]\n{text}") == [f"given.toml: {problem}"]


def test_addresses_are_kept_in_one_form(tmp_path: Path) -> None:
    text = """[server]
    base_url = "https://ex.org/code/"
    trusted_proxies = ["10.1.2.3/8", "::1", "unix"]
    allowed_origins = ["https://Learn.Ex.org/"]
    """
    server = load(tmp_path, text).server
    assert server.base_url == "https://ex.org/code"
    assert load(tmp_path, "server.base_url = 'https://ex.org/api/v1/'").server.base_url == "https://ex.org"
    assert server.trusted_proxies == ("10.0.0.0/8", "::1/128", "unix")
    assert server.allowed_origins == ("https://learn.ex.org",)


def test_files_of_all_tables_start_from_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    text = "[nomad]\ntemplate_job_file = 'job.hcl'\n[nomad.tls]\nca_file = 'ca.pem'\nkey_file = '/key.pem'"
    config = load(tmp_path, text, POSEIDON_SERVER_TLS_CERTFILE="c.pem")
    assert config.nomad.template_job_file == str(tmp_path / "job.hcl")
    assert (config.nomad.tls.ca_file, config.nomad.tls.key_file) == (str(tmp_path / "ca.pem"), "/key.pem")
    assert config.server.tls.cert_file == str(tmp_path / "elsewhere" / "c.pem")


def test_secrets_that_everybody_can_read_are_pointed_out(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret")
    (tmp_path / "hash").write_text(HASH)
    for mode, told in ((0o644, 1), (0o640, 0), (0o600, 0)):
        (tmp_path / "token").chmod(mode)
        (tmp_path / "given.toml").touch(mode=mode)
        (tmp_path / "given.toml").chmod(mode)
        for text in ("[server]\ntoken_file = 'token'", "[nomad]\ntoken = 's3cret'"):
            cautions = load(tmp_path, text).cautions()
            assert len(cautions) == told, (mode, text)
            assert "s3cret" not in str(cautions)
    for harmless in ("", f"[server]\ntoken = '{HASH}'", "[server]\ntoken_file = 'hash'"):
        (tmp_path / "given.toml").chmod(0o644)
        assert not load(tmp_path, harmless).cautions()
