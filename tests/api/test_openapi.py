"""The API's description agrees with the API, and its page needs nothing but us."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from openapi_spec_validator import validate

from poseidon.api import frames
from poseidon.api.app import create_app
from poseidon.api.openapi import PREFIX, document, websocket_schema
from poseidon.api.parts import ApiSettings, Parts
from poseidon.runners.files import Files
from tests.api.service import VERSION, Service, open_service

BROWSED = ("/docs", "/docs/start.js", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/docs/logo.svg")
DESCRIPTIONS = ("/openapi.json", "/websocket-schema.json")


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with open_service(tmp_path, token="geheim:ß") as opened:
        yield opened


def routes_of(service: Service) -> set[tuple[str, str]]:
    parts = Parts(
        service.shell.environments,
        service.shell.claims,
        service.executions,
        Files(service.shell.claims),
        service.overview,
    )
    app = create_app(parts, ApiSettings())
    return {
        (method, re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule.removeprefix(PREFIX)))
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD"}
    }


async def test_every_route_is_described_and_nothing_else(service: Service) -> None:
    paths = document("1")["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert described == routes_of(service)


async def test_the_document_is_valid_openapi(service: Service) -> None:
    described = (await service.http.get("/openapi.json")).json()
    assert (described["openapi"], described["info"]["version"]) == ("3.1.0", VERSION)
    validate(described)
    names = [each["operationId"] for path in described["paths"].values() for each in path.values()]
    assert len(set(names)) == len(names)


def test_every_operation_names_the_answers_that_any_request_may_get() -> None:
    for path, methods in document("1")["paths"].items():
        for method, operation in methods.items():
            statuses = set(operation["responses"])
            assert {"400", "431", "500"} <= statuses, path
            assert (statuses & {"401", "403"} == {"401", "403"}) == (path not in {"/health", "/version"}), path
            assert ("413" in statuses) == ("requestBody" in operation) == (method in {"put", "post", "patch"}), path


def referred(value: Any) -> set[str]:
    """All references in a document."""
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(referred(each) for each in value.values()))
    return set().union(*(referred(each) for each in value)) if isinstance(value, list) else set()


def test_no_schema_is_missing_and_none_is_left_over() -> None:
    described = document("1")
    known = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    assert referred(described) == known


MESSAGES = [
    frames.Start(),
    frames.Stdout("ä\0"),
    frames.Stderr(""),
    frames.ExitCode(0),
    frames.ExitCode(255),
    frames.Timeout(),
    frames.Error("x"),
]
CONTROL = [frames.EndOfFile(), frames.ResizeTerminal(0, 65535), frames.SendSignal("INT")]


@pytest.mark.parametrize(("direction", "messages"), [("ToClient", MESSAGES), ("FromClient", CONTROL)])
async def test_the_messages_of_the_websocket_obey_the_published_schema(
    service: Service, direction: str, messages: list[msgspec.Struct]
) -> None:
    published = (await service.http.get("/websocket-schema.json")).json()
    Draft202012Validator.check_schema(published)
    schema = Draft202012Validator(published | {"$ref": f"#/$defs/{direction}"})
    for message in messages:
        schema.validate(json.loads(msgspec.json.encode(message)))


@pytest.mark.parametrize(
    ("direction", "message"),
    [
        ("ToClient", {"type": "timeout", "data": "x"}),
        ("ToClient", {"type": "exit"}),
        ("ToClient", {"type": "exit", "data": 256}),
        ("ToClient", {"type": "exit", "data": -1}),
        ("ToClient", {"type": "stdout", "data": "x", "more": 1}),
        ("ToClient", {"type": "eof"}),
        ("ToClient", {}),
        ("FromClient", {"type": "resize", "rows": 1}),
        ("FromClient", {"type": "resize", "rows": 1, "columns": 65536}),
        ("FromClient", {"type": "signal", "signal": "SEGV"}),
        ("FromClient", {"type": "stdin"}),
    ],
)
def test_the_published_schema_refuses_other_messages(direction: str, message: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Draft202012Validator(websocket_schema() | {"$ref": f"#/$defs/{direction}"}).validate(message)


async def test_a_browser_may_bring_the_token_as_a_password_but_only_where_nothing_is_done(service: Service) -> None:
    right, wrong = httpx.BasicAuth("anybody", "geheim:ß"), httpx.BasicAuth("geheim:ß", "wrong")
    async with httpx.AsyncClient(base_url=service.url, trust_env=False) as browser:
        for path in (*BROWSED, *DESCRIPTIONS):
            refused = await browser.get(path)
            assert refused.status_code == 401, path
            assert refused.headers["WWW-Authenticate"].startswith('Basic realm="'), path
            assert (await browser.get(path, auth=wrong)).status_code == 401, path
            assert (await browser.get(path, auth=right)).status_code == 200, path
        for path in ("/runners", "/status", "/execution-environments", "/runners/x/websocket"):
            refused = await browser.get(path, auth=right)
            assert (refused.status_code, "WWW-Authenticate" in refused.headers) == (401, False), path


async def test_the_page_loads_nothing_from_elsewhere_and_runs_no_script_but_ours(service: Service) -> None:
    for path in BROWSED:
        answer = await service.http.get(path)
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; ")
        assert "http" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    page = (await service.http.get("/docs")).text
    linked = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert {f"/{each}" for each in linked} == set(BROWSED) - {"/docs"}
    assert re.search(r"<script[^>]*>[^<]", page) is None


async def test_only_the_parts_of_the_page_are_served(service: Service) -> None:
    for path in ("/docs/", "/docs/x", "/docs/..%2Fplugins.py", "/docs/%2e%2e/openapi.json", "/docs/js/x"):
        assert (await service.http.get(path)).status_code == 404, path
