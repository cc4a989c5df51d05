"""/runners/{id}/files"""

from quart import Blueprint, Response

from poseidon.api.answers import empty
from poseidon.api.bodies import decode, raw_body, validated
from poseidon.api.parts import Claims, Files
from poseidon.api.schemas import FilesBody
from poseidon.core.model import RunnerId


def files_routes(claims: Claims, files: Files) -> Blueprint:
    """What lies in a runner's workspace."""
    routes = Blueprint("files", __name__, url_prefix="/api/v1/runners/<runner>/files")

    @routes.patch("")
    async def update(runner: str) -> Response:
        identity, wanted = RunnerId(runner), await _wanted(claims, runner)
        await files.update(identity, delete=wanted.delete, copy=wanted.files())
        return empty()

    return routes


async def _wanted(claims: Claims, runner: str) -> FilesBody:
    """The body, unless the runner is gone. It may be large: each form of it is dropped when the next is made."""
    return validated(await _decoded(claims, runner), FilesBody)


async def _decoded(claims: Claims, runner: str) -> object:
    raw = await raw_body()
    claims.used(RunnerId(runner))
    return decode(raw)
