"""The HTTP application: routes, errors and the access log put together. It knows the daemon by `Parts` only."""

import structlog
import trio
from quart import Response, g, has_websocket_context, request, websocket
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound, RequestEntityTooLarge
from werkzeug.routing import BaseConverter

from poseidon.api.answers import empty, json, problem
from poseidon.api.auth import BROWSABLE, CHALLENGE, require_token
from poseidon.api.description import description_routes
from poseidon.api.environments import environments_routes
from poseidon.api.executions import executions_routes
from poseidon.api.files import files_routes
from poseidon.api.pace import limit_pace, tell_refusals
from poseidon.api.parts import ApiSettings, Claims, Parts
from poseidon.api.runners import runners_routes
from poseidon.api.runs import runs_routes
from poseidon.api.schemas import runner_answer
from poseidon.api.shapes import Gone
from poseidon.api.status import status_routes
from poseidon.api.surroundings import guard
from poseidon.core.model import RunnerId
from poseidon.errors import ExecutorError, Overloaded, PoseidonError, RunnerGone, StoreError, Unauthorized
from poseidon.runners.facts import RunnerFacts
from poseidon.runners.runs import Runs

log = structlog.get_logger(__name__)

SERVER_ERROR = 500
BODY_LIMIT = "server.max_body_mb"


def create_app(parts: Parts, settings: ApiSettings) -> QuartTrio:
    """The application for `poseidon.api.server.serve`."""
    app = QuartTrio(__name__, static_folder=None)
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    app.url_map.merge_slashes = False
    app.url_map.converters["digits"] = _Digits
    _log_requests(app)
    guard(app, settings.surroundings, settings.keyring)
    require_token(app, settings.keyring)
    limit_pace(app, settings.pace, settings.surroundings)
    tell_refusals(app, settings.surroundings)
    _answer_errors(app, parts.claims)
    app.register_blueprint(status_routes(parts.environments, parts.overview, settings.version))
    app.register_blueprint(description_routes(settings.version))
    app.register_blueprint(environments_routes(parts.environments, settings.executor, settings.fill_wait))
    app.register_blueprint(runners_routes(parts.claims))
    app.register_blueprint(files_routes(parts.claims, parts.files))
    app.register_blueprint(executions_routes(parts.claims, parts.executions, settings.surroundings))
    app.register_blueprint(runs_routes(parts.environments, Runs(parts.claims, parts.files, parts.executions)))
    return app


class _Digits(BaseConverter):
    """Digits of ASCII; how large a number they may make is for the handler to say."""

    regex = "[0-9]+"


def _answer_errors(app: QuartTrio, claims: Claims) -> None:
    @app.errorhandler(PoseidonError)
    async def refused(error: PoseidonError) -> Response:
        headers = {"Retry-After": str(error.retry_after)} if isinstance(error, Overloaded) else None
        code = error.code if error.status >= SERVER_ERROR else None
        if isinstance(error, ExecutorError | StoreError):
            log.warning("request failed", error=error.message, error_code=code)
        return problem(error.status, error.message, code, headers)

    @app.errorhandler(RunnerGone)
    async def gone(error: RunnerGone) -> Response:
        return json(await _explained(error, claims), error.status)

    @app.errorhandler(Unauthorized)
    async def unauthorized(_: Unauthorized) -> Response:
        answer = empty(Unauthorized.status)
        if not has_websocket_context() and request.endpoint in BROWSABLE:
            answer.headers["WWW-Authenticate"] = CHALLENGE
        return answer

    @app.errorhandler(HTTPException)
    async def http_error(error: HTTPException) -> Response:
        status = error.code or SERVER_ERROR
        if isinstance(error, NotFound):
            return problem(status, "there is no such path")
        headers = {"Allow": ", ".join(sorted(error.valid_methods or ()))} if isinstance(error, MethodNotAllowed) else {}
        if status >= SERVER_ERROR:
            return problem(status, "internal error", "UNKNOWN")
        if isinstance(error, RequestEntityTooLarge):
            limit = app.config["MAX_CONTENT_LENGTH"]
            return problem(status, f"the body is larger than {limit} bytes, see {BODY_LIMIT}")
        return problem(status, str(error.description), headers=headers)


async def _explained(error: RunnerGone, claims: Claims) -> Gone:
    """The message, with the reason also of a runner that only the store remembers, and what is known of the runner."""
    message = error.message
    facts = await _known(claims)
    if facts is None:
        return {"message": message}
    if facts.reason is not None and not message.endswith(")"):
        message = f"{message} ({facts.reason})"
    return {"message": message, "runner": runner_answer(facts)}


async def _known(claims: Claims) -> RunnerFacts | None:
    """What is known of the runner that was asked for."""
    arguments = (websocket.view_args if has_websocket_context() else request.view_args) or {}
    if "runner" not in arguments:
        return None
    try:
        return await claims.tell(RunnerId(arguments["runner"]))
    except StoreError:
        return None


def _log_requests(app: QuartTrio) -> None:
    @app.before_request
    async def begin() -> None:
        g.began = trio.current_time()

    @app.after_request
    async def end(response: Response) -> Response:
        log.debug(
            "request answered",
            code=response.status_code,
            method=request.method,
            path=request.path,
            duration=round(trio.current_time() - g.began, 4),
            user_agent=request.headers.get("User-Agent", ""),
            caller=g.get("caller", ""),
        )
        return response
