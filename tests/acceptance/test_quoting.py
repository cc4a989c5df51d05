"""Whatever a client wants to run arrives byte for byte, through HTTP, the store, the executor and a real bash."""

from base64 import b64decode

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.acceptance.codeocean import CodeOcean, open_codeocean
from tests.acceptance.codeocean_socket import open_socket
from tests.acceptance.sites import TOKEN, Site

PATIENCE = 60
TELL = 'base64 -w0 /proc/$$/environ; echo; printf %s "$BASH_EXECUTION_STRING" | base64 -w0; exit\n'
"""The shell tells what it was given; what follows `exit` in another line is never looked at."""

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=200)
shellish = st.text("'\"\\$`!{}()[]<>|&;*?~#=%^ \t\r\n-eux", max_size=80)
names = st.text(st.characters(exclude_characters="\0=", exclude_categories=["Cs"]), min_size=1, max_size=20)


@pytest.mark.both
@settings(
    max_examples=max(8, settings.default.max_examples // 12) if settings.default else 8,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(command=texts | shellish, variables=st.dictionaries(names, texts | shellish, max_size=5))
def test_any_command_and_any_variable_arrives_byte_for_byte(
    site: Site, command: str, variables: dict[str, str]
) -> None:
    told = trio.run(_told, site, TELL + command, variables)
    assert told[1] == (TELL + command).encode()
    given_to_it = told[0].split(b"\0")
    expected = variables | {"CODEOCEAN": "true"}
    for name, value in expected.items():
        assert f"{name}={value}".encode() in given_to_it


async def _told(site: Site, command: str, variables: dict[str, str]) -> tuple[bytes, bytes]:
    """What the shell was given: its variables, and its command."""
    with trio.fail_after(PATIENCE):
        async with open_codeocean(site.url, TOKEN) as client:
            runner = await _runner(client)
            wanted = {"command": command, "environment": variables, "tty": False}
            answer = await client.request("POST", f"/runners/{runner}/execute", wanted)
            assert answer.status_code == 200, answer.text
            heard = await (await open_socket(answer.json()["websocketUrl"], TOKEN)).closed()
    assert heard.result == ("exit", 0)
    environment, line = heard.text("stdout").split("\n")
    return b64decode(environment), b64decode(line)


async def _runner(client: CodeOcean) -> str:
    """One in use that an earlier example has claimed, or a new one. It expires by itself."""
    await client.ensure(1)
    for each in (await client.request("GET", "/runners")).json()["runners"]:
        if each["phase"] == "used" and each["environmentId"] == 1:
            return str(each["id"])
    return await client.claim(1)
