"""What raters are asked: the questions of judges that a store knows, and the outputs to show for them.

Calls no model and imports no DSPy, so that the local page can use it.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from assay.datasets.tasks import task_key
from assay.rubrics.conversations import TurnFields
from assay.rubrics.criteria import ORIGINS, SHOWS, JudgeSpec, NoGrade
from assay.support.values import digest_of, is_missing
from assay.traces.records import NOT_AGENTS, RUN_FIELDS, Rollout
from assay.traces.store.store import DirectWrites, StoreReads

_MOST_SOURCES, _MOST_RUNS = 50, 500  # of one question


class Asked(Protocol):
    """What a judge and a stored question have in common: the question with its scale, and the fields that are shown."""

    @property
    def spec(self) -> JudgeSpec: ...


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question that judges of a store answer.

    Args:
        shows: names of the fields that a rater sees, in order; both `output_a` and `output_b` for pairs.
        sources: files, artifacts and sentences that judges with this question were loaded from, oldest first.
        runs: ids of runs in which they judged, oldest first.
    """

    spec: JudgeSpec
    shows: tuple[str, ...] = SHOWS
    sources: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return key_of(self)

    @property
    def compares(self) -> bool:
        """Whether pairs of outputs are shown."""
        return {"output_a", "output_b"} <= set(self.shows)

    def to_dict(self) -> dict[str, Any]:
        return {
            "spec": self.spec.to_dict(),
            "shows": list(self.shows),
            "sources": list(self.sources),
            "runs": list(self.runs),
        }

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Question":
        spec = data["spec"]
        return cls(
            spec=JudgeSpec(**{**spec, "scale": tuple(spec["scale"])}),
            shows=tuple(data["shows"]),
            sources=tuple(data["sources"]),
            runs=tuple(data.get("runs") or ()),
        )


def key_of(judge: Asked) -> str:
    """Key of a judge's labels in the store: a hash of its question and scale."""
    return digest_of({"text": judge.spec.text, "scale": list(judge.spec.scale)})


def remember(store: DirectWrites, judge: Asked, source: str = "", *, run_id: str = "") -> Question:
    """Stores the question of a judge, so that the local page can show it to raters.

    Args:
        source: what the judge was loaded from.
        run_id: the run in which it judges.
    """
    known = known_questions(store).get(key_of(judge))
    sources, runs = (known.sources, known.runs) if known else ((), ())
    question = Question(
        spec=judge.spec,
        shows=tuple(getattr(judge, "shows", SHOWS)),
        sources=_with(sources, source, _MOST_SOURCES),
        runs=_with(runs, run_id, _MOST_RUNS),
    )
    if question != known:
        store.put_question(question.key, question.to_dict())
    return question


def _with(names: Sequence[str], name: str, most: int) -> tuple[str, ...]:
    """The newest names, `name` as the last unless it is empty."""
    return (*(one for one in names if one != name), *([name] if name else []))[-most:]


def known_questions(store: StoreReads) -> dict[str, Question]:
    """The questions of a store by key, in no order."""
    return {key: Question.of(json.loads(text)) for key, text in store.questions().items()}


@dataclass(frozen=True)
class ToLabel:
    """One item for a rater. `other_id`: the rollout of the second output of a pair."""

    item_id: str
    fields: Mapping[str, Any]
    rollout_id: str
    other_id: str = ""


def items_to_label(rollouts: Iterable[Rollout], judge: Asked) -> Iterator[ToLabel]:
    """The items of rollouts, as the judge would see them, each once.

    Leaves out rollouts of the sealed test split, of judges, and without an answer. For a pairwise judge the items are
    pairs of different outputs of one task.
    """
    chosen = (
        rollout
        for rollout in rollouts
        if rollout.prediction
        and rollout.source not in NOT_AGENTS
        and rollout.split != "test"
        and rollout.task_type != "verdict"
    )
    seen: set[str] = set()
    names = tuple(getattr(judge, "shows", ()))
    compares = {"output_a", "output_b"} <= set(names)
    for entry in _pairs(chosen, names) if compares else (item_to_label(rollout, judge) for rollout in chosen):
        if entry is not None and entry.item_id not in seen:
            seen.add(entry.item_id)
            yield entry


def item_to_label(rollout: Rollout, judge: Asked) -> ToLabel | None:
    """A rollout as the judge would see it; None if it has no answer or lacks a field that the judge needs."""
    if output_of(rollout.prediction or {}) in ("", {}, None):
        return None
    try:
        fields = _shown_of(rollout, getattr(judge, "shows", SHOWS))
    except NoGrade:
        return None
    return ToLabel(digest_of(fields), fields, rollout.id)


def _shown_of(rollout: Rollout, names: Sequence[str]) -> dict[str, Any]:
    return shown_values(names, inputs=rollout.inputs, prediction=rollout.prediction or {}, expected=rollout.expected)


def _pairs(rollouts: Iterable[Rollout], names: Sequence[str]) -> Iterator[ToLabel]:
    groups: dict[str, dict[str, Rollout]] = defaultdict(dict)
    for rollout in rollouts:
        groups[task_key(rollout.inputs)].setdefault(digest_of(output_of(rollout.prediction or {})), rollout)
    for group in groups.values():
        # by hash, so that the order does not depend on age or length
        members = sorted(group.values(), key=lambda r: digest_of(output_of(r.prediction or {})))
        for first, second in zip(members[::2], members[1::2], strict=False):
            outputs = {"output_a": output_of(first.prediction or {}), "output_b": output_of(second.prediction or {})}
            try:
                fields = {**_shown_of(first, [name for name in names if name not in outputs]), **outputs}
            except NoGrade:
                continue
            yield ToLabel(digest_of(fields), fields, first.id, second.id)


def shown_values(
    names: Iterable[str], *, inputs: Mapping[str, Any], prediction: Mapping[str, Any], expected: Mapping[str, Any]
) -> dict[str, Any]:
    """The values that a judge sees, by their names in its `shows`.

    - `task_input`, `output`, `expected`: all inputs of the task, all outputs of the program, all expected values.
    - `input.NAME`, `output.NAME`, `expected.NAME`: one of them.
    - Any other name: the input or output of that name. An expected value is never meant by a name without its origin,
      and a name that several origins have is refused.

    Raises:
        NoGrade: there is no such value, an expected value is missing, or a name has several origins.
    """
    known = {name: value for name, value in expected.items() if not is_missing(value)}
    origins = dict(zip(ORIGINS, (inputs, prediction, known), strict=True))
    whole = {
        "task_input": one_of(inputs),
        "output": output_of(prediction),
        **({"expected": one_of(known)} if known else {}),
    }
    return {name: whole[name] if name in whole else _one_value(name, origins) for name in names}


def _one_value(name: str, origins: Mapping[str, Mapping[str, Any]]) -> Any:
    origin, _, field = name.rpartition(".")
    if not origin:
        having = [other for other, values in origins.items() if not is_missing(values.get(field))]
        if len(having) > 1:
            ways = " or ".join(f"{other}.{field}" for other in having)
            raise NoGrade(f"{name!r} in the judge's shows has several meanings: write {ways}")
        origin = next((other for other in ("input", "output") if field in origins[other]), "expected")
        if origin == "expected":
            raise NoGrade(_no_value(name, origins))
    if field not in origins[origin]:
        raise NoGrade(_no_value(name, origins), missing_field=field if origin == "expected" else "")
    value = origins[origin][field]
    return "" if origin == "output" and value is None else value


def _no_value(name: str, origins: Mapping[str, Mapping[str, Any]]) -> str:
    fields = ", ".join(f"{origin}.{field}" for origin, values in origins.items() for field in sorted(values))
    return f"the judge sees {name!r}, and there is no such value; available are {fields or 'none'}"


def is_needed(name: str) -> bool:
    """Whether a judge that sees a field cannot decide without it: an output or an expected value."""
    return name.startswith("output") or name.partition(".")[0] == "expected"


def output_of(prediction: Mapping[str, Any]) -> Any:
    """The judged part of a prediction: its only field, otherwise all fields by name, without `RUN_FIELDS`.

    Of a turn of a conversation it is the reply.
    """
    if isinstance(prediction, TurnFields):
        return prediction["output"]
    return one_of({k: v for k, v in prediction.items() if k not in RUN_FIELDS})


def one_of(fields: Any) -> Any:
    """The value of the only non-empty field, otherwise all fields by name; an empty string if all are empty."""
    values = {key: value for key, value in dict(fields).items() if value not in (None, "")}
    return next(iter(values.values())) if len(values) == 1 else values or ""
