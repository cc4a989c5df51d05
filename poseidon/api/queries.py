"""Reads query parameters. The first of several with the same name counts, unknown ones don't, empty is not given."""

from typing import Annotated, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel
from quart import request

from poseidon.api.bodies import explain
from poseidon.errors import BadRequest

TRUE = frozenset({"1", "t", "T", "true", "TRUE", "True"})
FALSE = frozenset({"0", "f", "F", "false", "FALSE", "False"})


def _flag(given: object) -> object:
    if given in TRUE | FALSE:
        return given in TRUE
    raise ValueError("true or false is expected")


Flag = Annotated[bool, BeforeValidator(_flag)]


class Query(BaseModel):
    """A request's parameters. Its fields' aliases are the names on the wire."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel)


Q = TypeVar("Q", bound=Query)


def query(model: type[Q]) -> Q:
    """The request's parameters. Raises BadRequest."""
    try:
        return model.model_validate(_given(request.query_string))
    except ValidationError as error:
        raise BadRequest(explain(error)) from None


def _given(raw: bytes) -> dict[str, str]:
    """Bytes that aren't UTF-8 become surrogates, as Python's own names of files have them."""
    try:
        pairs = parse_qsl(raw.decode("utf-8", "surrogateescape"), errors="surrogateescape")
    except ValueError as error:
        raise BadRequest(f"the parameters can't be read: {error}") from None
    return dict(reversed(pairs))
