"""/execution-environments"""

from quart import Blueprint, Response, request

from poseidon.api.answers import empty, json
from poseidon.api.auth import demand_admin
from poseidon.api.bodies import parse, raw_body
from poseidon.api.parts import Environments
from poseidon.api.schemas import EnvironmentBody, environment_answer
from poseidon.core.model import EnvironmentId
from poseidon.errors import BadRequest

LARGEST = 2**63 - 1
TRUE = frozenset({"1", "t", "T", "true", "TRUE", "True"})
FALSE = frozenset({"", "0", "f", "F", "false", "FALSE", "False"})


def environments_routes(environments: Environments, executor: str) -> Blueprint:
    """What clients put, and what became of it. *executor* runs what is put."""
    routes = Blueprint("environments", __name__, url_prefix="/api/v1/execution-environments")

    async def fetch_if_asked() -> None:
        if _boolean("fetch"):
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
        body = parse(await raw_body(), EnvironmentBody)
        created = await environments.put(body.environment(_number(identity), executor))
        return empty(201 if created else 204)

    @routes.delete("/<digits:identity>")
    async def remove(identity: str) -> Response:
        await environments.remove(_number(identity))
        return empty()

    return routes


def _number(digits: str) -> EnvironmentId:
    number = int(digits[:30])
    if number > LARGEST:
        raise BadRequest(f"the id of an environment can't exceed {LARGEST}")
    return EnvironmentId(number)


def _boolean(parameter: str) -> bool:
    given = request.args.get(parameter, "")
    if given not in TRUE | FALSE:
        raise BadRequest(f"{given!r} is no boolean")
    return given in TRUE
