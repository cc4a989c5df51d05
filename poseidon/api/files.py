"""/runners/{id}/files"""

import re
from urllib.parse import quote

import trio
from quart import Blueprint, Response, request

from poseidon.api.answers import empty, json, until_answered
from poseidon.api.bodies import decode, raw_body, validated
from poseidon.api.parts import Claims, Files
from poseidon.api.queries import query
from poseidon.api.schemas import FilesBody
from poseidon.api.schemas_files import ListingQuery, RawQuery, listing_answer
from poseidon.core.model import RunnerId
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
        identity, wanted = RunnerId(runner), await _wanted(claims, runner)
        await files.update(identity, delete=wanted.delete, copy=wanted.files())
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


async def _wanted(claims: Claims, runner: str) -> FilesBody:
    """The body, unless the runner is gone. It may be large: each form of it is dropped when the next is made."""
    return validated(await _decoded(claims, runner), FilesBody)


async def _decoded(claims: Claims, runner: str) -> object:
    raw = await raw_body()
    claims.used(RunnerId(runner))
    return decode(raw)
