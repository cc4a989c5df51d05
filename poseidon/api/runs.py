"""/runs: one command on a runner of its own."""

from quart import Blueprint, Response

from poseidon.api.answers import json
from poseidon.api.bodies import parse, raw_body
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
        wanted = parse(await raw_body(), RunBody)
        environment = environments.get(EnvironmentId(wanted.execution_environment_id))
        if wanted.network_access and not environment.network_access:
            raise BadRequest("networkAccess: this execution environment has none")
        return json(report_answer(await runs.run(wanted.order())))

    return routes
