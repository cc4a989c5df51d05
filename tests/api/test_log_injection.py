"""Nothing that a client sends breaks a record of the log in two, colours a terminal, or turns a line round."""

import io
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
import trio
from websockets.exceptions import InvalidHandshake
from websockets.trio.client import connect

from poseidon.telemetry.logging import setup_logging
from tests.api.service import Service, open_service
from tests.logs import undone

__all__ = ["undone"]

NASTY = "a\r\nINJECTED\x1b[31m\x9b2J\u202e\u2028\u2066\x00\x7f\u200b"
ESCAPED = quote(NASTY, safe="")
FORGED = "x\n2026-11-30T12:00:00.000Z info    all is well"
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (debug|info|warning|error|critical) +\S"


async def pester(service: Service) -> None:
    """Put it wherever a client can put something."""
    http = service.http
    await service.put(1)
    runner = await service.claim()
    for nasty in (ESCAPED, quote(FORGED, safe="")):
        for path in (f"runners/{nasty}", f"runners/{nasty}/files?path={nasty}", nasty, f"runners?{nasty}={nasty}"):
            await http.get(f"/{path}")
        await http.get(f"/runners/{runner}/files?path={nasty}&recursive={nasty}")
        await http.get(f"/runners/{runner}/files/raw?path={nasty}")
        await http.put(f"/execution-environments/1{nasty}", json={})
        await http.get(f"/execution-environments?fetch={nasty}")
        await http.delete(f"/runners/{nasty}")
    bytes_of_terminals = b"a\x9b31m\xe2\x80\xae\xc2\x85z\ttab"
    for name in (b"User-Agent", b"Origin", b"Host", b"X-Forwarded-For", b"Forwarded", b"Poseidon-Token", b"Referer"):
        await http.get("/runners", headers={name: bytes_of_terminals})
    for text in (NASTY, FORGED):
        await http.put("/execution-environments/2", json={"image": text, "prewarmingPoolSize": 1})
        await http.post("/runners", content=text.encode())
        body = {"command": f"echo $'{text}'", "environment": {text: text, "A": text}}
        await http.post(f"/runners/{runner}/execute", json=body)
        files = {"copy": [{"path": text, "content": "!"}, {"path": text}], "delete": [text]}
        await http.patch(f"/runners/{runner}/files", json=files)
        await http.post("/runs", json={"executionEnvironmentId": 1, "command": text, "environment": {text: ""}})
        await service.run(runner, f"printf %s '{text.replace(chr(0), '')}' >&2; exit 3")
    url = f"{service.url.replace('http', 'ws')}/runners/{ESCAPED}/websocket?executionID={ESCAPED}"
    with pytest.raises(InvalidHandshake):
        async with connect(url, compression=None, proxy=None, user_agent_header="x"):
            pass
    await nonsense(service, b"GET /\x1b[31m\xe2\x80\xae HTTP/1.1\r\n\r\n")
    await nonsense(service, b"\x9bBREW \x00\r\n\r\n")
    await http.delete(f"/runners/{runner}")


async def nonsense(service: Service, data: bytes) -> None:
    stream = await trio.open_tcp_stream(service.http.base_url.host, int(service.http.base_url.port or 0))
    async with stream:
        await stream.send_all(data)
        with trio.fail_after(20):
            while await stream.receive_some():
                pass


def is_json(line: str) -> bool:
    record = json.loads(line)
    return isinstance(record, dict) and {"time", "level", "event"} <= set(record)


def is_for_eyes(line: str) -> bool:
    return bool(re.match(TIME, line)) or line.startswith("    | ")


@pytest.mark.parametrize(("form", "is_record"), [("json", is_json), ("console", is_for_eyes)])
async def test_whatever_clients_send_each_record_is_one_plain_line(
    tmp_path: Path, form: str, is_record: Callable[[str], bool]
) -> None:
    out = io.StringIO()
    setup_logging("debug", form, stream=out)  # type: ignore[arg-type]
    for name in ("httpx", "httpcore", "websockets", "websockets.client"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # of the test's own client
    async with open_service(tmp_path) as service:
        await pester(service)
    lines = out.getvalue().split("\n")
    assert lines.pop() == ""
    assert len(lines) > 40
    for line in lines:
        assert line.isprintable() and is_record(line), repr(line)
        assert "INJECTED" not in line.partition(" ")[0]
        assert "Traceback" not in line and '"level": "error"' not in line, line
    assert "INJECTED" in out.getvalue()
