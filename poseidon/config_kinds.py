"""Which settings a pydantic model has, of which kind each is, and what to say when one is wrong. Pure.

Kinds: text, numbers, true or false, choices, lists (tuples), tables with free keys (Mapping), tables (models).
"""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

KeyPath = tuple[str, ...]

HASHED = "sha256:"
"""What a secret begins with that is only the hash of one."""

_WORDS: Mapping[Any, str] = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


class Section(BaseModel):
    """A table of the file: unknown keys and values of another kind are errors."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


def leaves(model: type[BaseModel], *, before: KeyPath = ()) -> Iterator[tuple[KeyPath, FieldInfo]]:
    """Every setting of *model* with its path; a table whose keys are free has `N` in their place."""
    for name, info in model.model_fields.items():
        yield from _leaves_below((*before, name), info)


def _leaves_below(path: KeyPath, info: FieldInfo) -> Iterator[tuple[KeyPath, FieldInfo]]:
    inner = value_of_table(info)
    if table := as_model(info.annotation):
        yield from leaves(table, before=path)
    elif inner and as_model(inner.annotation):
        yield from _leaves_below((*path, "N"), inner)
    else:
        yield path, info


def as_model(annotation: object) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def item_of_list(info: FieldInfo) -> FieldInfo | None:
    return FieldInfo.from_annotation(get_args(info.annotation)[0]) if get_origin(info.annotation) is tuple else None


def value_of_table(info: FieldInfo) -> FieldInfo | None:
    origin = get_origin(info.annotation)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return FieldInfo.from_annotation(get_args(info.annotation)[1])
    return None


def is_table(info: FieldInfo) -> bool:
    return bool(as_model(info.annotation) or value_of_table(info))


def find(model: type[BaseModel], path: Sequence[str]) -> FieldInfo | None:
    """The setting at *path*, items of lists and tables included."""
    info: FieldInfo | None = FieldInfo.from_annotation(model)
    for key in path:
        if info is None:
            return None
        table = as_model(info.annotation)
        info = table.model_fields.get(key) if table else (value_of_table(info) or item_of_list(info))
    return info


def explain(model: type[BaseModel], path: list[str], detail: Any) -> str:
    if path[-1] == "[key]":
        return f"expected {_expected_key(find(model, path[:-2]))} as the table's name"
    info = find(model, path)
    match detail["type"]:
        case "extra_forbidden":
            return f"unknown setting{_suggest_key(model, path)}"
        case "missing" if info:
            return f"missing; expected {expected(info)}"
        case "value_error":
            return str(detail["ctx"]["error"])
    return f"expected {expected(info)}{_but_was(info, detail['input'])}" if info else str(detail["msg"])


def _but_was(info: FieldInfo, value: object) -> str:
    """What stood there instead; never for secrets, nor for anything that might hold one."""
    if not info.repr or is_table(info) or not isinstance(value, str | int | float):
        return ""
    shown = json.dumps(value)
    return f", not {shown}" if len(shown) <= 60 else ""


def _suggest_key(model: type[BaseModel], path: list[str]) -> str:
    above = find(model, path[:-1])
    table = as_model(above.annotation) if above else None
    near = difflib.get_close_matches(path[-1], table.model_fields if table else [], n=1)
    if near:
        return f"; did you mean {'.'.join([*path[:-1], near[0]])}?"
    elsewhere = [".".join(known) for known, _ in leaves(model) if known[-1] == path[-1]]
    return f"; did you mean {elsewhere[0]}?" if elsewhere else ""


def expected(info: FieldInfo) -> str:
    """The kind of value that a setting wants, in words."""
    if get_origin(info.annotation) is Literal:
        return "one of " + ", ".join(json.dumps(choice) for choice in get_args(info.annotation))
    if item := item_of_list(info):
        return f"a list, each item {expected(item)}"
    inner = value_of_table(info)
    if inner and not as_model(inner.annotation):
        return f"a table, each value {expected(inner)}"
    words = _WORDS.get(info.annotation, "a table") if info.annotation else "a value"
    return words + _bounds(info)


def _expected_key(table: FieldInfo | None) -> str:
    key = FieldInfo.from_annotation(get_args(table.annotation)[0]) if table else None
    return "letters, digits, - and _" if key and key.annotation is str else "a whole number, not below 0,"


def _bounds(info: FieldInfo) -> str:
    limits = {name: value for rule in info.metadata for name, value in _limits(rule)}
    if "ge" in limits and "le" in limits:
        return f" from {limits['ge']} to {limits['le']}"
    phrases = {
        "ge": " of at least {}",
        "gt": " above {}",
        "le": " of at most {}",
        "min_length": " of at least {} character",
    }
    return "".join(phrase.format(limits[name]) for name, phrase in phrases.items() if name in limits)


def _limits(rule: object) -> list[tuple[str, object]]:
    names = ("ge", "gt", "le", "min_length")
    return [(name, getattr(rule, name)) for name in names if getattr(rule, name, None) is not None]
