"""/openapi.json, /websocket-schema.json and /docs: the API described, for programs and for people.

The page is Swagger UI from a package of its own; nothing is loaded from anywhere else. Browsers can't add the token's
header to what they load, so these routes, which show no data and change nothing, take it as HTTP Basic's password too
(see `auth.py`).
"""

from functools import cache
from importlib.metadata import distribution
from pathlib import Path

import trio
from quart import Blueprint, Response

from poseidon.api.answers import json, problem
from poseidon.api.openapi import document, websocket_schema

PACKAGE = "flask-openapi3-swagger"
FOLDER = "flask_openapi3_swagger/templates/swagger"
ASSETS = {
    "swagger-ui-bundle.js": ("js/swagger-ui-bundle.js", "text/javascript; charset=utf-8"),
    "swagger-ui.css": ("css/swagger-ui.css", "text/css; charset=utf-8"),
    "logo.svg": ("images/swagger.svg", "image/svg+xml"),
}
"""Name here → place in the package, type."""

PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Poseidon</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="docs/logo.svg">
<link rel="stylesheet" href="docs/swagger-ui.css">
<div id="page"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
"""
START = """\
SwaggerUIBundle({
  url: new URL("openapi.json", location.origin + location.pathname).href,  // a name and password in it would be refused
  dom_id: "#page",
  deepLinking: true,
  displayRequestDuration: true,
  presets: [SwaggerUIBundle.presets.apis],
  validatorUrl: null,
});
"""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
KEPT = {"Cache-Control": "private, max-age=3600"}


def description_routes(version: str) -> Blueprint:
    """The API's description, for everybody who may use it."""
    routes = Blueprint("description", __name__, url_prefix="/api/v1")
    described = cache(document)

    @routes.get("/openapi.json")
    async def openapi() -> Response:
        return json(described(version))

    @routes.get("/websocket-schema.json")
    async def messages() -> Response:
        return json(websocket_schema())

    @routes.get("/docs")
    async def page() -> Response:
        return Response(PAGE, headers=HEADERS, content_type="text/html; charset=utf-8")

    @routes.get("/docs/start.js")
    async def start() -> Response:
        return Response(START, headers=HEADERS, content_type="text/javascript; charset=utf-8")

    @routes.get("/docs/<asset>")
    async def one(asset: str) -> Response:
        if asset not in ASSETS:
            return problem(404, "there is no such path")
        place, kind = ASSETS[asset]
        content = await trio.Path(_folder() / place).read_bytes()
        return Response(content, headers=HEADERS | KEPT, content_type=kind)

    return routes


@cache
def _folder() -> Path:
    """Where the package's files are. It isn't imported: it would want to be a part of a Flask application."""
    return Path(str(distribution(PACKAGE).locate_file(FOLDER)))
