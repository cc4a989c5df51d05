"""Reads JSON bodies with the tolerance that clients are used to.

The first JSON value counts and what follows doesn't; names of fields match in any case; a missing field, null and
the zero value are the same; unknown fields are ignored. Values are never turned into another type.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import msgspec
import trio
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from quart import request
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout

from poseidon.errors import BadRequest


class Body(BaseModel):
    """A request's body. Its fields' aliases are the names on the wire."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", alias_generator=to_camel)

    @model_validator(mode="before")
    @classmethod
    def _tolerate(cls, value: object) -> object:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ValueError("an object is expected")
        names = {str(field.alias).lower(): str(field.alias) for field in cls.model_fields.values()}
        return {
            names[name.lower()]: given for name, given in value.items() if name.lower() in names and given is not None
        }

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """As above: null is the same as a missing field."""
        described = handler(schema)
        resolved = handler.resolve_ref_schema(described)
        fields = resolved["properties"]
        for name in set(fields).difference(resolved.get("required", ())):
            field = fields[name]
            around = {key: field.pop(key) for key in ("default", "description") if key in field}
            fields[name] = {"anyOf": [field, {"type": "null"}], **around}
        if "required" not in resolved:
            resolved["type"] = ["object", "null"]
        return described


B = TypeVar("B", bound=Body)


async def raw_body() -> bytes:
    """The whole body. Read before anything else is answered: some clients break on an answer that comes earlier."""
    return await request.get_data(cache=False, as_text=False, parse_form_data=False)


async def large_body() -> bytearray:
    """The same, in memory only once. Raises RequestEntityTooLarge, RequestTimeout."""
    body, most = bytearray(), request.max_content_length
    with trio.move_on_after(math.inf if request.body_timeout is None else request.body_timeout) as scope:
        async for piece in request.body:
            body += piece
            if most is not None and len(body) > most:
                raise RequestEntityTooLarge
    if scope.cancelled_caught:
        raise RequestTimeout
    return body


def parse(raw: bytes, model: type[B]) -> B:
    """*raw* as *model*. Raises BadRequest."""
    return validated(decode(raw), model)


def validated(value: object, model: type[B], context: object = None) -> B:
    """What `decode` gave as *model*, whose validators get *context*. Raises BadRequest."""
    try:
        return model.model_validate(value, context=context)
    except ValidationError as error:
        raise BadRequest(explain(error)) from None


def decode(raw: bytes | bytearray) -> object:
    """The first JSON value in *raw*."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return _decode_leniently(raw)
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def _decode_leniently(raw: bytes | bytearray) -> object:
    """For what follows the value, bytes that aren't UTF-8, and halves of characters: these become U+FFFD."""
    text = raw.decode("utf-8", "replace").lstrip(" \t\r\n")
    if not text:
        raise BadRequest("the body is empty, JSON is expected")
    try:
        value, _ = json.JSONDecoder(parse_constant=_refuse).raw_decode(text)
        return _whole(value)
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except ValueError as error:
        raise BadRequest(f"the body isn't JSON: {error}") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} isn't JSON")


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole(each) for each in value]
    if isinstance(value, dict):
        return {_whole(name): _whole(each) for name, each in value.items()}
    return value


def explain(error: ValidationError) -> str:
    """Where and what, but never the values: they may be long or secret."""
    lines = []
    for each in error.errors(include_url=False, include_context=False, include_input=False):
        place = ".".join(str(part) for part in each["loc"])
        message = each["msg"].removeprefix("Value error, ")
        lines.append(f"{place}: {message}" if place else message)
    return "; ".join(lines[:10])
