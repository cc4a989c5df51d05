"""/health, /version, /statistics and /status: how the service is."""

from quart import Blueprint, Response

from poseidon.api.answers import empty, json, problem
from poseidon.api.parts import Environments, Overview
from poseidon.api.schemas import statistics_answer, status_answer


def status_routes(environments: Environments, overview: Overview, version: str) -> Blueprint:
    """For load balancers, dashboards and operators."""
    routes = Blueprint("status", __name__, url_prefix="/api/v1")

    @routes.get("/health", endpoint="health")
    async def health() -> Response:
        ailment = overview.ailment()
        return empty() if ailment is None else problem(503, ailment.message, ailment.code)

    @routes.get("/version", endpoint="version")
    async def tell_version() -> Response:
        return json(version)

    @routes.get("/statistics/execution-environments")
    async def statistics() -> Response:
        return json(statistics_answer(environments.statistics()))

    @routes.get("/status")
    async def status() -> Response:
        return json(status_answer(version, overview, environments.list(), environments.statistics()))

    return routes
