"""Queries and answers of the routes that read files of a runner."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field

from poseidon.api import shapes
from poseidon.api.queries import Flag, Query
from poseidon.core.listing import HOME, Entry


def _home(given: object) -> object:
    return given or HOME


Privileged = Annotated[Flag, Field(description="As root of the runner.")]


class ListingQuery(Query):
    """GET /runners/{id}/files."""

    path: Annotated[str, BeforeValidator(_home), Field(description="Relative to the workspace, or absolute.")] = HOME
    recursive: Annotated[Flag, Field(description="With what is in folders; names then begin with the path.")] = True
    privileged_execution: Privileged = False


class RawQuery(Query):
    """GET /runners/{id}/files/raw."""

    path: Annotated[str, Field(description="Links are followed.")] = ""
    privileged_execution: Privileged = False


def listing_answer(entries: Sequence[Entry]) -> shapes.FileList:
    """What lies there."""
    return {"files": [_entry(each) for each in entries]}


def _entry(entry: Entry) -> shapes.FileEntry:
    answer: shapes.FileEntry = {
        "name": entry.name,
        "entryType": entry.kind,
        "size": entry.size,
        "modificationTime": entry.modified,
        "permissions": entry.permissions,
        "owner": entry.owner,
        "group": entry.group,
    }
    if entry.target:
        answer["linkTarget"] = entry.target
    return answer
