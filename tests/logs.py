"""A fixture for tests that set up logging; import it where they are."""

import logging
from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    """Logging belongs to the whole process: put back what was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []  # or setting up would close pytest's own
    yield
    logging.captureWarnings(False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("httpx", "httpcore", "hypercorn", "websockets", "quart", "alembic"):
        logging.getLogger(name).setLevel(logging.NOTSET)
