"""Runs the migrations on the connection that `poseidon.store.upgrade` hands in, inside its transaction."""

from alembic import context

from poseidon.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
