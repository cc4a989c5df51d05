"""The OpenAPI document, made of the very types that read requests and shape answers; and the WebSocket's messages as
JSON Schema. Made once, when first asked for.
"""

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from poseidon.api import frames, shapes
from poseidon.api.bodies import Body
from poseidon.api.operations import HEADERS, JSON, OPERATIONS, Answer, Operation
from poseidon.api.queries import Query

PREFIX = "/api/v1"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
COMPONENTS = "#/components/schemas/"
MESSAGES = "WebSocket"
"""Before the names of the WebSocket's messages among the components."""

ABOUT = """\
Hands out isolated runners, started in advance, with live input and output over a WebSocket.

Bodies are read tolerantly: names of fields match in any case, unknown ones are ignored, `null` and a missing field are
the same. Values are never converted. Errors of the client have a `message`, those of the service an `errorCode` too.
"""
TAGS = {
    "environments": "What to run in.",
    "runners": "Who has which sandbox.",
    "files": "What lies in a runner's workspace.",
    "executions": "Commands in runners.",
    "runs": "All of these at once.",
    "service": "How the service is, and what it can do.",
}
PATH_PARAMETERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "identity": ("An environment's id.", {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}),
    "asset": ("A file's name.", {"type": "string", "pattern": "^[^/]+$"}),
    "runner": ("A runner's id.", {"type": "string", "minLength": 1, "pattern": "^[^/]+$"}),
}
SCHEME, BASIC = "token", "basic"

MALFORMED = Answer("The request is malformed, or a value is wrong; the message names it.", shapes.Problem)
NO_TOKEN = Answer("The token is missing or wrong.")
FORBIDDEN = Answer("The token's role doesn't allow it, or a page of another site asks for it.", shapes.Problem)
MISDIRECTED = Answer("There is no token, and the name that we are called by isn't known to be ours.", shapes.Problem)
CHALLENGED = Answer("The token is missing or wrong.", headers=("WWW-Authenticate",))
SLOW = Answer("The body took too long.", shapes.Problem)
LARGE = Answer("The body is larger than the service allows.", shapes.Problem)
LONG = Answer("The head of the request is larger than the service allows.", shapes.Problem)
FAULT = Answer("The service or its executor failed.", shapes.Fault)


def document(version: str, operations: Iterable[Operation] = OPERATIONS) -> dict[str, Any]:
    """The whole document."""
    operations = tuple(operations)
    schemas = _Schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = paths.setdefault(operation.path, {})
        path[operation.method.lower()] = _operation(operation, schemas)
    to_client, from_client, messages = frames.schemas(f"{COMPONENTS}{MESSAGES}{{name}}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "Poseidon", "version": version, "description": ABOUT},
        "servers": [{"url": PREFIX}],
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "security": [{SCHEME: []}],
        "paths": paths,
        "components": {
            "schemas": {
                **schemas.components,
                **{f"{MESSAGES}{name}": schema for name, schema in messages.items()},
                f"{MESSAGES}ToClient": to_client,
                f"{MESSAGES}FromClient": from_client,
            },
            "securitySchemes": {
                SCHEME: {
                    "type": "apiKey",
                    "in": "header",
                    "name": "Poseidon-Token",
                    "description": "Needed if the service has tokens.",
                },
                BASIC: {
                    "type": "http",
                    "scheme": "basic",
                    "description": "For browsers, only on the pages that describe the API: any name, and the token.",
                },
            },
        },
    }


def websocket_schema() -> dict[str, Any]:
    """The WebSocket's messages alone: `#/$defs/ToClient` and `#/$defs/FromClient` are what either side may say."""
    to_client, from_client, messages = frames.schemas("#/$defs/{name}")
    return {
        "$schema": DIALECT,
        "title": "What is said on the WebSocket of an execution",
        "description": "Text frames from the service are `ToClient` messages. Frames to the service are stdin; only "
        f"with the subprotocol `{frames.TERMINAL}` text frames to it are `FromClient` messages.",
        "$defs": {**messages, "ToClient": to_client, "FromClient": from_client},
    }


class _Generator(GenerateJsonSchema):
    """Without titles: names say the same."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


class _Schemas:
    """The schemas of all bodies, by their types."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        requests = {operation.body for operation in operations if operation.body is not None}
        answers = [answer.shape for each in operations for answer in _answers(each).values() if answer.shape]
        self._inputs: list[Any] = sorted(requests, key=lambda body: body.__name__)
        self._outputs: list[Any] = []
        for shape in answers:
            if shape not in self._outputs:
                self._outputs.append(shape)
        adapters = [
            *((number, "validation", TypeAdapter(shape)) for number, shape in enumerate(self._inputs)),
            *((number, "serialization", TypeAdapter(shape)) for number, shape in enumerate(self._outputs)),
        ]
        self._found, rest = TypeAdapter.json_schemas(
            adapters,  # type: ignore[arg-type]  # modes are literals
            ref_template=f"{COMPONENTS}{{model}}",
            schema_generator=_Generator,
        )
        self.components: dict[str, Any] = rest.get("$defs", {})

    def of_body(self, body: type[Body]) -> JsonSchemaValue:
        return self._found[self._inputs.index(body), "validation"]

    def of_answer(self, shape: Any) -> JsonSchemaValue:
        return self._found[self._outputs.index(shape), "serialization"]


def _operation(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": _identity(operation),
        "tags": [operation.tag],
        "summary": operation.title,
        "responses": {
            str(status): _response(status, answer, schemas) for status, answer in sorted(_answers(operation).items())
        },
    }
    if operation.text:
        described["description"] = operation.text
    if operation.is_open:
        described["security"] = []
    if operation.is_browsable:
        described["security"] = [{SCHEME: []}, {BASIC: []}]
    if parameters := [*_path_parameters(operation.path), *_query_parameters(operation.query)]:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas.of_body(operation.body)}}}
    return {**described, **operation.more}


def _identity(operation: Operation) -> str:
    words = operation.path.replace("{", "").replace("}", "").replace("-", "/").replace(".", "/").strip("/").split("/")
    return operation.method.lower() + "".join(word.capitalize() for word in words)


def _answers(operation: Operation) -> dict[int, Answer]:
    """All, with those that any request may get."""
    common = {400: MALFORMED, 431: LONG, 500: FAULT}
    if not operation.is_open:
        common |= {401: CHALLENGED if operation.is_browsable else NO_TOKEN, 403: FORBIDDEN, 421: MISDIRECTED}
    if operation.body is not None:
        common |= {408: SLOW, 413: LARGE}
    return {**common, **operation.answers}


def _response(status: int, answer: Answer, schemas: _Schemas) -> dict[str, Any]:
    described: dict[str, Any] = {"description": answer.text or HTTPStatus(status).phrase}
    if answer.shape is not None:
        described["content"] = {answer.media: {"schema": schemas.of_answer(answer.shape)}}
    elif answer.more:
        described["content"] = dict(answer.more)
    if answer.headers:
        described["headers"] = {
            name: {"description": HEADERS[name][0], "schema": dict(HEADERS[name][1])} for name in answer.headers
        }
    return described


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "description": text, "schema": dict(schema)}
        for name, (text, schema) in PATH_PARAMETERS.items()
        if f"{{{name}}}" in path
    ]


def _query_parameters(model: type[Query] | None) -> list[dict[str, Any]]:
    """Those of *model*, none of which is nested."""
    if model is None:
        return []
    described = model.model_json_schema(schema_generator=_Generator)
    needed = described.get("required", ())
    return [
        {
            "name": name,
            "in": "query",
            "required": name in needed,
            "description": schema.pop("description"),
            "schema": schema,
        }
        for name, schema in described["properties"].items()
    ]
