"""/runners/{id}/files"""

import re
from collections.abc import Mapping, Sequence
from urllib.parse import quote

import trio
from quart import Blueprint, Response, request

from poseidon.api.answers import empty, json, until_answered
from poseidon.api.bodies import decode, large_body, validated
from poseidon.api.long_strings import decoded, taken_out
from poseidon.api.parts import Claims, Files
from poseidon.api.queries import query
from poseidon.api.schemas import FileBody, FilesBody
from poseidon.api.schemas_files import ListingQuery, RawQuery, listing_answer
from poseidon.core.model import RunnerId
from poseidon.runners.files_archive import File
from poseidon.runners.files_download import Download

PLAIN = re.compile(r"[A-Za-z0-9 !#$&+.^_`{}|~()@,;=\[\]-]+")
"""Names that every client reads alike between quotes (RFC 6266, appendix D)."""


def files_routes(claims: Claims, files: Files) -> Blueprint:
    """What lies in a runner's workspace."""
    routes = Blueprint("files", __name__, url_prefix="/api/v1/runners/<runner>/files")

    @routes.get("")
    async def listing(runner: str) -> Response:
        wanted = query(ListingQuery)
        entries = await files.list(
            RunnerId(runner), wanted.path, recursive=wanted.recursive, privileged=wanted.privileged_execution
        )
        return await trio.to_thread.run_sync(lambda: json(listing_answer(entries)))

    @routes.get("/raw")
    async def raw(runner: str) -> Response:
        wanted = query(RawQuery)
        opened = files.read(RunnerId(runner), wanted.path, privileged=wanted.privileged_execution)
        return _attachment(await until_answered().enter_async_context(opened), wanted.path)

    @routes.patch("")
    async def update(runner: str) -> Response:
        delete, copy = await _wanted(claims, RunnerId(runner))
        await files.update(RunnerId(runner), delete=delete, copy=copy)
        return empty()

    return routes


def _attachment(download: Download, path: str) -> Response:
    """*download* as it is: nothing guesses what it may be, or changes it on the way."""
    headers = {
        "Content-Disposition": disposition(path.rstrip("/").rpartition("/")[2]),
        "Content-Length": str(download.size),
        "X-Content-Type-Options": "nosniff",
    }
    body = download if request.method == "GET" else Response.data_body_class(b"")
    return Response(body, 200, headers, content_type="application/octet-stream")


def disposition(name: str) -> str:
    """For a file of that name, whatever it contains (RFC 6266)."""
    if PLAIN.fullmatch(name):
        return f'attachment; filename="{name}"'
    replaced = "".join(each if PLAIN.fullmatch(each) else "_" for each in name)
    return f"attachment; filename=\"{replaced}\"; filename*=UTF-8''{quote(name, safe='', errors='replace')}"


async def _wanted(claims: Claims, runner: RunnerId) -> tuple[list[str], list[File]]:
    """What the body says, unless the runner is gone. It may be large: it holds up nobody, and is dropped at the end."""
    raw = await large_body()
    claims.used(runner)
    rest, taken = taken_out(raw)
    body = validated(decode(rest), FilesBody, taken)
    return body.delete, await copied(body.copy_, taken, "copy")


async def copied(entries: Sequence[FileBody], taken: Mapping[bytes, memoryview], name: str) -> list[File]:
    """The files of a body's field *name*; their contents may have been taken out of it. Raises BadRequest."""
    return [
        File(
            each.path,
            await decoded(taken[each.content], f"{name}.{number}.content") if each.content in taken else each.content,
        )
        for number, each in enumerate(entries)
    ]
