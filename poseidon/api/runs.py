"""/runs: one command on a runner of its own."""

from functools import partial

from quart import Blueprint, Response

from poseidon.api.answers import json
from poseidon.api.bodies import decode, large_body, validated
from poseidon.api.files import copied
from poseidon.api.long_strings import taken_out, whole
from poseidon.api.parts import Environments
from poseidon.api.schemas import RunBody, report_answer
from poseidon.core.model import EnvironmentId
from poseidon.errors import BadRequest
from poseidon.runners.runs import Runs


def runs_routes(environments: Environments, runs: Runs) -> Blueprint:
    """For clients that want neither a session nor a WebSocket."""
    routes = Blueprint("runs", __name__, url_prefix="/api/v1/runs")

    @routes.post("")
    async def run() -> Response:
        rest, taken = taken_out(await large_body())
        wanted = validated(decode(rest), RunBody, taken)
        environment = environments.get(EnvironmentId(wanted.execution_environment_id))
        if wanted.network_access and not environment.network_access:
            raise BadRequest("networkAccess: this execution environment has none")
        order = wanted.order(await copied(wanted.files, taken, "files"), partial(whole, found=taken))
        return json(report_answer(await runs.run(order)))

    return routes
