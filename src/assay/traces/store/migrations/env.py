"""Alembic runs this file for each upgrade, inside the transaction that `assay.traces.store.migration` opened."""

from alembic import context

from assay.traces.store.tables import metadata, revisions

# Not `alembic_version`: Optuna uses that table if its study is stored in the same database.
context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=revisions.name,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
