"""/runners/{id}/files"""

from quart import Blueprint, Response

from poseidon.api.answers import empty
from poseidon.api.bodies import parse, raw_body
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
    """The body, unless the runner is gone. The raw bytes are free again when this returns: they may be many."""
    raw = await raw_body()
    claims.used(RunnerId(runner))
    return parse(raw, FilesBody)
