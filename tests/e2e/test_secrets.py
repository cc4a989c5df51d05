"""Tokens are nowhere but with the daemon and its client: in no log, answer, database, program or other process."""

import json
import secrets
from pathlib import Path

import psutil

from tests.e2e.daemons import Daemon, open_client, open_daemon

LOOK = "cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'; env; set"


async def test_tokens_are_nowhere_but_where_they_belong(tmp_path: Path) -> None:
    own, second, cluster, mistyped = (secrets.token_urlsafe(24) for _ in range(4))
    settings = {
        "SERVER_TOKEN": own,
        "SERVER_TOKENS": json.dumps({"reader": {"role": "read-only", "token": second}}),
        "NOMAD_TOKEN": cluster,
        "LOGGING_LEVEL": "debug",
    }
    async with open_daemon(tmp_path, **settings) as daemon:
        said = await conversation(daemon, own, second, mistyped)
        seen = [each for each in map(environment_of, psutil.process_iter()) if each]
        assert len(seen) > 1
        for text in (said, *seen, daemon.log):
            assert_free(text, own, second, cluster, mistyped)
        assert "reader" in daemon.log
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert_free(file.read_bytes().decode("latin-1"), own, second, cluster, mistyped)


def assert_free(text: str, *tokens: str) -> None:
    """A message that doesn't print what must not be printed."""
    assert not [number for number, token in enumerate(tokens) if token in text]


def environment_of(process: psutil.Process) -> str:
    """Variables and words of a process; nothing of a daemon itself, which has its tokens from there."""
    try:
        words = process.cmdline()
        return "" if "serve" in words else str((process.environ(), words))
    except psutil.Error:
        return ""


async def conversation(daemon: Daemon, own: str, second: str, mistyped: str) -> str:
    """All that the daemon and a program in a sandbox say, right tokens and wrong ones given."""
    said = []
    async with open_client(daemon, own) as client:
        await client.put()
        runner = await client.claim()
        for privileged in (False, True):
            said.append((await client.run(runner, LOOK, tty=False, privilegedExecution=privileged)).stdout)
            assert "CODEOCEAN" in said[-1]
        for headers in (
            {},
            {"Poseidon-Token": second},
            {"Poseidon-Token": mistyped},
            {"Poseidon-Token": "", "Authorization": f"Bearer {mistyped}"},
            {"Poseidon-Token": "", "Authorization": f"Basic {mistyped}"},
        ):
            for method, path in (
                ("POST", "/runners"),
                ("PUT", "/execution-environments/1"),
                ("DELETE", "/runners/x"),
                ("GET", "/status"),
                ("GET", "/nothing"),
                ("PUT", "/health"),
                ("GET", f"/runners/{runner}/websocket"),
            ):
                answer = await client.http.request(method, path, headers=headers, content=b"{")
                said.append(f"{answer.headers} {answer.text}")
    return "\n".join(said)
