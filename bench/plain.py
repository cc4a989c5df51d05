"""What Poseidon's HTTP server is measured beside: plain Hypercorn with the same application framework."""

import os

import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from hypercorn.typing import ASGIFramework
from quart import Response
from quart_trio import QuartTrio


def application() -> ASGIFramework:
    """Two routes that do nothing."""
    app = QuartTrio(__name__, static_folder=None)

    @app.get("/api/v1/health")
    async def health() -> Response:
        return Response(b"", 204)

    @app.get("/api/v1/version")
    async def version() -> Response:
        return Response(b'"bare"', 200, content_type="application/json")

    return app


def main() -> None:
    """Serve until killed."""
    config = Config()
    config.bind = [f"127.0.0.1:{os.environ['POSEIDON_SERVER_PORT']}"]
    config.errorlog = None
    config.keep_alive_max_requests = 2**62
    trio.run(serve, application(), config)


if __name__ == "__main__":
    main()
