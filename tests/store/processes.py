"""Scripts in processes of their own, which find the package wherever they run."""

import os
import sys
from pathlib import Path

import poseidon

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(poseidon.__file__).parents[1])}


def python(script: str, *arguments: object) -> list[str]:
    """The command for *script*."""
    return [sys.executable, "-c", script, *map(str, arguments)]
