"""The pages of rollouts: the list, one rollout as a conversation, and the JSON of one call."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
import sqlalchemy as sa

from assay.commands.repeat import rollout_command
from assay.errors import ConfigError, UnknownRollout
from assay.reports.compiled import evaluation_labels
from assay.reports.texts import Budget, Clipped, pretty
from assay.reports.training import read_training_log
from assay.sources.artifact_files import is_artifact
from assay.traces.dataset_files import DatasetFile, add_task, dataset_names, why_not_added
from assay.traces.messages.chaining import requests_of
from assay.traces.messages.dialects import Message, answer_of, chat_messages
from assay.traces.records import NOT_AGENTS, Rollout, ToolCall, Transition, store_rating, why_not_rated
from assay.traces.store import Store, tables as schema
from assay.traces.store.evaluations import Evaluated, evaluations_of_task, is_training
from assay.traces.store.listing import finished_report, run_folder
from assay.traces.store.location import home_of
from assay.traces.store.paging import Cursor, RolloutFilters, RolloutPage, calls_from, rollout_page
from assay.traces.store.rows import rollout_of
from assay.web.rendering import (
    DOWNLOADS,
    FAILURES,
    MOST_DOWNLOADED,
    SPLITS,
    STATUSES,
    View,
    cursor_of,
    link,
    number_of,
    rollout_filters,
)  # fmt: skip
from assay.web.runs import RUNNING_S

# -- One rollout as a conversation: what each call added, and what came back. Reads records, not the database.


_UNFOLDED = 5  # messages that one call shows at once


@dataclass(frozen=True, kw_only=True)
class PageMessage:
    """A message of a request. `calls` are names and arguments of the tools that it asks for."""

    role: str
    text: Clipped
    calls: list[tuple[str, Clipped]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """A tool call with its result or error; None for both while it runs."""

    name: str
    arguments: Clipped
    result: Clipped | None
    error: Clipped | None
    isolation: str | None


@dataclass(frozen=True, kw_only=True)
class Turn:
    """An LM call.

    Attributes:
        earlier: number of messages of the request that the call before had too; they are not in `messages`.
        folded: the messages between the first and the `last` of many, such as demonstrations.
        refusal: whether the answer is a refusal.
    """

    call: Transition
    earlier: int
    messages: list[PageMessage]
    folded: list[PageMessage]
    last: list[PageMessage]
    reasoning: Clipped | None
    output: Clipped | None
    error: Clipped | None
    refusal: bool
    tools: list[ToolUse]


def turns_of(calls: Sequence[Transition], before: Transition | None, budget: Budget) -> list[Turn]:
    """The calls as turns. Messages that the call before had too are counted, not repeated."""
    earlier = [] if before is None else [before]
    conversations = [
        chat_messages(request or call.request)
        for call, request in zip([*earlier, *calls], requests_of([*earlier, *calls]), strict=True)
    ]
    turns, known = [], conversations.pop(0) if before is not None else []
    for call, messages in zip(calls, conversations, strict=True):
        shared = _shared(known, messages)
        turns.append(_turn(call, messages[shared:], shared, budget))
        known = messages
    return turns


def tools_of(tools: Sequence[ToolCall], budget: Budget) -> list[ToolUse]:
    """Tool calls with clipped texts."""
    return [
        ToolUse(
            name=tool.name,
            arguments=budget.clip(pretty(tool.arguments)),
            result=None if tool.result is None else budget.clip(tool.result),
            error=None if tool.error is None else budget.clip(tool.error),
            isolation=tool.isolation,
        )
        for tool in tools
    ]


def _turn(call: Transition, messages: Sequence[Message], earlier: int, budget: Budget) -> Turn:
    response = call.response or {}
    body = response.get("body", response)
    answer = answer_of(call.request.get("dialect"), body if isinstance(body, dict) else {})
    turns = list(_clipped(messages, budget))
    folds = len(turns) > _UNFOLDED
    return Turn(
        call=call,
        earlier=earlier,
        messages=turns[:1] if folds else turns,
        folded=turns[1:-1] if folds else [],
        last=turns[-1:] if folds else [],
        reasoning=budget.clip(answer.reasoning) if answer.reasoning else None,
        output=budget.clip(call.output) if call.output else None,
        error=budget.clip(call.error) if call.error else None,
        refusal=bool(answer.refusal),
        tools=tools_of(call.tools, budget),
    )


def _shared(before: Sequence[Message], messages: Sequence[Message]) -> int:
    """Number of messages at the beginning that both have. One is left: a turn shows at least its last message."""
    count = 0
    for old, new in zip(before, messages, strict=False):
        if old != new:
            break
        count += 1
    return min(count, max(0, len(messages) - 1))


def _clipped(messages: Sequence[Message], budget: Budget) -> Iterator[PageMessage]:
    for message in messages:
        content = message.get("content")
        calls: list[Any] = [call.get("function") or {} for call in message.get("tool_calls") or ()]
        yield PageMessage(
            role=str(message.get("role") or "user"),
            text=budget.clip("" if content is None else pretty(content)),
            calls=[(str(call.get("name") or ""), budget.clip(pretty(call.get("arguments") or ""))) for call in calls],
        )


# -- The calls of judges about a rollout, and the rollout that a judge's call is about.
#
# A judge's call is a rollout of its own, of the same run and task. The store has no link between them: calls are told
# apart by the output that was judged.


_MOST = 2_000  # rollouts of a task that are read


@dataclass(frozen=True, kw_only=True)
class JudgeCall:
    """A judge's call about a rollout; `verdict` is empty if it gave none."""

    rollout_id: str
    question: str
    verdict: str
    confidence: float | None


def judge_calls(store: Store, rollout: Rollout) -> list[JudgeCall]:
    """The calls of judges about the output of a rollout: of each question the first one after the rollout began."""
    if rollout.source in NOT_AGENTS or not rollout.verdicts or not rollout.prediction:
        return []
    table = schema.rollouts
    columns = (table.c.id, table.c.program, table.c.inputs_json, table.c.prediction_json, table.c.started_at)
    of_task = sa.and_(table.c.task_id == rollout.task_id, table.c.group_id == rollout.task_id)
    found: dict[str, JudgeCall] = {}
    for row in sorted(_rows(store, columns, of_task, rollout.run_id), key=lambda row: row.started_at):
        if row.source != "judge" or row.started_at < rollout.started_at or row.program in found:
            continue
        if _is_about(orjson.loads(row.inputs_json), rollout.prediction):
            said = orjson.loads(row.prediction_json or "null") or {}
            found[row.program] = JudgeCall(
                rollout_id=row.id, question=row.program, verdict=str(said.get("verdict") or ""),
                confidence=said.get("confidence"),
            )  # fmt: skip
    return list(found.values())


def judged_rollout(store: Store, call: Rollout) -> str:
    """The id of the rollout that a judge's call is about: the last one before it with this output; else empty."""
    if call.source != "judge" or not call.task_id:
        return ""
    table = schema.rollouts
    columns = (table.c.id, table.c.prediction_json, table.c.started_at)
    rows = _rows(store, columns, table.c.task_id == call.task_id, call.run_id)
    for row in sorted(rows, key=lambda row: -row.started_at):
        is_before = row.source not in NOT_AGENTS and row.started_at <= call.started_at
        if is_before and _is_about(call.inputs, orjson.loads(row.prediction_json or "{}") or {}):
            return str(row.id)
    return ""


def _rows(store: Store, columns: tuple[Any, ...], of_task: Any, run_id: str) -> list[Any]:
    """Rollouts of a task in one run, found by the index of tasks, of which at most `_MOST` are read."""
    table = schema.rollouts
    some = sa.select(table.c.id, table.c.run_id).where(of_task).limit(_MOST).subquery("found")
    query = sa.select(*columns, table.c.source).join_from(some, table, some.c.id == table.c.id)
    with store.engine.connect() as connection:
        return list(connection.execute(query.where(table.c.run_id == run_id)))


def _is_about(shown: Mapping[str, Any], prediction: Mapping[str, Any]) -> bool:
    """Whether a judge that was shown these fields judged this prediction."""
    from assay.judges.questions import output_of

    outputs = {name: value for name, value in shown.items() if name.startswith("output")}
    if outputs:
        return any(
            value == (prediction.get(field) if dot else output_of(prediction))
            for (_, dot, field), value in ((name.partition("."), value) for name, value in outputs.items())
        )
    return any(shown.get(name) == value for name, value in prediction.items())


# -- Rollouts of the same task by other versions: those of the same run, and the other side of a comparison.


_MOST_SIDES = 8


@dataclass(frozen=True, kw_only=True)
class OtherSide:
    """A rollout of the same task: of what version, with its score and address."""

    rollout_id: str
    name: str
    score: float | None
    address: str


def other_sides(
    store: Store, rollout: Rollout, query: Mapping[str, str], filters: Mapping[str, str]
) -> list[OtherSide]:
    """Rollouts of the task of a rollout, at most `_MOST_SIDES`: first that of the comparison from which it was
    opened, then
    the last ones of the other versions that its run evaluated in the same phase on the same split: those of the other
    side of its training, of a winner and of a baseline before others.

    Args:
        query: of the address; `other` is the id of the rollout on the other side of a comparison.
        filters: of the list of rollouts, which the addresses keep.
    """
    if not rollout.task_id or rollout.source in NOT_AGENTS:
        return []
    sides: dict[str, tuple[str, float | None]] = {}
    evaluations = evaluations_of_task(
        store, rollout.run_id, rollout.task_id, phase=rollout.phase, split=rollout.split
    )  # fmt: skip
    own = next((one for one in evaluations if rollout.id in _rollouts(one)), None)
    if own is not None and len(evaluations) > 1:
        labels = evaluation_labels(evaluations, finished_report(store, rollout.run_id) or {})
        others = [one for one in evaluations if one is not own]
        # of a training the other side is sampled in the same way
        for one in sorted(others, key=lambda other: not (is_training(own, other) or is_training(other, own))):
            task = one.tasks[rollout.task_id]
            sides[task.rollouts[-1]] = (_short(labels[one.name], one), task.score)
    sides = dict(sorted(sides.items(), key=lambda side: not side[1][0].startswith(("winner", "baseline"))))
    compared = _compared(store, rollout, query.get("other", ""))
    if compared is not None:
        other, score = compared
        sides = {other: sides.get(other, ("the other side of the comparison", score)), **sides}
    back = {**filters, "other": rollout.id}
    return [
        OtherSide(rollout_id=other, name=name, score=score, address=link("rollouts", other, **back))
        for other, (name, score) in list(sides.items())[:_MOST_SIDES]
    ]


def _rollouts(evaluated: Evaluated) -> list[str]:
    return [rollout for task in evaluated.tasks.values() for rollout in task.rollouts]


def _short(label: str, evaluated: Evaluated) -> str:
    """The name of an evaluation without its phase and split, which are those of the rollout."""
    for part in (evaluated.phase, evaluated.split):
        label = label.removeprefix(f"{part} · ")
    return f"version {label[:10]}" if label == evaluated.version else label


def _compared(store: Store, rollout: Rollout, other: str) -> tuple[str, float | None] | None:
    """Id and score of the other rollout, if it is one of the same task."""
    table = schema.rollouts
    columns = (table.c.id, table.c.task_id, table.c.score, table.c.source)
    with store.engine.connect() as connection:
        row = connection.execute(sa.select(*columns).where(table.c.id == other)).first() if other else None
    if row is None or row.id == rollout.id or row.task_id != rollout.task_id or row.source in NOT_AGENTS:
        return None
    return str(row.id), row.score


# -- Adding rollouts of the page to datasets, files of tasks next to the store.


_FIRST_NAME = "picked"


def _folder(where: str | Path | None) -> Path:
    """The folder of datasets next to a store."""
    return home_of(where) / "datasets"


def dataset_values(
    store: Store, rollout: Rollout, where: str | Path | None, added: DatasetFile | None = None
) -> dict[str, Any]:
    """What the form for adding a rollout to a dataset shows."""
    names = dataset_names(_folder(where))
    reason = why_not_added(store, rollout)
    return {
        "why_not_added": reason, "datasets": names, "dataset": names[0] if names else _FIRST_NAME, "added": added,
        "has_answer": bool(rollout.prediction),
    }  # fmt: skip


def add_to_dataset(store: Store, rollout: Rollout, form: Mapping[str, Any], *, where: str | Path | None) -> DatasetFile:
    """Adds the rollout's task to the dataset that the form names.

    Raises:
        ConfigError, DataError: as `add_task`.
    """
    name, expected = str(form.get("dataset", "")).strip(), form.get("expected") == "answer"
    return add_task(store, rollout, _folder(where), name, answer_is_expected=expected)


# -- Rollouts.


_WAITING_S = 20  # seconds between two loads of the newest rollouts while no run is in progress


def rollouts_view(store: Store, query: Mapping[str, str]) -> View:
    """Rollouts that match the filters, newest first."""
    values, filters = rollout_filters(store, query)
    before, after = cursor_of(query, "before"), cursor_of(query, "after")
    page = rollout_page(store, filters, before=before, after=after)
    older, newer = _neighbour_pages(page, is_newer=after is not None, is_first=before is None and after is None)
    first = before is None and after is None
    return View(
        template="rollouts.html",
        title="Rollouts",
        values={
            "rollouts": page.rows, "filters": values, "splits": SPLITS, "statuses": STATUSES, "failures": FAILURES,
            "older": link("rollouts", **values, before=older) if older else "",
            "newer": link("rollouts", **values, after=newer) if newer else "",
            "newest": "" if first else link("rollouts", **values), "searched": page.searched,
            "downloads": DOWNLOADS, "most": MOST_DOWNLOADED,
        },
        part="rollouts_part.html",
        every_s=0 if not first else RUNNING_S if _runs_are_going_on(store) else _WAITING_S,
    )  # fmt: skip


def _neighbour_pages(page: RolloutPage, *, is_newer: bool, is_first: bool) -> tuple[Cursor | None, Cursor | None]:
    """Places of the pages with older and with newer rollouts; None if there is none."""
    onwards = page.rows[0 if is_newer else -1].cursor if page.more else page.searched
    back = page.rows[-1 if is_newer else 0].cursor if page.rows and not is_first else None
    return (back, onwards) if is_newer else (onwards, back)


def _runs_are_going_on(store: Store) -> bool:
    with store.engine.connect() as connection:
        query = sa.select(schema.runs.c.id).where(schema.runs.c.status == "running").limit(1)
        return connection.execute(query).first() is not None


def one_rollout(store: Store, rollout_id: str) -> Rollout:
    """A rollout without its transitions.

    Raises:
        UnknownRollout: no rollout has this id.
    """
    table = schema.rollouts
    with store.engine.connect() as connection:
        row = connection.execute(sa.select(table).where(table.c.id == rollout_id)).mappings().first()
    if row is None:
        raise UnknownRollout(f"there is no rollout {rollout_id[:80]!r}")
    return rollout_of(row)


def rollout_view(
    store: Store, rollout_id: str, query: Mapping[str, str], *, where: str | Path | None, store_flag: str | None
) -> View:
    """One rollout: its task, calls, verdicts, rating, and the rollouts around it in the filtered list.

    Args:
        where: the store's location, next to which datasets are.
    """
    rollout = one_rollout(store, rollout_id)
    values, filters = rollout_filters(store, query)
    first = _first_call(query)
    calls, budget = calls_from(store, rollout.id, first), Budget()
    return View(
        template="rollout.html",
        title=f"Rollout {rollout.id[:16]}",
        values={
            "rollout": rollout,
            "filters": values,
            "inputs": [(name, budget.clip(pretty(value))) for name, value in rollout.inputs.items()],
            "expected": [(name, budget.clip(pretty(value))) for name, value in rollout.expected.items()],
            "early_tools": tools_of(rollout.early_tools, budget),
            "turns": turns_of(calls.rows, calls.before, budget),
            "calls": calls,
            "prediction": [(name, budget.clip(pretty(value))) for name, value in (rollout.prediction or {}).items()],
            "error": budget.clip(rollout.error) if rollout.error else None,
            "verdicts": [(verdict, budget.clip(verdict.reason)) for verdict in rollout.verdicts],
            "earlier_calls": link("rollouts", rollout.id, **values, call=max(0, first - 20) or None) if first else "",
            "later_calls": link("rollouts", rollout.id, **values, call=calls.rows[-1].t + 1) if calls.more else "",
            "list": link("rollouts", **values),
            "run_link": _run_link(store, rollout),
            "advantages": _advantages(rollout, where),
            "judge_calls": judge_calls(store, rollout),
            "judged": judged_rollout(store, rollout),
            "other_sides": other_sides(store, rollout, query, values),
            **_around(store, rollout, values, filters),
            **rating_values(rollout),
            **dataset_values(store, rollout, where),
            "commands": list(_commands(store, rollout, store_flag)),
        },
        part="rollout_part.html",
        every_s=RUNNING_S if rollout.status == "running" else 0,
    )


def _advantages(rollout: Rollout, where: str | Path | None) -> list[float]:
    """Of each call, if the rollout is a sample of a training; the log has those of samples alone."""
    log = read_training_log(run_folder(where, rollout.run_id)) if rollout.phase == "train" else None
    samples = [] if log is None else log.samples.values()
    return next((list(advantages) for rollout_id, advantages in samples if rollout_id == rollout.id), [])


def rating_values(rollout: Rollout) -> dict[str, Any]:
    """What the form for a rating shows."""
    return {"why_not_rated": why_not_rated(rollout), "keys": [(key, round(key / 9, 4)) for key in range(10)]}


def _first_call(query: Mapping[str, str]) -> int:
    text = query.get("call", "0")
    if not (text.isascii() and text.isdigit() and len(text) < 9):
        raise ConfigError(f"call={text[:80]!r} must be the number of a call, from 0")
    return int(text)


def _around(store: Store, rollout: Rollout, values: Mapping[str, str], filters: RolloutFilters) -> dict[str, str]:
    """Addresses of the rollout before (newer) and after (older) this one in the filtered list; empty at its ends."""
    here = Cursor(rollout.started_at, rollout.id)
    if rollout.source in NOT_AGENTS and "source" not in filters.equal:  # its own list leaves it out
        filters = replace(filters, equal={**filters.equal, "source": rollout.source})
    newer = rollout_page(store, filters, after=here, limit=1)
    older = rollout_page(store, filters, before=here, limit=1)
    return {
        name: link("rollouts", page.rows[-1 if name == "newer" else 0].id, **values) if page.rows else ""
        for name, page in (("newer", newer), ("older", older))
    }


def _run_link(store: Store, rollout: Rollout) -> str:
    """The page of the rollout's run; its rollouts if the store has no row of the run."""
    with store.engine.connect() as connection:
        query = sa.select(schema.runs.c.id).where(schema.runs.c.id == rollout.run_id)
        known = connection.execute(query).first() is not None
    return link("runs", rollout.run_id) if known else link("rollouts", run=rollout.run_id)


def _commands(store: Store, rollout: Rollout, store_flag: str | None) -> Iterator[tuple[str, str]]:
    if rollout.source == "program":
        words, program, endpoint = _repeated(store, rollout)
        again = rollout_command(program, rollout.inputs, rollout.model, store=store_flag, **endpoint)
        if again is not None:
            yield words, again
    store_option = "" if store_flag is None else f" --store {shlex.quote(store_flag)}"
    yield "Show it in a terminal", f"assay traces show {rollout.id}{store_option}"
    if why_not_rated(rollout) is None:
        yield "Rate it in a terminal", f"assay traces rate {rollout.id} 0.8{store_option}"


def _repeated(store: Store, rollout: Rollout) -> tuple[str, str, dict[str, str]]:
    """Which program repeats a rollout: words that say so, its name, and the address and key of its model."""
    config = _config(store, rollout.run_id)
    is_own = config.get("model") in (None, rollout.model)
    endpoint = {name: config[name] for name in ("api_base", "api_key_env") if is_own and config.get(name)}
    words, given = "Run the program on this task again", config.get("program")
    report = {} if config.get("kind") != "compile" else finished_report(store, rollout.run_id) or {}
    versions = {one.get("name"): one.get("version") for one in report.get("candidates") or ()}
    if report.get("artifact") and rollout.program_version == versions.get(report.get("winner")):
        return "Run the compiled program on this task again", str(report["artifact"]), endpoint
    if versions and rollout.program_version != versions.get("baseline"):
        words = "Run the program on this task, without the prompt of this candidate"
    elif config.get("kind") in ("evaluate", "collect") and isinstance(given, str) and is_artifact(given):
        return words, given, endpoint
    elif rollout.parameters:
        words = "Run the program on this task again, with its own parameters"
    return words, rollout.program, endpoint


def _config(store: Store, run_id: str) -> Mapping[str, Any]:
    """The settings of a run, with its kind; empty if the store has no row of it."""
    table = schema.runs
    with store.engine.connect() as connection:
        row = connection.execute(sa.select(table.c.kind, table.c.config).where(table.c.id == run_id)).first()
    if row is None:
        return {}
    return {**(orjson.loads(row.config) if isinstance(row.config, str | bytes) else row.config), "kind": row.kind}


def rate(store: Store, rollout_id: str, text: str) -> Rollout:
    """Stores a rating. Returns the rollout with it.

    Raises:
        ConfigError: the text is not a number in [0, 1], or the rollout takes no rating.
        UnknownRollout: no rollout has this id.
    """
    rollout = one_rollout(store, rollout_id)
    rating = number_of({"rating": text}, "rating")
    if rating is None:
        raise ConfigError("rating='' must be a number from 0 to 1")
    store_rating(store, rollout, rating)
    rollout.human_rating = rating
    return rollout


def call_json(store: Store, rollout_id: str, t: int) -> str:
    """A transition as indented JSON.

    Raises:
        UnknownRollout: there is no such transition.
    """
    rows = calls_from(store, rollout_id, t, limit=1).rows
    if not rows or rows[0].t != t:
        raise UnknownRollout(f"there is no call {t} of a rollout {rollout_id[:80]!r}")
    return pretty(asdict(rows[0]))


def rollout_json(store: Store, rollout_id: str) -> str:
    """A rollout without its transitions as indented JSON."""
    return pretty(asdict(one_rollout(store, rollout_id)))
