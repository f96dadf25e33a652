"""Upgrades every store that was written before revisions existed to the same tables.

Such stores differ by the version that wrote them, so this revision inspects the existing tables. Later revisions start
from a known state. The tables below are a frozen copy: they do not follow changes of `tables.py`.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, MetaData, String, Table, Text

revision = "0001"
down_revision = None

FORMER_INDEXES = ("rollouts_by_run", "rollouts_by_task")

metadata = MetaData()

meta = Table("meta", metadata, Column("key", String(64), primary_key=True), Column("value", Text, nullable=False))

runs = Table(
    "runs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("config", Text, nullable=False),
    Column("status", String(32), nullable=False),
    Column("unseen", Integer, nullable=False, default=0),  # LM calls that the recorder missed
    Column("unrecorded_reason", Text),  # if not null, the number of missed calls is unknown
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float),
)

# Columns ending in _json hold JSON as text: the same on both databases, not converted by a driver.
rollouts = Table(
    "rollouts",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("run_id", String(64), nullable=False),
    Column("task_id", Text, nullable=False),
    Column("task_type", Text, nullable=False),
    Column("group_id", Text, nullable=False),
    Column("sample", Integer, nullable=False),
    Column("program", Text, nullable=False),
    Column("program_version", String(64), nullable=False),
    Column("parameters_json", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("adapters_json", Text, nullable=False),
    Column("seed", BigInteger),
    Column("split", String(32), nullable=False),
    Column("phase", String(32), nullable=False),
    Column("source", String(32), nullable=False),
    Column("status", String(32), nullable=False),
    Column("inputs_json", Text, nullable=False),
    Column("expected_json", Text, nullable=False, server_default="{}"),
    Column("metadata_json", Text, nullable=False, server_default="{}"),
    Column("prediction_json", Text),
    Column("error", Text),
    Column("failure", String(16)),
    Column("rubric", Text, nullable=False),
    Column("score", Float),
    Column("coverage", Float),
    Column("verdicts_json", Text, nullable=False),
    Column("early_tools_json", Text, nullable=False, server_default="[]"),
    Column("human_rating", Float),
    Column("tenant", Text),
    Column("data_subject", Text),
    Column("consent", String(64)),
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float),
    # The first two are covering indexes for counts: scores of a run, rows that an export leaves out. The others serve
    # one order or one key.
    Index("rollouts_of_run", "run_id", "split", "score"),
    Index("rollouts_by_state", "split", "status", "source", "tenant", "consent", "human_rating"),
    Index("rollouts_by_time", "started_at", "id"),
    Index("rollouts_by_subject", "data_subject"),
    Index("rollouts_by_group", "task_id", "group_id", "id"),  # exports read in this order
)

transitions = Table(
    "transitions",
    metadata,
    Column("rollout_id", String(32), primary_key=True),
    Column("t", Integer, primary_key=True, autoincrement=False),
    Column("model", Text, nullable=False),
    Column("weights", String(64), nullable=False),
    Column("adapters_json", Text, nullable=False),
    Column("request_json", Text, nullable=False),
    Column("response_json", Text),
    Column("output", Text, nullable=False),
    Column("error", Text),
    Column("failure", String(16)),
    Column("tools_json", Text, nullable=False),
    Column("constrained", Boolean, nullable=False),
    Column("cached", Boolean, nullable=False),
    Column("prompt_tokens", Integer),
    Column("completion_tokens", Integer),
    Column("thinking_tokens", Integer),
    Column("shown_tasks_json", Text, nullable=False, server_default="[]"),
    Column("token_ids_json", Text),
    Column("logprobs_json", Text),
    Column("latency_ms", Float, nullable=False),
    Column("cost_usd", Float),
    Column("started_at", Float, nullable=False),
    Column("step_rewards_json", Text, nullable=False),
    Column("return_", Float),
    # all that counting calls, tokens and dollars needs: a row itself is kilobytes of text
    Index("transitions_usage", "rollout_id", "cached", "prompt_tokens", "completion_tokens", "cost_usd"),
)
_failed = transitions.c.error.is_not(None)
Index("rollouts_by_prefix", rollouts.c.id, postgresql_ops={"id": "varchar_pattern_ops"}).ddl_if(dialect="postgresql")
Index("transitions_failed", transitions.c.rollout_id, sqlite_where=_failed, postgresql_where=_failed)

# What people said of outputs, by the question they were asked.
labels = Table(
    "labels",
    metadata,
    Column("question", String(64), primary_key=True),  # a hash of the question and its scale
    Column("item_id", String(64), primary_key=True),
    Column("rater", String(200), primary_key=True),
    Column("label", Text, nullable=False),
    Column("rationale", Text, nullable=False),
    Column("shown_json", Text, nullable=False),
    Column("rollout_id", String(32), nullable=False),
    Column("created_at", Float, nullable=False),
    Index("labels_by_rollout", "rollout_id"),
    Index("labels_by_rater", "rater"),
)

# Data subjects whose rollouts were deleted, as hashes: what comes of them later is never exported.
forgotten = Table(
    "forgotten", metadata, Column("person", String(16), primary_key=True), Column("at", Float, nullable=False)
)

# Where each artifact and export lies that was made from people's data, and whose: as hashes of their names.
made_from = Table(
    "made_from",
    metadata,
    Column("artifact", String(1000), primary_key=True),
    Column("people_json", Text, nullable=False),
    Column("created_at", Float, nullable=False),
)

# Splits of tasks as jobs determined them; a file may name them, so the salt alone does not tell.
known_tasks = Table(
    "known_tasks",
    metadata,
    Column("task", String(16), primary_key=True),  # the first hex digits of its content hash
    Column(
        "text", String(64), nullable=False
    ),  # hash of its inputs' text, "" where an artifact only told the content hash
    Column("split", String(8), nullable=False),
    Column("tenant", Text),
    Column("consent", String(64)),
    Column("subject", String(16)),  # hash of the data subject's name
)

# Which jobs have opened test tasks, and how often.
test_openings = Table(
    "test_openings",
    metadata,
    Column("job", String(64), primary_key=True),
    Column("data", Text, nullable=False),
    Column("tasks", String(16), nullable=False),  # hash of the tasks' content hashes
    Column("n", Integer, nullable=False),
    Column("members_json", Text),  # the first hex digits of each content hash; null in rows of older stores
    Column("times", Integer, nullable=False),  # more than 1 where it was resumed while it reported
    Column("at", Float, nullable=False),
)


def upgrade() -> None:
    connection = op.get_bind()
    metadata.create_all(connection)
    inspector = sa.inspect(connection)
    for table in metadata.sorted_tables:
        _complete(table, {column["name"]: column["type"] for column in inspector.get_columns(table.name)})
    if inspector.has_table("compiled_judges"):  # until schema 3 what is `made_from` since
        op.execute("INSERT INTO made_from SELECT artifact, raters_json, created_at FROM compiled_judges")
        op.drop_table("compiled_judges")
    for name in FORMER_INDEXES:
        op.execute(f"DROP INDEX IF EXISTS {name}")
    for table in metadata.sorted_tables:
        for index in table.indexes:
            if index.name != "rollouts_by_prefix" or connection.dialect.name == "postgresql":
                index.create(connection, checkfirst=True)
    op.execute(sa.delete(meta).where(meta.c.key.in_(("layout", "schema"))))
    # Versions of assay without revisions know up to 5, and refuse a store with more.
    op.execute(sa.insert(meta).values(key="schema", value="6"))


def _complete(table: Table, known: dict[str, sa.types.TypeEngine[object]]) -> None:
    """Adds columns that are missing. Widens those that were narrower at first, where the database enforces that."""
    enforced = op.get_bind().dialect.name == "postgresql"
    for column in table.columns:
        if column.name not in known:
            op.add_column(
                table.name, Column(column.name, column.type, nullable=column.nullable, server_default=_default(column))
            )
        elif enforced and _is_narrower(known[column.name], column.type):
            op.alter_column(table.name, column.name, type_=column.type)


def _default(column: Column[object]) -> str | None:
    return None if column.server_default is None else str(column.server_default.arg)  # type: ignore[attr-defined]


def _is_narrower(existing: sa.types.TypeEngine[object], required: sa.types.TypeEngine[object]) -> bool:
    if isinstance(existing, String) and isinstance(required, String):
        return existing.length is not None and (required.length is None or existing.length < required.length)
    return isinstance(required, BigInteger) and not isinstance(existing, BigInteger)
