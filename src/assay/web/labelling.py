"""Labelling in the browser: the next item for a rater, and storing an answer. Calls no model."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import sqlalchemy as sa

from assay.errors import ConfigError, StoreError
from assay.judges.questions import Question, ToLabel, items_to_label
from assay.reports.judges import label_rows
from assay.reports.texts import Budget, plain, readable
from assay.traces.records import NOT_AGENTS, Rollout
from assay.traces.store import Store, tables as schema
from assay.traces.store.listing import list_runs
from assay.traces.store.paging import newest_rollouts
from assay.traces.store.rows import rollout_of
from assay.web.judges import found_question
from assay.web.rendering import View, filled_in, link

_WINDOW = 1_000  # newest rollouts, of the store or of a run, among which items are chosen
_SEARCHED, _JUDGED_RUNS = 200, 10  # newest runs among which those of a judge are found, and how many of them are read
_ENOUGH = 100  # rollouts to label, above which those of earlier runs are not read
_FIELDS = ("rater", "run", "item", "skip")
_MOST_SKIPPED = 40  # that an address holds
_RATER, _REASON = 200, 2_000  # characters
_LISTED, _PREVIEW = 30, 120  # own labels that are listed, and characters of each output


def label_view(store: Store, key: str, query: Mapping[str, str]) -> View:
    """The next item that the rater has not labelled; first those that other raters have, so that agreement is known.

    The labels of others are not shown. Items are those that have a label and those of the newest rollouts, without the
    sealed test split, and without other programs than those that the judge judged unless a run is named.

    Raises:
        StoreError: there is no such judge.
    """
    question, values = found_question(store, key), filled_in(query, _FIELDS)
    rater, skipped = values.get("rater", "")[:_RATER], tuple(values.get("skip", "").split(".")[-_MOST_SKIPPED:])
    content: dict[str, Any] = {"question": question, "rater": rater, "run": values.get("run", ""), "item": None}
    if rater:
        rows = label_rows(store, question)
        own = {row["item_id"]: row for row in rows if row["rater"] == rater}
        waiting = _waiting(store, question, rows, set(own), values.get("run"))
        named = values.get("item")
        entry = _named(store, question, named, waiting) if named else _next(waiting, skipped)
        address = {"rater": rater, "run": values.get("run")}
        previous = next((row["item_id"] for row in reversed(rows) if row["rater"] == rater), None)
        content |= {
            "done": len(own), "last": previous or "", "waiting": len(waiting), "skipped": ".".join(skipped),
            "before": "",
            "mine": [
                (link("judges", key, "label", **address, item=row["item_id"]), row["label"], _output_of(row))
                for row in reversed(list(own.values())[-_LISTED:])
            ],
            "previous": (
                link("judges", key, "label", **address, item=previous, skip=".".join(skipped) or None)
                if previous and previous != named else ""
            ),
            "go_on": link("judges", key, "label", **address), **_form(question, entry, own, skipped, address),
        }  # fmt: skip
    return View(template="label.html", title=f"Label: {question.spec.text[:60]}", values=content)


def _output_of(row: Mapping[str, Any]) -> str:
    """The beginning of a labelled output in one line; of a pair both."""
    outputs = (value for name, value in row.items() if name.startswith("output"))
    return readable(" | ".join(" ".join(plain(value).split())[:_PREVIEW] for value in outputs))


def _form(
    question: Question, entry: ToLabel | None, own: Mapping[str, Mapping[str, Any]], skipped: tuple[str, ...],
    address: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """What the form shows of an item; `item` is None if there is none."""
    if entry is None:
        return {"item": None}
    budget, before = Budget(60_000, most=20_000, least=2_000), own.get(entry.item_id, {})
    skip = ".".join((*(name for name in skipped if name), entry.item_id)[-_MOST_SKIPPED:])
    names = {"task_input": "Task", "output": "Output", "output_a": "First output (A)", "output_b": "Second output (B)"}
    fields = [(names.get(name, name), budget.clip(plain(value))) for name, value in entry.fields.items()]
    outputs = {name for key, name in names.items() if key.startswith("output_")}
    return {
        "item": entry,
        "context": [pair for pair in fields if pair[0] not in outputs],
        "outputs": [pair for pair in fields if pair[0] in outputs],
        "keys": _keys(question),
        "before": before.get("label", ""),
        "reason": before.get("rationale", ""),
        "skip": link("judges", question.key, "label", **address, skip=skip),
    }


def _keys(question: Question) -> list[tuple[str, str, str]]:
    """Labels with the key that chooses them, and their meaning: the label itself if all are one digit, else 1, 2, …"""
    scale = question.spec.scale
    digits = all(len(label) == 1 and label.isdigit() for label in scale)
    return [
        (label, label if digits else str(at) if at < 10 else "", question.spec.anchors.get(label, ""))
        for at, label in enumerate(scale, 1)
    ]


def _waiting(
    store: Store, question: Question, rows: list[dict[str, Any]], own: set[str], run_id: str | None
) -> list[ToLabel]:
    """Items without a label of this rater: those that most others have labelled, then by a hash of their content."""
    others = Counter(row["item_id"] for row in rows if row["item_id"] not in own)
    entries = {entry.item_id: entry for entry in _labelled(store, question, run_id)} if others else {}
    newest = newest_rollouts(store, run_id=run_id, limit=_WINDOW)
    for entry in items_to_label(newest if run_id else _of_judged_programs(store, newest, question), question):
        entries[entry.item_id] = entry
    waiting = [entry for entry in entries.values() if entry.item_id not in own]
    return sorted(waiting, key=lambda entry: (-others[entry.item_id], entry.item_id))


def _of_judged_programs(store: Store, rollouts: Sequence[Rollout], question: Question) -> Sequence[Rollout]:
    """The rollouts of programs that a judge with this question judged, and if these are few, of the runs in which it
    did; all rollouts if it judged none."""
    table, programs, runs = schema.rollouts, set[str](), _judged_runs(store, question)
    with store.engine.connect() as connection:
        for run_id in runs:
            query = sa.select(table.c.program).where(table.c.run_id == run_id, table.c.source.not_in(NOT_AGENTS))
            programs.update(connection.execute(query.limit(1)).scalars())
    kept = [one for one in rollouts if one.program in programs and one.source not in NOT_AGENTS]
    if programs and len(kept) < _ENOUGH:
        of_runs = (newest_rollouts(store, run_id=run_id, limit=_ENOUGH) for run_id in runs)
        kept += itertools.chain.from_iterable(of_runs)
    return kept if programs else rollouts


def _judged_runs(store: Store, question: Question) -> list[str]:
    """The newest runs in which a judge with this question judged: its own, and those with a rubric that has it."""
    rubrics = {source.rpartition(":")[0] for source in question.sources} - {""}
    runs = (
        run["id"]
        for run in list_runs(store, limit=_SEARCHED)
        if run["id"] in question.runs or run["config"].get("rubric") in rubrics
    )
    return list(itertools.islice(runs, _JUDGED_RUNS))


def _labelled(store: Store, question: Question, run_id: str | None) -> list[ToLabel]:
    """Items with a label of any rater, however old; of the rollouts of a run, if it is named. None is sealed."""
    labels, rollouts = schema.labels, schema.rollouts
    query = (
        sa.select(labels.c.item_id, labels.c.shown_json, labels.c.rollout_id)
        .join_from(labels, rollouts, labels.c.rollout_id == rollouts.c.id, isouter=True)
        .where(labels.c.question == question.key, sa.or_(rollouts.c.split.is_(None), rollouts.c.split != "test"))
    )
    if run_id is not None:
        query = query.where(rollouts.c.run_id == run_id)
    with store.engine.connect() as connection:
        rows = connection.execute(query).all()
    return [ToLabel(row.item_id, orjson.loads(row.shown_json), row.rollout_id) for row in rows]


def _next(waiting: list[ToLabel], skipped: tuple[str, ...]) -> ToLabel | None:
    return next((entry for entry in waiting if entry.item_id not in skipped), None)


def _named(store: Store, question: Question, item_id: str, waiting: list[ToLabel]) -> ToLabel | None:
    """An item by its id: one that is waiting, or one that was labelled before.

    Raises:
        StoreError: there is none.
    """
    table = schema.labels
    query = sa.select(table.c.rollout_id, table.c.shown_json).where(
        table.c.question == question.key, table.c.item_id == item_id
    )
    with store.engine.connect() as connection:
        row = connection.execute(query.limit(1)).first()
    if row is not None:
        return ToLabel(item_id, orjson.loads(row.shown_json), row.rollout_id)
    for entry in waiting:
        if entry.item_id == item_id:
            return entry
    raise StoreError(f"there is no item {item_id[:80]!r} to label")


def store_label(store: Store, key: str, form: Mapping[str, Any]) -> str:
    """Stores a rater's answer. Returns the address of the next item.

    The content is read from the store again: a form cannot put a label on other content.

    Args:
        form: `rater`, `item`, `rollout`, `other`, `label`, `rationale`, `run`.
    Raises:
        ConfigError: the label is not on the scale, a field is missing, or the item has changed.
        StoreError: there is no such judge.
    """
    question = found_question(store, key)
    texts = {name: str(value).replace("\0", "").strip() for name, value in form.items()}
    rater, label, item_id = (texts.get(name, "") for name in ("rater", "label", "item"))
    if not rater or len(rater) > _RATER:
        raise ConfigError(f"a label needs the name of its rater, of at most {_RATER} characters")
    if label not in question.spec.scale:
        raise ConfigError(f"the label {label[:80]!r} is not on the scale {', '.join(question.spec.scale)}")
    entry = _checked(store, question, item_id, texts)
    store.put_label(
        question.key, entry.item_id, rater, label, fields=entry.fields, rationale=texts.get("rationale", "")[:_REASON],
        rollout_id=entry.rollout_id,
    )  # fmt: skip
    return link("judges", key, "label", rater=rater, run=texts.get("run"), skip=texts.get("skip"))


def withdraw_label(store: Store, key: str, form: Mapping[str, Any]) -> str:
    """Removes a rater's own label of an item. Returns the address of the item, which is to be labelled again.

    Args:
        form: `rater`, `item`, `run`, `skip`.
    Raises:
        ConfigError: the rater has no label of this item.
        StoreError: there is no such judge.
    """
    question = found_question(store, key)
    texts = {name: str(value).replace("\0", "").strip() for name, value in form.items()}
    rater, item_id, run_id = (texts.get(name, "") for name in ("rater", "item", "run"))
    if not store.withdraw_label(question.key, item_id, rater):
        raise ConfigError(f"{rater[:80]!r} has no label of the item {item_id[:80]!r} to withdraw")
    rows = label_rows(store, question)
    own = {row["item_id"] for row in rows if row["rater"] == rater}
    waiting = _waiting(store, question, rows, own, run_id or None)
    is_offered = any(entry.item_id == item_id for entry in waiting)  # not if its rollout is too old
    return link(
        "judges", key, "label", rater=rater, run=run_id, skip=texts.get("skip"), item=item_id if is_offered else None
    )


def _checked(store: Store, question: Question, item_id: str, texts: Mapping[str, str]) -> ToLabel:
    """The item that a form names, made again from its rollouts or from an earlier label."""
    table = schema.rollouts
    ids = [texts[name] for name in ("rollout", "other") if texts.get(name)]
    with store.engine.connect() as connection:
        rows = connection.execute(sa.select(table).where(table.c.id.in_(ids))).mappings().all()
    for entry in items_to_label([rollout_of(row) for row in rows], question):
        if entry.item_id == item_id:
            return entry
    known = _known(store, question, item_id)
    if known is None:
        raise ConfigError("the output was changed or erased since this page was loaded: reload it")
    return known


def _known(store: Store, question: Question, item_id: str) -> ToLabel | None:
    try:
        return _named(store, question, item_id, [])
    except StoreError:
        return None
