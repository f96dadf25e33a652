"""The tables, the same on SQLite and PostgreSQL. Does not read or write them.

A store is refused if it was created from other definitions than these (`assay.traces.store.location.REVISION`).
"""

from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, LargeBinary, MetaData, String, Table, Text
from sqlalchemy.types import UserDefinedType

from assay.models import ledger

CONTENT = 1  # raise it if a column's content changes and its definition does not: older stores are then refused

metadata = MetaData()

# The ledgers of runs, on a server; those of a SQLite store are files next to it.
for table in ledger.tables.tables.values():
    table.to_metadata(metadata)

meta = Table("meta", metadata, Column("key", String(64), primary_key=True), Column("value", Text, nullable=False))

# One row: the revision of the tables. Not in the table `alembic_version`, which is that of an Optuna study.
revisions = Table("store_revision", metadata, Column("version_num", String(32), primary_key=True))

runs = Table(
    "runs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("config", Text, nullable=False),
    Column("status", String(32), nullable=False),
    Column("unseen", Integer, nullable=False, default=0),  # LM calls that the recorder missed
    Column("lost", Integer, nullable=False, default=0),  # LM calls of processes that were killed
    Column("unrecorded_reason", Text),  # if not null, the number of missed calls is unknown
    Column("failure", Text),  # why it failed or was stopped before its report
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("resumed_at", Float),  # the last time that a process continued it
)

# What any machine needs to continue or to report a job, by its run: the report, see `assay.jobs.ending`.
job_states = Table(
    "job_states",
    metadata,
    Column("job", String(64), primary_key=True),
    Column("state_json", Text, nullable=False),
)

# Tasks that ended the processes of a run, and those that run now, see `assay.evaluation.failures.Deaths`.
deaths = Table(
    "deaths",
    metadata,
    Column("run_id", String(64), primary_key=True),
    Column("tasks_json", Text, nullable=False),
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
    Column("answered_at", Float),  # when a gateway received the answer that is the prediction
    # Of production, see `assay.deployment`: null or empty elsewhere.
    Column("deployment", String(32)),
    Column("stage", Integer),
    Column("arm", String(16)),
    Column("propensity", Float),
    Column("unit", String(32)),
    Column("version", String(100)),
    # The first two are covering indexes for counts: scores of a run, rows that an export leaves out. The others serve
    # one order or one key.
    Index("rollouts_of_run", "run_id", "split", "score"),
    Index("rollouts_by_state", "split", "status", "source", "tenant", "consent", "human_rating"),
    Index("rollouts_by_time", "started_at", "id"),
    Index("rollouts_by_subject", "data_subject"),
    Index("rollouts_by_group", "task_id", "group_id", "id"),  # exports read in this order
    Index("rollouts_by_deployment", "deployment", "stage", "arm", "unit"),
)

transitions = Table(
    "transitions",
    metadata,
    Column("rollout_id", String(32), primary_key=True),
    Column("t", Integer, primary_key=True, autoincrement=False),
    Column("id", String(32)),  # of a call to which the store gives its turn; null: the recording process gave it
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
    Column("agent", String(64), nullable=False, server_default=""),
    # Covering index for counts of calls, tokens and dollars: reading the rows would read kilobytes of text for each.
    Index("transitions_usage", "rollout_id", "cached", "prompt_tokens", "completion_tokens", "cost_usd"),
)
_failed = transitions.c.error.is_not(None)
Index("rollouts_by_prefix", rollouts.c.id, postgresql_ops={"id": "varchar_pattern_ops"}).ddl_if(dialect="postgresql")
Index("transitions_failed", transitions.c.rollout_id, sqlite_where=_failed, postgresql_where=_failed)
_numbered = transitions.c.id.is_not(None)
Index(
    "transitions_by_id", transitions.c.rollout_id, transitions.c.id,
    unique=True, sqlite_where=_numbered, postgresql_where=_numbered,
)  # fmt: skip

# Conversations of the open rollouts of several gateways, by which each finds the rollouts of the others.
conversation_keys = Table(
    "conversation_keys",
    metadata,
    Column("key", String(32), primary_key=True),  # a hash, see `assay.traces.gateway.sharing`
    Column("rollout_id", String(32), primary_key=True),
    Index("conversation_keys_of_rollout", "rollout_id"),
)

# Labels by raters, by question.
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

# Hashes of data subjects whose rollouts were erased: rows of them that are written later are never exported.
forgotten = Table(
    "forgotten", metadata, Column("person", String(16), primary_key=True), Column("at", Float, nullable=False)
)

# Rollouts that were erased while they ran: a process may write more calls of them, which the next erasure removes.
erased_rollouts = Table(
    "erased_rollouts", metadata, Column("id", String(64), primary_key=True), Column("at", Float, nullable=False)
)

# Paths of artifacts and exports made from people's data, with the hashes of those people's names.
made_from = Table(
    "made_from",
    metadata,
    Column("artifact", String(1000), primary_key=True),
    Column("people_json", Text, nullable=False),
    Column("created_at", Float, nullable=False),
)

# Splits of tasks as jobs first determined them; they stay. A data file may name a split, so the salt alone does not
# determine it.
known_tasks = Table(
    "known_tasks",
    metadata,
    Column("task", String(16), primary_key=True),  # its key
    Column("split", String(8), nullable=False),
    Column("tenant", Text),
    Column("consent", String(64)),
    Column("subject", String(16)),  # hash of the data subject's name
)

# How often each job opened test tasks.
test_openings = Table(
    "test_openings",
    metadata,
    Column("job", String(64), primary_key=True),
    Column("data", Text, nullable=False),
    Column("tasks", String(16), nullable=False),  # hash of the tasks' keys
    Column("n", Integer, nullable=False),
    Column("members_json", Text, nullable=False),  # the tasks' keys
    Column("times", Integer, nullable=False),  # above 1 if the job was resumed during its report
    Column("at", Float, nullable=False),
)


class _TsVector(UserDefinedType[str]):
    """PostgreSQL's `tsvector`, without an import of its dialect."""

    cache_ok = True

    def get_col_spec(self, **options: Any) -> str:
        return "TSVECTOR"


# Files of `assay index`. A file that has changed gets a new row; the row is found once it is `ready`.
documents = Table(
    "documents",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("index_name", String(64), nullable=False),
    Column("root", Text, nullable=False),  # folder, absolute
    Column("path", Text, nullable=False),  # relative to `root`
    Column("size", BigInteger, nullable=False),
    Column("mtime_ns", BigInteger, nullable=False),
    Column("read_at", Float, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("form", String(64), nullable=False),  # how it was split into passages
    Column("ready", Boolean, nullable=False),
    Index("documents_by_path", "index_name", "root", "path"),
)

# SQLite has an index of `words` in the FTS5 table `passages_fts`, which the first index of a store creates.
passages = Table(
    "passages",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("document_id", Integer, nullable=False),
    Column("key", String(16), nullable=False),  # hash of the text
    Column("line", Integer, nullable=False),
    Column("text", Text, nullable=False),
    Column("words", Text().with_variant(_TsVector(), "postgresql")),  # the words that are searched
    Index("passages_of_document", "document_id"),
    Index("passages_by_words", "words", postgresql_using="gin").ddl_if(dialect="postgresql"),
)

passage_vectors = Table(
    "passage_vectors",
    metadata,
    Column("embedder", String(200), primary_key=True),
    Column("passage_id", Integer, primary_key=True, autoincrement=False),
    Column("vector", LargeBinary, nullable=False),  # 32-bit floats, little-endian, of length 1
    Index("vectors_by_passage", "passage_id"),
)

# What agents remember of persons. SQLite has the words in the FTS5 table `facts_fts`, which the first memory creates.
facts = Table(
    "facts",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("memory", String(64), nullable=False),
    Column("subject", String(200), nullable=False),
    Column("person", String(16), nullable=False),  # hash of the subject
    Column("text", Text, nullable=False),
    Column("about", String(64), nullable=False),
    Column("tenant", Text),
    Column("split", String(32), nullable=False),  # of the rollout that it comes from
    Column("rollout_id", String(32)),
    Column("t", Integer),
    Column("valid_from", Float, nullable=False),
    Column("valid_to", Float),
    Column("superseded_by", Integer),
    Column("words", Text().with_variant(_TsVector(), "postgresql")),  # null on SQLite
    Index("facts_of_person", "memory", "person", "about"),
    Index("facts_by_rollout", "rollout_id"),
    Index("facts_by_words", "words", postgresql_using="gin").ddl_if(dialect="postgresql"),
    sqlite_autoincrement=True,  # the number of an erased fact is not used again
)

# Versions of agents. Rows are never changed.
agent_versions = Table(
    "agent_versions",
    metadata,
    Column("agent", String(64), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),  # from 1
    Column("artifact", Text, nullable=False),  # absolute path
    Column("sha256", String(64), nullable=False),  # of the artifact's manifest, which has the hashes of its files
    Column("model", Text, nullable=False),
    Column("adapters_json", Text, nullable=False),
    Column("parent", Integer),
    Column("evidence_json", Text, nullable=False),
    Column("people_json", Text, nullable=False),  # hashes of the data subjects whose data it holds
    Column("tenant", Text),
    Column("registered_at", Float, nullable=False),
    Column("registered_by", String(200), nullable=False),
)

# Aliases such as `champion`. Rows are only added: the newest one of an agent and alias holds.
agent_aliases = Table(
    "agent_aliases",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("agent", String(64), nullable=False),
    Column("alias", String(64), nullable=False),
    Column("number", Integer, nullable=False),
    Column("at", Float, nullable=False),
    Column("by", String(200), nullable=False),
    Column("why", Text, nullable=False),
    Index("agent_aliases_newest", "agent", "alias", "id"),
    sqlite_autoincrement=True,
)

# Feature flags of agents: kill switch, pins, exclusions, percentage. The newest row of an agent and name holds.
agent_flags = Table(
    "agent_flags",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("agent", String(64), nullable=False),
    Column("name", String(300), nullable=False),
    Column("value", Text),  # JSON; null removes the flag
    Column("at", Float, nullable=False),
    Column("by", String(200), nullable=False),
    Column("why", Text, nullable=False),
    Index("agent_flags_newest", "agent", "name", "id"),
    sqlite_autoincrement=True,
)

deployments = Table(
    "deployments",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("agent", String(64), nullable=False),
    Column("champion", Integer, nullable=False),
    Column("candidate", Integer, nullable=False),
    Column("plan_json", Text, nullable=False),
    Column("status", String(16), nullable=False),
    Column("stage", Integer, nullable=False),  # index of the plan's step
    Column("stage_at", Float, nullable=False),
    Column("decided", Integer, nullable=False),  # number of decisions; a decision is written only if it is unchanged
    Column("evaluations", Integer, nullable=False),
    Column("active", String(64)),  # the agent while it runs or pauses, else null: one deployment of an agent at a time
    Column("started_at", Float, nullable=False),
    Column("started_by", String(200), nullable=False),
    Index("deployments_of_agent", "agent", "started_at"),
    Index("deployments_active", "active", unique=True),
)

deployment_decisions = Table(
    "deployment_decisions",
    metadata,
    Column("deployment", String(32), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),  # from 1
    Column("stage", Integer, nullable=False),
    Column("action", String(16), nullable=False),
    Column("rule", String(32), nullable=False),
    Column("reason", Text, nullable=False),
    Column("numbers_json", Text, nullable=False),
    Column("at", Float, nullable=False),
    Column("by", String(200), nullable=False),
)

# Locks of work that one process may do at a time, see `assay.traces.store.leases`.
leases = Table(
    "leases",
    metadata,
    Column("name", String(200), primary_key=True),
    Column("holder", String(200), nullable=False),  # host and process
    Column("token", String(32), nullable=False),  # of this holding
    Column("since", Float, nullable=False),  # seconds since the epoch
    Column("length_s", Float, nullable=False),
    Column("until", Float, nullable=False),  # by a clock that all processes share; 0 once it was given back
)

# What the processes of a job have reserved of its caps, see `assay.traces.store.shares`.
cap_shares = Table(
    "cap_shares",
    metadata,
    Column("job", String(64), primary_key=True),  # run of the process that leads the job
    Column("member", String(64), primary_key=True),  # run of the process
    Column("calls", Float, nullable=False),
    Column("search_calls", Float, nullable=False),
    Column("tokens", Float, nullable=False),
    Column("cost_usd", Float, nullable=False),
    Column("usage_json", Text),  # what the process has used, once it has ended
)

# Continuous loops, one of an agent.
loops = Table(
    "loops",
    metadata,
    Column("agent", String(64), primary_key=True),
    Column("file", Text, nullable=False),  # of its settings, absolute path
    Column("sha256", String(64), nullable=False),  # of that file
    Column("enabled", Boolean, nullable=False),
    Column("changed_at", Float, nullable=False),
    Column("changed_by", String(200), nullable=False),
)

# Steps of the cycles of a loop: a step that was begun and not ended is run again, one that ended is not.
loop_steps = Table(
    "loop_steps",
    metadata,
    Column("agent", String(64), primary_key=True),
    Column("cycle", Integer, primary_key=True, autoincrement=False),  # from 1
    Column("step", String(16), primary_key=True),
    Column("status", String(16), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("detail_json", Text, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("by", String(200), nullable=False),
)
