"""The tables, the same on SQLite and PostgreSQL. Does not read or write them."""

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, MetaData, String, Table, Text

__all__ = ["ADDED", "SCHEMA_VERSION", "forgotten", "labels", "made_from", "meta", "metadata", "rollouts", "runs", "transitions"]

SCHEMA_VERSION = 4
# Columns of `rollouts` that older schemas lack, with what their rows then hold.
ADDED = {"early_tools_json": "[]", "expected_json": "{}", "metadata_json": "{}"}

metadata = MetaData()

meta = Table("meta", metadata, Column("key", String(64), primary_key=True), Column("value", Text, nullable=False))

runs = Table(
    "runs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("config", Text, nullable=False),
    Column("status", String(32), nullable=False),
    Column("unseen", Integer, nullable=False, default=0),  # LM calls that went past the recorder
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float),
)

# Text columns ending in _json hold JSON: the same text on both databases, read without a driver's opinion.
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
    Column("expected_json", Text, nullable=False),
    Column("metadata_json", Text, nullable=False),
    Column("prediction_json", Text),
    Column("error", Text),
    Column("rubric", Text, nullable=False),
    Column("score", Float),
    Column("coverage", Float),
    Column("verdicts_json", Text, nullable=False),
    Column("early_tools_json", Text, nullable=False),
    Column("human_rating", Float),
    Column("tenant", Text),
    Column("data_subject", Text),
    Column("consent", String(64)),
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float),
    Index("rollouts_by_run", "run_id", "split"),
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
    Column("tools_json", Text, nullable=False),
    Column("constrained", Boolean, nullable=False),
    Column("cached", Boolean, nullable=False),
    Column("prompt_tokens", Integer),
    Column("completion_tokens", Integer),
    Column("token_ids_json", Text),
    Column("logprobs_json", Text),
    Column("latency_ms", Float, nullable=False),
    Column("cost_usd", Float),
    Column("started_at", Float, nullable=False),
    Column("step_rewards_json", Text, nullable=False),
    Column("return_", Float),
)

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
)

# Data subjects whose rollouts were deleted, as hashes: what comes of them later is never exported.
forgotten = Table("forgotten", metadata, Column("person", String(16), primary_key=True), Column("at", Float, nullable=False))

# Where each artifact and export lies that was made from people's data, and whose: as hashes of their names.
made_from = Table(
    "made_from",
    metadata,
    Column("artifact", String(1000), primary_key=True),
    Column("people_json", Text, nullable=False),
    Column("created_at", Float, nullable=False),
)
