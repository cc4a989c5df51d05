"""As systemd would start it: sockets handed over, readiness and the watchdog told, children that inherit nothing."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import trio

from tests.e2e.daemons import Daemon, environ, free_port, open_client, open_daemon


async def test_readiness_is_told_after_listening_and_the_watchdog_is_fed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        address = str(tmp_path / "notify")
        manager.bind(address)
        manager.setblocking(False)
        told = trio.socket.from_stdlib_socket(manager)
        os.environ["NOTIFY_SOCKET"] = address
        os.environ["WATCHDOG_USEC"] = "400000"
        try:
            async with open_daemon(tmp_path) as daemon:
                with trio.fail_after(30):
                    assert b"READY=1" in await told.recv(4096)
                    async with httpx.AsyncClient(trust_env=False) as http:
                        assert (await http.get(f"{daemon.url}/version")).status_code == 200
                    while b"WATCHDOG=1" not in await told.recv(4096):
                        pass
                assert daemon.process is not None
                daemon.process.send_signal(signal.SIGTERM)
                with trio.fail_after(30):
                    while b"STOPPING=1" not in await told.recv(4096):
                        pass
                await trio.to_thread.run_sync(daemon.process.wait)
        finally:
            del os.environ["NOTIFY_SOCKET"], os.environ["WATCHDOG_USEC"]


@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="systemd-socket-activate is not installed")
async def test_sockets_of_systemd_are_served_and_no_sandbox_inherits_them(tmp_path: Path) -> None:
    port, other = free_port(), free_port()
    log = (tmp_path / "log").open("wb")
    variables = environ(tmp_path, port)
    command = ["systemd-socket-activate", "-l", f"127.0.0.1:{port}", "-l", f"127.0.0.1:{other}"]
    for name in variables:
        if name.startswith("POSEIDON_") or name == "PATH":
            command += ["-E", f"{name}={variables[name]}"]
    command += [sys.executable, "-m", "poseidon", "serve", "--stop-runners"]
    process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, cwd=tmp_path, text=True)
    daemon = Daemon(tmp_path, port=port, process=process)
    try:
        await daemon.until_health(204)
        async with open_client(daemon) as client, httpx.AsyncClient(trust_env=False) as http:
            assert (await http.get(f"http://127.0.0.1:{other}/api/v1/health")).status_code == 204
            await client.put()
            runner = await client.claim()
            outcome = await client.run(runner, "ls -l /proc/self/fd; env", tty=False)
            assert "socket" not in outcome.stdout
            assert "LISTEN" not in outcome.stdout
    finally:
        with trio.move_on_after(60, shield=True):
            assert await daemon.end() == 0, daemon.log
        log.close()
