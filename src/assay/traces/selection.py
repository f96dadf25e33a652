"""Which rollouts an export draws on, and the stream of them: task by task, group by group, in constant memory.

What is sealed never comes: rollouts of the gate and test splits, by what was recorded and by the store's salt, and any others whose inputs
are those of one.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import orjson
import sqlalchemy as sa

from assay.datasets.overlap import RUN, word_runs
from assay.errors import DataError, FailureKind
from assay.traces import schema
from assay.traces.chaining import complete_requests
from assay.traces.dialects import Answer, answer_of, answer_to, chat_messages
from assay.traces.records import Rollout, subject_digest
from assay.traces.rows import as_json, rollout_of
from assay.traces.sealing import SEALED, SplitFinder, task_key
from assay.traces.store import Store

__all__ = [
    "Episode",
    "Overlap",
    "Selection",
    "Turn",
    "check_named",
    "count_drawn",
    "count_turns",
    "left_out",
    "read_groups",
    "sealed_tasks",
    "task_key",
]

_GIVEN = ("given", "granted", "yes", "y", "true", "1", "agreed", "obtained", "explicit", "opt-in", "opted-in")  # words of consent; any other is none
_NAMED = 10  # runs, programs, … that are listed where none is of the name
_SEALED_INPUTS = "whose inputs are those of a sealed task"
_SEALED_SPLIT = "whose task is in the gate or test split by the store's salt"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What may be drawn on. Empty tuples do not restrict, but for `tenants`: rollouts that belong to a tenant come only where it
    is named."""

    runs: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    task_types: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    require_consent: bool = False
    rated: bool = False  # by a person

    def named(self) -> dict[str, tuple[Any, tuple[str, ...]]]:
        """Columns with the values that were named, by what they are called."""
        r = schema.rollouts
        return {
            "run": (r.c.run_id, self.runs), "program": (r.c.program, self.programs), "task type": (r.c.task_type, self.task_types),
            "source": (r.c.source, self.sources),
        }  # fmt: skip

    def drawn(self) -> list[Any]:
        """As conditions: the runs, programs, task types and sources that are drawn on, whatever became of their rollouts."""
        r = schema.rollouts
        found = [column.in_(values) for column, values in self.named().values() if values]
        own = [] if self.sources else [r.c.source != "judge"]  # a judge's calls are no agent's
        return [*found, *own, r.c.phase != "preflight", r.c.source != "outside"]

    def where(self) -> list[Any]:
        """As conditions on the table of rollouts; consent and tenants included, sealed inputs not."""
        r = schema.rollouts
        consent = [r.c.consent.is_not(None)] if self.require_consent else []
        rated = [r.c.human_rating.is_not(None)] if self.rated else []
        return [
            *self.drawn(), r.c.status.in_(("done", "failed")), sa.not_(_sealed()),
            sa.or_(r.c.tenant.is_(None), r.c.tenant.in_(self.tenants)), sa.not_(_no_consent()), *consent, *rated,
        ]  # fmt: skip


def _plain_column(column: Any) -> Any:
    return sa.func.lower(sa.func.trim(sa.func.coalesce(column, "")))


def _sealed() -> Any:
    return _plain_column(schema.rollouts.c.split).in_(SEALED)


def consents(text: str) -> bool:
    """Whether a recorded consent says that it was given."""
    return text.strip().lower() in _GIVEN


def _no_consent() -> Any:
    """Consent was asked for, and what is on record does not say that it was given."""
    column = schema.rollouts.c.consent
    return sa.and_(column.is_not(None), _plain_column(column).not_in(_GIVEN))


class Turn:
    """One LM call as it stands in the store, its JSON read where it is asked for."""

    __slots__ = (
        "_request", "_response", "adapters_json", "cached", "completion_tokens", "constrained", "error", "failure", "latency_ms", "logprobs_json",
        "model", "output", "prompt_tokens", "request_json", "response_json", "shown_tasks_json", "step_rewards_json", "t", "token_ids_json",
        "tools_json", "weights", "whole",
    )  # fmt: skip
    COLUMNS = (
        "t", "model", "weights", "adapters_json", "request_json", "response_json", "output", "error", "tools_json", "constrained", "cached",
        "prompt_tokens", "completion_tokens", "token_ids_json", "logprobs_json", "latency_ms", "step_rewards_json", "failure", "shown_tasks_json",
    )  # fmt: skip

    def __init__(self, row: Iterable[Any]) -> None:
        (
            self.t, self.model, self.weights, self.adapters_json, self.request_json, self.response_json, self.output, self.error, self.tools_json,
            self.constrained, self.cached, self.prompt_tokens, self.completion_tokens, self.token_ids_json, self.logprobs_json, self.latency_ms,
            self.step_rewards_json, self.failure, self.shown_tasks_json,
        ) = row  # fmt: skip
        self._request: dict[str, Any] | None = None
        self._response: dict[str, Any] | None = None
        self.whole = True  # False: it continues a conversation of which not all is on record
        if not self.output and self.response_json and '"type":"data"' in self.response_json:  # older records lack the text of such parts
            self.output = answer_of(self.request.get("dialect"), self.response).output

    def set_request(self, request: dict[str, Any]) -> None:
        """Replaces what was sent."""
        self._request, self.request_json = request, as_json(request)

    @property
    def request(self) -> dict[str, Any]:
        if self._request is None:
            self._request = _loaded(self.request_json)
        return self._request

    @property
    def response(self) -> dict[str, Any]:
        if self._response is None:
            found = _loaded(self.response_json)
            self._response = found.get("body", found) if "dialect" in self.request else found
        return self._response

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What was sent, as chat messages."""
        return chat_messages(self.request)

    @property
    def answer(self) -> dict[str, Any]:
        """What the model said, as an assistant's chat message."""
        message = answer_to(self.request, self.response).message
        return message if message.get("tool_calls") or message.get("content") else {"role": "assistant", "content": self.output}

    @property
    def reasoning(self) -> str:
        """What the model thought before it answered, as far as its provider says it."""
        return self._where('"reasoning', '"thinking', '"thought').reasoning

    @property
    def refusal(self) -> str:
        """What the model said in place of an answer; it is a part of `output` as well."""
        return self._where('"refusal"', '"finishReason"', '"promptFeedback"').refusal

    def _where(self, *names: str) -> Answer:
        """What the model said if its JSON has one of these texts: not every one is read for it."""
        told = self.response_json or ""
        return answer_of(self.request.get("dialect"), self.response) if any(name in told for name in names) else Answer()

    @property
    def step_rewards(self) -> dict[str, float]:
        return {} if self.step_rewards_json == "{}" else _loaded(self.step_rewards_json)

    @property
    def truncated(self) -> bool:
        """Whether the model stopped at its limit of tokens."""
        return self._where('"length"', '"max_tokens"', '"max_output_tokens"', '"MAX_TOKENS"').finish == "length"

    def problem(self, rollout: Rollout, last: bool) -> str | None:
        """Why this call is not clean, or None: `error`, `conversation`, `schema`, `truncated`, `parse`."""
        if self.error is not None:
            return "error"
        if not self.whole:
            return "conversation"
        asked = self.request_json
        if not asked.startswith("{") or not any(name in asked for name in ('"messages"', '"input"', '"contents"')) or self.response_json is None:
            return "schema"
        if self.token_ids_json is not None and self.logprobs_json is None:
            return "schema"
        if self.truncated:
            return "truncated"
        nothing = not (self.output or self.tools_json != "[]" or self._calls())
        return "parse" if self.failure == FailureKind.PARSE or nothing or self._unreadable_arguments() else None

    def _unreadable_arguments(self) -> bool:
        """Whether a tool was called with what is no JSON object, which is kept as one text (records of before `failure` have only that)."""
        if '"arguments":{"arguments":' not in self.tools_json:
            return False
        texts = [tool["arguments"].get("arguments") for tool in orjson.loads(self.tools_json) if len(tool["arguments"]) == 1]
        return any(isinstance(text, str) and not _loaded(text) for text in texts)

    def _calls(self) -> bool:
        return bool(answer_of(self.request.get("dialect"), self.response).tools)


def _loaded(text: str | None) -> dict[str, Any]:
    try:
        found = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


@dataclass
class Episode:
    """A rollout, without its transitions, and its turns in order. `difficulty` is the task's own word for it, else by the mean
    score of its rollouts in the selection: easy from 2/3, hard below 1/3."""

    rollout: Rollout
    turns: list[Turn] = field(default_factory=list)
    difficulty: str = "medium"
    group: str = ""
    credited: tuple[list[float], list[float]] | tuple[()] | None = None  # what an export worked out

    @property
    def quality(self) -> float | None:
        """The rollout's."""
        return self.rollout.quality

    @property
    def rewards(self) -> list[float]:
        """The sum of the step rewards of each turn, without the outcome; NaN where one of them is no number."""
        return [_sum(turn.step_rewards.values()) for turn in self.turns]


def _sum(values: Iterable[Any]) -> float:
    total = 0.0
    for value in values:
        total += value if isinstance(value, int | float) else math.nan
    return total


def difficulty_of(metadata: Mapping[str, Any], mean: float | None) -> str:
    """The task's `difficulty`, else by the mean score of its rollouts."""
    if metadata.get("difficulty") is not None:
        return str(metadata["difficulty"])
    return "unknown" if mean is None else "easy" if mean >= 2 / 3 else "hard" if mean < 1 / 3 else "medium"


def read_groups(
    store: Store, selection: Selection, sealed: set[str], *, splits: SplitFinder | None = None, light: bool = False, means: bool = False,
    by_task: bool = False, left: Counter[str] | None = None,
) -> Iterator[list[Episode]]:  # fmt: skip
    """Groups of rollouts of one task, tasks in order; a rollout without a group is one of its own. Rollouts whose inputs are
    `sealed` are left out, and those of tasks that are sealed by the store's salt, whoever recorded them. One group is in memory at a time.

    Args:
        light: turns have their number and step rewards, nothing else.
        by_task: all rollouts of a task are one group.
        means: the difficulty of a task without a word of its own goes by the mean score of its rollouts; else it is unknown.
        left: counts what is left out while reading.
    """
    r, t, where = schema.rollouts, schema.transitions, selection.where()
    order = (r.c.task_id, r.c.group_id, r.c.id)
    mean = sa.func.avg(r.c.score).over(partition_by=r.c.task_id) if means else sa.null()
    wanted = [t.c[name] if not light or name in ("t", "step_rewards_json") else sa.literal_column("''").label(name) for name in Turn.COLUMNS]
    calls = sa.select(t.c.rollout_id, *wanted).select_from(t.join(r, r.c.id == t.c.rollout_id)).where(*where).order_by(*order, t.c.t)
    forgotten, splits = store.forgotten(), splits or SplitFinder(store)
    with snapshot(store) as connection:
        turns = groupby(connection.execute(calls), key=lambda row: row[0])
        waiting = next(turns, None)
        group: list[Episode] = []
        for row in connection.execute(sa.select(r, mean.label("task_mean")).where(*where).order_by(*order)).mappings():
            plain = dict(row)
            task_mean = plain.pop("task_mean")
            rollout = rollout_of(plain)
            own = rollout.task_id if by_task and rollout.task_id else rollout.group_id or rollout.id
            episode = Episode(rollout, difficulty=difficulty_of(rollout.metadata, task_mean), group=own)
            if waiting is not None and waiting[0] == rollout.id:
                episode.turns = [Turn(found[1:]) for found in waiting[1]]
                complete_requests(episode.turns)
                waiting = next(turns, None)
            if forgotten and rollout.data_subject and subject_digest(rollout.data_subject) in forgotten:
                episode.turns = []
            reason = "without LM calls, or of people who were forgotten" if not episode.turns else None
            if sealed and task_key(rollout.inputs) in sealed:
                reason = _SEALED_INPUTS
            elif splits.of_inputs(rollout.inputs, rollout.split) in SEALED:
                reason = _SEALED_SPLIT
            if reason is not None:
                if left is not None:
                    left[reason] += 1
                continue
            if group and (group[0].group, group[0].rollout.task_id) != (episode.group, rollout.task_id):
                yield group
                group = []
            group.append(episode)
        if group:
            yield group


@contextmanager
def snapshot(store: Store) -> Iterator[sa.Connection]:
    """A connection whose queries all see the store as it is now, whatever is written meanwhile; rows come as they are read."""
    level = {"isolation_level": "REPEATABLE READ"} if store.engine.dialect.name == "postgresql" else {}
    with store.engine.connect().execution_options(yield_per=500, **level) as connection:
        if store.engine.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN")
        yield connection


def sealed_tasks(store: Store, splits: SplitFinder | None = None) -> tuple[set[str], "Overlap"]:
    """Keys of the inputs (`task_key`) of gate and test tasks, as far as the store knows them, and the n-grams of those that it has seen."""
    r, splits, overlap = schema.rollouts, splits or SplitFinder(store), Overlap()
    hashes = set(splits.sealed_texts)
    with store.engine.connect() as connection:
        query = sa.select(r.c.inputs_json, r.c.split).order_by(r.c.task_id, r.c.group_id, r.c.id)
        last = None  # rollouts of a task stand together
        for text, recorded in connection.execution_options(yield_per=500).execute(query):
            if (text, recorded) == last:
                continue
            last = (text, recorded)
            inputs = _loaded(text)
            if inputs and splits.of_inputs(inputs, recorded) in SEALED:
                hashes.add(task_key(inputs))
                overlap.seal(inputs)
    return hashes, overlap


class Overlap:
    """How much of the exported inputs' text stands in sealed inputs as well: n-grams of 8 words; shorter texts as a whole."""

    def __init__(self) -> None:
        self._sealed: set[bytes] = set()
        self._seen: set[bytes] = set()
        self.tasks = self.shared = 0
        self.worst: list[tuple[float, str]] = []

    def seal(self, inputs: Mapping[str, Any]) -> None:
        """Takes in the inputs of a sealed task."""
        self._sealed.update(_runs(inputs))

    def see(self, task_id: str, inputs: Mapping[str, Any]) -> None:
        """Counts a task that is exported; tasks come in order, so the same one twice in a row is counted once."""
        grams = _runs(inputs)
        if not self._sealed or grams == self._seen:
            self.tasks += grams != self._seen
            self._seen = grams
            return
        self._seen = grams
        self.tasks += 1
        share = len(grams & self._sealed) / len(grams) if grams else 0.0
        if share:
            self.shared += 1
            self.worst = sorted([*self.worst, (share, task_id)], reverse=True)[:5]

    def to_dict(self) -> dict[str, Any]:
        """`tasks`, of them `shared` (any n-gram), and the five `worst` with the share of their n-grams that is sealed."""
        worst = [{"task": task, "share": round(share, 4)} for share, task in self.worst]
        return {"ngram": RUN, "tasks": self.tasks, "shared": self.shared, "worst": worst}


def _runs(inputs: Mapping[str, Any]) -> set[bytes]:
    return word_runs(" ".join(str(value) for value in inputs.values()))


def count_turns(store: Store, selection: Selection) -> int:
    """How many LM calls the selection has, those of sealed inputs included."""
    r, t = schema.rollouts, schema.transitions
    with store.engine.connect() as connection:
        return int(
            connection.execute(sa.select(sa.func.count()).select_from(t.join(r, r.c.id == t.c.rollout_id)).where(*selection.where())).scalar() or 0
        )


def count_drawn(store: Store, selection: Selection) -> int:
    """How many rollouts the runs, programs, task types and sources of a selection have, those that are left out included."""
    r = schema.rollouts
    with store.engine.connect() as connection:
        return int(connection.execute(sa.select(sa.func.count()).select_from(r).where(*_drawn_by_index(selection))).scalar() or 0)


def _drawn_by_index(selection: Selection) -> list[Any]:
    """As `Selection.drawn`; where nothing is named, of columns that an index has, so that counting reads no rows. Preflights are counted then."""
    if any(values for _, values in selection.named().values()):
        return selection.drawn()
    return [schema.rollouts.c.source.not_in(("outside", "judge"))]


def check_named(store: Store, selection: Selection) -> None:
    """Refuses a run, program, task type, source or tenant that no rollout has.

    Raises:
        DataError: which, and what there is.
    """
    with store.engine.connect() as connection:
        for what, (column, values) in {**selection.named(), "tenant": (schema.rollouts.c.tenant, selection.tenants)}.items():
            for value in values:
                if connection.execute(sa.select(sa.literal(1)).where(column == value).limit(1)).first() is None:
                    there = connection.execute(sa.select(column).where(column.is_not(None)).distinct().limit(_NAMED + 1)).scalars().all()
                    names = ", ".join(sorted(map(repr, there[:_NAMED]))) + (", …" if len(there) > _NAMED else "")
                    raise DataError(f"no rollout is of the {what} {value!r}, which is to be its whole name; the store has {names or 'none'}")


def left_out(store: Store, selection: Selection) -> dict[str, int]:
    """Rollouts of the runs, programs, task types and sources drawn on that are left out, by why; sealed inputs are counted while reading."""
    r = schema.rollouts
    reasons = {
        "of the gate or test split": _sealed(),
        "still running": r.c.status == "running",
        "ended by an error of the model or machinery": r.c.status == "error",
        "of a tenant that was not named": sa.and_(r.c.tenant.is_not(None), r.c.tenant.not_in(selection.tenants)),
        "without a consent that was given": _no_consent(),
        **({"without any consent": r.c.consent.is_(None)} if selection.require_consent else {}),
        **({"without a person's rating": r.c.human_rating.is_(None)} if selection.rated else {}),
    }
    counts: Counter[str] = Counter()
    drawn = _drawn_by_index(selection)
    with store.engine.connect() as connection:
        for name, condition in reasons.items():
            counts[name] = connection.execute(sa.select(sa.func.count()).select_from(r).where(*drawn, condition)).scalar() or 0
    return {name: count for name, count in counts.items() if count}
