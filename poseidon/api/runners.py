"""/runners"""

from quart import Blueprint, Response

from poseidon.api.answers import empty, json, problem
from poseidon.api.auth import demand_admin
from poseidon.api.bodies import parse, raw_body
from poseidon.api.parts import Claims
from poseidon.api.queries import query
from poseidon.api.schemas import AnyQuery, ClaimBody, claim_answer, detailed_answer, runner_answer
from poseidon.core.model import EnvironmentId, RunnerId


def runners_routes(claims: Claims) -> Blueprint:
    """Claim and release, and what is known of runners."""
    routes = Blueprint("runners", __name__, url_prefix="/api/v1/runners")

    @routes.post("")
    async def claim() -> Response:
        wanted = parse(await raw_body(), ClaimBody)
        environment = EnvironmentId(wanted.execution_environment_id)
        return json(claim_answer(await claims.claim(environment, timeout=wanted.inactivity_timeout)))

    @routes.get("")
    async def everything() -> Response:
        return json({"runners": [runner_answer(facts) for facts in claims.list()]})

    @routes.get("/<runner>")
    async def one(runner: str) -> Response:
        facts = await claims.tell(RunnerId(runner))
        if facts is None:
            return problem(404, "there never was a runner with this id")
        return json(detailed_answer(facts, await claims.executions_of(facts.id)))

    @routes.delete("/<runner>")
    async def release(runner: str) -> Response:
        await raw_body()
        if query(AnyQuery).any:
            demand_admin("any=true")
            await claims.stop(RunnerId(runner))
        else:
            await claims.release(RunnerId(runner))
        return empty()

    return routes
