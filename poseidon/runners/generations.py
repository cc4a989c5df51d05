"""The generation of an environment: which of its idle runners are still good after a change."""

from dataclasses import replace

from sqlalchemy import Connection

from poseidon.core.model import Environment
from poseidon.store.queries import last_generation, save_environment


def save_next(connection: Connection, known: Environment | None, wanted: Environment, at: float) -> Environment:
    """Save *wanted* as what follows *known*, and return it with its generation."""
    if known is None:
        generation = last_generation(connection, wanted.id) + 1
        environment = replace(wanted, generation=generation, compatible_since=generation)
    else:
        environment = _next_generation(known, wanted)
    save_environment(connection, environment, at)
    return environment


def _next_generation(known: Environment, wanted: Environment) -> Environment:
    as_before = replace(wanted, generation=known.generation, compatible_since=known.compatible_since)
    if as_before == known:
        return replace(known, generation=known.generation + 1)
    if replace(as_before, pool_size=known.pool_size) == known:
        return as_before
    generation = known.generation + 1
    return replace(wanted, generation=generation, compatible_since=generation)
