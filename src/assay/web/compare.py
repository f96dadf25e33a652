"""The page that compares the evaluations of two runs, task by task."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assay.errors import ConfigError
from assay.reports.compiled import evaluation_labels
from assay.reports.sides import sides_of
from assay.traces.store import Store
from assay.traces.store.evaluations import Evaluated, evaluations_of, is_training
from assay.traces.store.listing import find_run, finished_report, list_runs
from assay.web.rendering import View, filled_in, link
from assay.web.runs import notes_of

_ROWS = 150
_FIELDS = ("a", "b", "of_a", "of_b", "order")
_OFFERED = 100  # newest runs that the form offers
_DECIDING = ("gate", "evaluate", "test")  # phases whose evaluations a report shows, the most important last


def compare_view(store: Store, query: Mapping[str, str], *, where: str | Path | None = None) -> View:
    """Two evaluations by task: the paired difference, and each task that both have, the worst change first.

    Args:
        where: the store's location, next to which the folders of runs are.
    """
    values = filled_in(query, _FIELDS)
    runs = [find_run(store, values[name]) if name in values else None for name in ("a", "b")]
    sides = [_side(store, run, values.get(f"of_{name}"), where) for run, name in zip(runs, "ab", strict=True)]
    content: dict[str, Any] = {
        "filters": values, "offered": list_runs(store, limit=_OFFERED), "sides": sides, "order": "", "compared": None,
    }  # fmt: skip
    if sides[0] and sides[1]:
        first, second = _chosen(sides, values)
        sides[0]["chosen"], sides[1]["chosen"] = first.name, second.name
        better_first = values.get("order") == "better"
        ids = (sides[0]["run"]["id"], sides[1]["run"]["id"])
        content["compared"] = sides_of(store, ids, first, second, rows=_ROWS, better_first=better_first)
        address = {name: values[name] for name in _FIELDS if name in values and name != "order"}
        content["order"] = link("compare", **address, order="" if values.get("order") == "better" else "better")
    return View(template="compare.html", title="Compare", values=content)


def _side(
    store: Store, run: dict[str, Any] | None, name: str | None, where: str | Path | None
) -> dict[str, Any] | None:
    """A run with its evaluations, as the form and the comparison need them.

    Args:
        name: the evaluation that was chosen. The form also sends that of the run that was named before: it is left out.
    """
    if run is None:
        return None
    evaluations = {evaluated.name: evaluated for evaluated in evaluations_of(store, run["id"])}
    if not evaluations:
        raise ConfigError(f"the run {run['id']} has no rollouts of tasks: there is nothing to compare")
    report = finished_report(where, run["id"]) or {}
    labels = evaluation_labels(list(evaluations.values()), report)
    model, adapters = str(run["model"] or ""), list[str]()
    if model.startswith("embedded/"):  # other names may have a plus of their own
        model, *adapters = model.split("+")
    return {
        "run": run, "evaluations": evaluations, "labels": labels, "chosen": name if name in evaluations else None,
        "model": model, "adapters": adapters, "notes": notes_of(run, report),
    }  # fmt: skip


def _chosen(sides: list[Any], values: Mapping[str, str]) -> tuple[Evaluated, Evaluated]:
    """The evaluations to compare: those named, otherwise the last ones that decide most and share scored tasks."""
    options = [
        [side["evaluations"][side["chosen"]]] if side["chosen"] else list(side["evaluations"].values())
        for side in sides
    ]
    pairs = list(itertools.product(*options))
    if sides[0]["run"]["id"] == sides[1]["run"]["id"]:  # one run: from an earlier version to a later one
        names = list(sides[0]["evaluations"])
        later = [(a, b) for a, b in pairs if names.index(a.name) < names.index(b.name)]
        pairs = later if later and not (sides[0]["chosen"] and sides[1]["chosen"]) else pairs

    def rank(item: tuple[int, tuple[Evaluated, Evaluated]]) -> tuple[bool, int, bool, int]:
        at, (first, second) = item
        decides = sum(_DECIDING.index(side.phase) if side.phase in _DECIDING else -1 for side in (first, second))
        trained = is_training(first, second)  # the first such pair is that of the program that was trained, greedily
        return not first.scores.keys().isdisjoint(second.scores), decides, trained, -at if trained else at

    return max(enumerate(pairs), key=rank)[1]
