"""A real daemon takes new tokens and certificates by SIGHUP, and is called by `poseidon` over TLS."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import trio

from tests.certificates import Authority
from tests.e2e.daemons import Daemon


class Encrypted(Daemon):
    """A daemon that speaks TLS."""

    @property
    def url(self) -> str:
        return super().url.replace("http:", "https:")


async def test_a_reload_exchanges_tokens_and_certificates(tmp_path: Path) -> None:
    first, second = Authority(tmp_path), Authority(tmp_path)
    (tmp_path / "token").write_text("first token")
    (tmp_path / "certificate").write_bytes(first.issue().read_bytes())
    text = f"""
    [server]
    token_file = "token"
    tls = {{active = true, cert_file = "certificate", ca_file = "{first.file}"}}
    [local]
    enabled = true
    """
    (tmp_path / "poseidon.toml").write_text(text)
    daemon = Encrypted(tmp_path, {"LOGGING_FORMAT": "json"})
    await daemon.spawn()
    assert daemon.process
    try:
        await until_status(daemon, first, "first token", 200)
        assert (await poseidon(tmp_path, daemon, "environments", "list")).returncode == 0
        (tmp_path / "token").write_text("second token")
        (tmp_path / "certificate").write_bytes(second.issue().read_bytes())
        daemon.process.send_signal(signal.SIGHUP)
        await until_status(daemon, second, "second token", 200)
        await until_status(daemon, second, "first token", 401)
        refused = await poseidon(tmp_path, daemon, "status")
        assert refused.returncode == 1
        assert "CERTIFICATE_VERIFY_FAILED" in refused.stderr and "Traceback" not in refused.stderr
        (tmp_path / "token").write_text("two\nlines")
        daemon.process.send_signal(signal.SIGHUP)
        await until_logged(daemon, "configuration not reloaded")
        await until_status(daemon, second, "second token", 200)
    finally:
        assert await daemon.end() == 0  # noqa: ASYNC102 - it has a time limit of its own
    assert 'token"' not in daemon.log.replace('server.token"', "")
    assert "first token" not in daemon.log and "second token" not in daemon.log


async def until_status(daemon: Daemon, authority: Authority, token: str, status: int) -> None:
    headers = {"Poseidon-Token": token}
    with trio.fail_after(30):
        while True:
            async with httpx.AsyncClient(verify=authority.client(), headers=headers, trust_env=False) as http:
                try:
                    if (await http.get(f"{daemon.url}/status")).status_code == status:
                        return
                except httpx.TransportError:
                    pass
            await trio.sleep(0.02)


async def until_logged(daemon: Daemon, words: str) -> None:
    with trio.fail_after(30):
        while words not in daemon.log:
            await trio.sleep(0.02)


async def poseidon(folder: Path, daemon: Daemon, *words: str) -> "subprocess.CompletedProcess[str]":
    run = partial(
        subprocess.run,
        [sys.executable, "-m", "poseidon", *words],
        cwd=folder,
        env={**os.environ, "POSEIDON_SERVER_PORT": str(daemon.port), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    return await trio.to_thread.run_sync(run)
