"""Selects the rollouts of an export and reads them task by task and group by group, in constant memory.

Sealed rollouts are never read: those of the gate and test splits, by the recorded split and by the store's salt, and
all rollouts with the same inputs.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import orjson
import sqlalchemy as sa

from assay.datasets.keys import RUN, word_runs
from assay.datasets.tasks import task_key
from assay.errors import DataError, FailureKind
from assay.traces.export.settings import Selection
from assay.traces.messages.chaining import complete_requests
from assay.traces.messages.dialects import Answer, answer_of, answer_to, chat_messages
from assay.traces.records import NOT_AGENTS, Rollout, subject_digest
from assay.traces.store import Store, tables as schema
from assay.traces.store.rows import as_json, rollout_of
from assay.traces.store.sealing import SEALED, SplitFinder

# -- One stored LM call in the form that an export reads. Parses the call's JSON only when it is needed.


# The columns that no export reads: `rollout_id` names the rollout, which the caller has.
_NOT_READ = frozenset({"rollout_id", "thinking_tokens", "cost_usd", "started_at", "return_"})


class Turn:
    """A stored LM call. Its JSON is parsed on first access.

    Args:
        row: Values of `COLUMNS`, in this order. Columns ending in `_json` are JSON text.
    Attributes:
        reward, credited, advantage: Set by an export; `credited` is the return.
    """

    COLUMNS = tuple(column.name for column in schema.transitions.columns if column.name not in _NOT_READ)
    __slots__ = (*COLUMNS, "_request", "_response", "advantage", "complete", "credited", "reward")

    # The types, for type checkers: the table in `assay.traces.store.tables` says which columns there are.
    t: int
    model: str
    weights: str
    adapters_json: str
    request_json: str
    response_json: str | None
    output: str
    error: str | None
    failure: str | None
    tools_json: str
    constrained: bool
    cached: bool
    prompt_tokens: int | None
    completion_tokens: int | None
    shown_tasks_json: str
    token_ids_json: str | None
    logprobs_json: str | None
    latency_ms: float
    step_rewards_json: str
    agent: str
    reward: float
    credited: float
    advantage: float

    def __init__(self, row: Iterable[Any]) -> None:
        for name, value in zip(self.COLUMNS, row, strict=True):
            setattr(self, name, value)
        self._request: dict[str, Any] | None = None
        self._response: dict[str, Any] | None = None
        self.complete = True  # False: it continues a conversation that is not completely recorded

    def set_request(self, request: dict[str, Any]) -> None:
        """Replace the request."""
        self._request, self.request_json = request, as_json(request)

    @property
    def request(self) -> dict[str, Any]:
        if self._request is None:
            self._request = loaded(self.request_json)
        return self._request

    @property
    def response(self) -> dict[str, Any]:
        if self._response is None:
            response = loaded(self.response_json)
            self._response = response.get("body", response) if "dialect" in self.request else response
        return self._response

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The request as chat messages."""
        return chat_messages(self.request)

    @property
    def answer(self) -> dict[str, Any]:
        """The answer as an assistant's chat message."""
        message = answer_to(self.request, self.response).message
        return (
            message
            if message.get("tool_calls") or message.get("content")
            else {"role": "assistant", "content": self.output}
        )

    @property
    def reasoning(self) -> str:
        """Reasoning text before the answer; empty if the provider does not return it."""
        return self._where('"reasoning', '"thinking', '"thought').reasoning

    @property
    def refusal(self) -> str:
        """Refusal text; it is also part of `output`."""
        return self._where('"refusal"', '"finishReason"', '"promptFeedback"').refusal

    def _where(self, *names: str) -> Answer:
        """The parsed answer if its JSON text contains one of `names`, else an empty one: parsing every answer is
        slow.
        """
        text = self.response_json or ""
        return (
            answer_of(self.request.get("dialect"), self.response) if any(name in text for name in names) else Answer()
        )

    @property
    def step_rewards(self) -> dict[str, float]:
        return {} if self.step_rewards_json == "{}" else loaded(self.step_rewards_json)

    @property
    def truncated(self) -> bool:
        """Whether the model stopped at its token limit."""
        return self._where('"length"', '"max_tokens"', '"max_output_tokens"', '"MAX_TOKENS"').finish == "length"

    def problem(self, rollout: Rollout, last: bool) -> str | None:
        """Why this call is not clean: `error`, `conversation`, `schema`, `truncated` or `parse`; None if it is
        clean.
        """
        if self.error is not None:
            return "error"
        if not self.complete:
            return "conversation"
        request = self.request_json
        if (
            not request.startswith("{")
            or not any(name in request for name in ('"messages"', '"input"', '"contents"'))
            or self.response_json is None
        ):
            return "schema"
        if self.token_ids_json is not None and self.logprobs_json is None:
            return "schema"
        if self.truncated:
            return "truncated"
        empty = not (self.output or self.tools_json != "[]" or self._calls())
        return "parse" if self.failure == FailureKind.PARSE or empty or self._unreadable_arguments() else None

    def _unreadable_arguments(self) -> bool:
        """Whether the arguments of a tool call are not a JSON object. Such arguments are stored as one text.

        Needed for records of versions without the `failure` column.
        """
        if '"arguments":{"arguments":' not in self.tools_json:
            return False
        texts = [
            tool["arguments"].get("arguments") for tool in orjson.loads(self.tools_json) if len(tool["arguments"]) == 1
        ]
        return any(isinstance(text, str) and not loaded(text) for text in texts)

    def _calls(self) -> bool:
        return bool(answer_of(self.request.get("dialect"), self.response).tools)


def loaded(text: str | None) -> dict[str, Any]:
    try:
        value = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


# -- Selection.


_CONSENT_GIVEN = (
    "given",
    "granted",
    "yes",
    "y",
    "true",
    "1",
    "agreed",
    "obtained",
    "explicit",
    "opt-in",
    "opted-in",
)  # any other text means that consent was not given
# A preflight is not a rollout of a job; by the val scores of `promotion` a curriculum moves on.
NOT_EXPORTED = ("preflight", "promotion")  # phases
_SEALED_INPUTS = "with the inputs of a sealed task"
_SEALED_SPLIT = "of a task that the store's salt assigns to gate or test"


def named(selection: Selection) -> dict[str, tuple[Any, Sequence[str]]]:
    """Column and selected values of each filter, by display name."""
    columns = schema.rollouts.c
    return {
        "run": (columns.run_id, selection.runs),
        "program": (columns.program, selection.programs),
        "task type": (columns.task_type, selection.task_types),
        "source": (columns.source, selection.sources),
    }


def drawn(selection: Selection) -> list[Any]:
    """SQL conditions for the selected runs, programs, task types, sources and ids, regardless of status and consent."""
    r = schema.rollouts
    filters = [column.in_(values) for column, values in named(selection).values() if values]
    if selection.rollouts:
        filters.append(r.c.id.in_(selection.rollouts))
    agents = [] if selection.sources else [r.c.source.not_in(NOT_AGENTS)]
    return [*filters, *agents, r.c.phase.not_in(NOT_EXPORTED), r.c.source != "outside"]


def selected(selection: Selection) -> list[Any]:
    """SQL conditions on rollouts, including consent and tenants, but not sealed inputs."""
    r = schema.rollouts
    rated = [r.c.human_rating.is_not(None)] if selection.rated else []
    ended = r.c.status.in_(("done", "failed"))
    return [*drawn(selection), ended, sa.not_(is_sealed()), *permitted(selection), *rated]


def permitted(selection: Selection) -> list[Any]:
    """SQL conditions on rollouts by tenant and consent alone."""
    r = schema.rollouts
    consent = [r.c.consent.is_not(None)] if selection.require_consent else []
    return [sa.or_(r.c.tenant.is_(None), r.c.tenant.in_(selection.tenants)), sa.not_(lacks_consent()), *consent]


def _plain_column(column: Any) -> Any:
    return sa.func.lower(sa.func.trim(sa.func.coalesce(column, "")))


def is_sealed() -> Any:
    """SQL condition: the recorded split of the rollout is gate or test."""
    return _plain_column(schema.rollouts.c.split).in_(SEALED)


def consents(text: str) -> bool:
    """Whether a recorded consent text means that consent was given. Unknown texts mean that it was not."""
    return text.strip().lower() in _CONSENT_GIVEN


def lacks_consent() -> Any:
    """SQL condition: a consent is recorded and does not mean that consent was given."""
    column = schema.rollouts.c.consent
    return sa.and_(column.is_not(None), _plain_column(column).not_in(_CONSENT_GIVEN))


@dataclass
class Episode:
    """A rollout with its turns in order; `rollout.transitions` is empty.

    An export sets which turns are `usable`, and how many `copies` of their rows are written.

    `difficulty` is the task's own, else derived from the mean score of its selected rollouts: `easy` from 2/3, `hard`
    below 1/3, else `medium`.
    """

    rollout: Rollout
    turns: list[Turn] = field(default_factory=list)
    difficulty: str = "medium"
    group: str = ""
    usable: list[Turn] = field(default_factory=list)
    copies: int = 1
    credited: tuple[list[float], list[float]] | tuple[()] | None = None  # cached by the export

    @property
    def quality(self) -> float | None:
        """Quality of the rollout in [0, 1], see `Rollout.quality`."""
        return self.rollout.quality

    @property
    def agents(self) -> list[str]:
        """Name of the agent of each turn."""
        return [turn.agent for turn in self.turns]

    @property
    def rewards(self) -> list[float]:
        """Sum of the step rewards of each turn, without the outcome; NaN if one of them is not a number."""
        return [_sum(turn.step_rewards.values()) for turn in self.turns]


def _sum(values: Iterable[Any]) -> float:
    total = 0.0
    for value in values:
        total += value if isinstance(value, int | float) else math.nan
    return total


def difficulty_of(metadata: Mapping[str, Any], mean: float | None) -> str:
    """The task's `difficulty`, else one derived from the mean score of its rollouts, else `unknown`."""
    if metadata.get("difficulty") is not None:
        return str(metadata["difficulty"])
    return "unknown" if mean is None else "easy" if mean >= 2 / 3 else "hard" if mean < 1 / 3 else "medium"


def read_groups(
    store: Store,
    selection: Selection,
    sealed: set[str],
    *,
    splits: SplitFinder | None = None,
    light: bool = False,
    means: bool = False,
    by_task: bool = False,
    exclusions: Counter[str] | None = None,
) -> Iterator[list[Episode]]:
    """Iterate over groups of rollouts of one task, ordered by task, with one group in memory at a time.

    A rollout without a group is its own group. Sealed rollouts are left out: those with inputs in `sealed`, and those
    of tasks that the store's salt assigns to gate or test.

    Args:
        light: Read only the number, the step rewards and the agents of the turns.
        means: Derive the difficulty from the mean score where the task has none; otherwise it is `unknown`.
        by_task: Treat all rollouts of a task as one group.
        exclusions: Counter of excluded rollouts by reason.
    """
    r, t, where = schema.rollouts, schema.transitions, selected(selection)
    order = (r.c.task_id, r.c.group_id, r.c.id)
    mean = sa.func.avg(r.c.score).over(partition_by=r.c.task_id) if means else sa.null()
    columns = [
        t.c[name] if not light or name in ("t", "step_rewards_json", "agent") else sa.literal_column("''").label(name)
        for name in Turn.COLUMNS
    ]
    calls = (
        sa.select(t.c.rollout_id, *columns)
        .select_from(t.join(r, r.c.id == t.c.rollout_id))
        .where(*where)
        .order_by(*order, t.c.t)
    )
    forgotten, splits = store.forgotten(), splits or SplitFinder(store)
    with snapshot(store) as connection:
        turns = groupby(connection.execute(calls), key=lambda row: row[0])
        waiting = next(turns, None)
        group: list[Episode] = []
        for row in connection.execute(sa.select(r, mean.label("task_mean")).where(*where).order_by(*order)).mappings():
            rollout = rollout_of({name: value for name, value in row.items() if name != "task_mean"})
            group_id = rollout.task_id if by_task and rollout.task_id else rollout.group_id or rollout.id
            episode = Episode(rollout, difficulty=difficulty_of(rollout.metadata, row["task_mean"]), group=group_id)
            if waiting is not None and waiting[0] == rollout.id:
                episode.turns = [Turn(values[1:]) for values in waiting[1]]
                complete_requests(episode.turns)
                waiting = next(turns, None)
            if rollout.data_subject and forgotten.covers(subject_digest(rollout.data_subject), rollout.tenant):
                episode.turns = []
            if (reason := _exclusion(episode, sealed, splits)) is not None:
                if exclusions is not None:
                    exclusions[reason] += 1
                continue
            if group and (group[0].group, group[0].rollout.task_id) != (episode.group, rollout.task_id):
                yield group
                group = []
            group.append(episode)
        if group:
            yield group


def _exclusion(episode: Episode, sealed: set[str], splits: SplitFinder) -> str | None:
    """Why a rollout that matches the selection is left out, or None."""
    rollout = episode.rollout
    if sealed and task_key(rollout.inputs) in sealed:
        return _SEALED_INPUTS
    if splits.of_inputs(rollout.inputs, rollout.split) in SEALED:
        return _SEALED_SPLIT
    return None if episode.turns else "without LM calls or of erased people"


@contextmanager
def snapshot(store: Store) -> Iterator[sa.Connection]:
    """Connection whose queries see one snapshot of the store. Rows are streamed."""
    level = {"isolation_level": "REPEATABLE READ"} if store.engine.dialect.name == "postgresql" else {}
    with store.engine.connect().execution_options(yield_per=500, **level) as connection:
        if store.engine.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN")
        yield connection


def sealed_tasks(
    store: Store, splits: SplitFinder | None = None, *, by_salt: bool = True
) -> tuple[set[str], "Overlap"]:
    """Known gate and test tasks.

    Args:
        by_salt: Whether a task counts that only the store's salt assigns to a sealed split.
    Returns:
        Their keys, and an `Overlap` with the n-grams of those whose rollouts are stored.
    """
    r, splits, overlap = schema.rollouts, splits or SplitFinder(store), Overlap()
    keys = set(splits.sealed)
    with store.engine.connect() as connection:
        query = sa.select(r.c.inputs_json, r.c.split).order_by(r.c.task_id, r.c.group_id, r.c.id)
        last = None  # rollouts of a task are consecutive
        for text, recorded in connection.execution_options(yield_per=500).execute(query):
            if (text, recorded) == last:
                continue
            last = (text, recorded)
            inputs = loaded(text)
            known = recorded.strip().lower() in SEALED
            if inputs and (known or (by_salt and splits.of_inputs(inputs, recorded) in SEALED)):
                keys.add(task_key(inputs))
                overlap.seal(inputs)
    return keys, overlap


class Overlap:
    """Share of the exported inputs' text that also occurs in sealed inputs, by n-grams of 8 words.

    A shorter text counts as one n-gram.
    """

    def __init__(self) -> None:
        self._sealed: set[bytes] = set()
        self._last_grams: set[bytes] = set()
        self.tasks = self.shared = 0
        self.worst: list[tuple[float, str]] = []

    def seal(self, inputs: Mapping[str, Any]) -> None:
        """Add the inputs of a sealed task."""
        self._sealed.update(_runs(inputs))

    def see(self, task_id: str, inputs: Mapping[str, Any]) -> None:
        """Count an exported task. Tasks are passed in order; consecutive calls with the same task count once."""
        grams = _runs(inputs)
        if not self._sealed or grams == self._last_grams:
            self.tasks += grams != self._last_grams
            self._last_grams = grams
            return
        self._last_grams = grams
        self.tasks += 1
        share = len(grams & self._sealed) / len(grams) if grams else 0.0
        if share:
            self.shared += 1
            self.worst = sorted([*self.worst, (share, task_id)], reverse=True)[:5]

    def to_dict(self) -> dict[str, Any]:
        """`tasks`, the number of them that share an n-gram (`shared`), and the five `worst` with their sealed share."""
        worst = [{"task": task, "share": round(share, 4)} for share, task in self.worst]
        return {"ngram": RUN, "tasks": self.tasks, "shared": self.shared, "worst": worst}


def _runs(inputs: Mapping[str, Any]) -> set[bytes]:
    return word_runs(" ".join(str(value) for value in inputs.values()))


# -- Counts of a selection by query: rollouts, LM calls, and excluded rollouts by reason. Does not load rollouts.


_NAMED = 10  # names listed in the error message for an unknown name


def count_turns(store: Store, selection: Selection) -> int:
    """Number of LM calls in the selection, including calls on sealed inputs."""
    r, t = schema.rollouts, schema.transitions
    with store.engine.connect() as connection:
        return _count(connection, t.join(r, r.c.id == t.c.rollout_id), *selected(selection))


def count_drawn(store: Store, selection: Selection) -> int:
    """Number of rollouts in the selected runs, programs, task types and sources, including excluded rollouts."""
    with store.engine.connect() as connection:
        return _count(connection, schema.rollouts, *_drawn_by_index(selection))


def _count(connection: sa.Connection, rows: sa.FromClause, *conditions: Any) -> int:
    return int(connection.execute(sa.select(sa.func.count()).select_from(rows).where(*conditions)).scalar() or 0)


def _drawn_by_index(selection: Selection) -> list[Any]:
    """Conditions of `drawn`. Without named values, only indexed columns are used, so that counting reads no rows;
    preflight rollouts are counted in that case."""
    if selection.rollouts or any(values for _, values in named(selection).values()):
        return drawn(selection)
    return [schema.rollouts.c.source.not_in(("outside", *NOT_AGENTS))]


def check_named(store: Store, selection: Selection) -> None:
    """Check that at least one rollout has each selected run, program, task type, source and tenant.

    Raises:
        DataError: No rollout has the value; the message lists existing values.
    """
    filters = {**named(selection), "tenant": (schema.rollouts.c.tenant, selection.tenants)}
    with store.engine.connect() as connection:
        for kind, (column, values) in filters.items():
            for value in values:
                if connection.execute(sa.select(sa.literal(1)).where(column == value).limit(1)).first() is None:
                    some = sa.select(column).where(column.is_not(None)).distinct().limit(_NAMED + 1)
                    existing = connection.execute(some).scalars().all()
                    names = ", ".join(sorted(map(repr, existing[:_NAMED]))) + (", …" if len(existing) > _NAMED else "")
                    raise DataError(
                        f"no rollout has the {kind} {value!r}. Give the full name; the store has {names or 'none'}"
                    )


def exclusion_counts(store: Store, selection: Selection) -> dict[str, int]:
    """Number of excluded rollouts by reason, over the selected runs, programs, task types and sources.

    Rollouts whose inputs are sealed are not included: `read_groups` counts them.
    """
    r = schema.rollouts
    reasons = {
        "of the gate or test split": is_sealed(),
        "still running": r.c.status == "running",
        "ended by an error of the model or the infrastructure": r.c.status == "error",
        "of a tenant that was not selected": sa.and_(r.c.tenant.is_not(None), r.c.tenant.not_in(selection.tenants)),
        "with a consent that was not given": lacks_consent(),
        **({"without any consent": r.c.consent.is_(None)} if selection.require_consent else {}),
        **({"without a human rating": r.c.human_rating.is_(None)} if selection.rated else {}),
    }
    among = _drawn_by_index(selection)
    with store.engine.connect() as connection:
        counts = {name: _count(connection, r, *among, condition) for name, condition in reasons.items()}
    return {name: count for name, count in counts.items() if count}
