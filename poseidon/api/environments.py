"""/execution-environments"""

import trio
from quart import Blueprint, Response

from poseidon.api.answers import empty, json
from poseidon.api.auth import demand_admin
from poseidon.api.bodies import parse, raw_body
from poseidon.api.parts import Environments
from poseidon.api.queries import query
from poseidon.api.schemas import EnvironmentBody, FetchQuery, WaitQuery, environment_answer
from poseidon.core.model import EnvironmentId
from poseidon.errors import BadRequest, Overloaded

LARGEST = 2**63 - 1


def environments_routes(environments: Environments, executor: str, fill_wait: float) -> Blueprint:
    """What clients put, and what became of it. *executor* runs what is put; *fill_wait* in seconds."""
    routes = Blueprint("environments", __name__, url_prefix="/api/v1/execution-environments")

    async def fetch_if_asked() -> None:
        if query(FetchQuery).fetch:
            demand_admin("fetch")
            await environments.fetch()

    @routes.get("")
    async def everything() -> Response:
        await fetch_if_asked()
        pools = environments.statistics()
        return json(
            {"executionEnvironments": [environment_answer(each, pools[each.id]) for each in environments.list()]}
        )

    @routes.get("/<digits:identity>")
    async def one(identity: str) -> Response:
        await fetch_if_asked()
        environment = environments.get(_number(identity))
        return json(environment_answer(environment, environments.statistics()[environment.id]))

    @routes.put("/<digits:identity>")
    async def put(identity: str) -> Response:
        body, wanted = parse(await raw_body(), EnvironmentBody), query(WaitQuery)
        environment = body.environment(_number(identity), executor)
        created = await environments.put(environment)
        if wanted.wait:
            await _filled(environments, environment.id, fill_wait)
        return empty(201 if created else 204)

    @routes.delete("/<digits:identity>")
    async def remove(identity: str) -> Response:
        await environments.remove(_number(identity))
        return empty()

    return routes


def _number(digits: str) -> EnvironmentId:
    number = int(digits.lstrip("0")[:30] or "0")
    if number > LARGEST:
        raise BadRequest(f"the id of an environment can't exceed {LARGEST}")
    return EnvironmentId(number)


async def _filled(environments: Environments, identity: EnvironmentId, within: float) -> None:
    """Wait for the pool. Raises Overloaded if that takes too long."""
    with trio.move_on_after(within) as patience:
        await environments.filled(identity)
    if patience.cancelled_caught:
        pool = environments.statistics()[environments.get(identity).id]
        why = f": {pool.message}" if pool.message else ""
        raise Overloaded(f"the environment is kept, but its pool isn't filled yet{why}")
