"""The page of a compilation: decision, search history, prompt before and after, scores side by side.

Reads the report, the run's folder, the artifact's files and the store. Loads no program and runs no code.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from assay.errors import AssayError
from assay.reports.charts import Line, lines_chart, share_bar
from assay.reports.markdown import MORE_TASKS, why_sealed
from assay.reports.sides import Decision, Sides, gain_in_words, sides_of, tone_of
from assay.reports.texts import Budget, Change, Clipped, changes_of, pretty
from assay.sources.artifact_files import read_json
from assay.traces.messages.dialects import chat_messages
from assay.traces.shown import demos_in
from assay.traces.store.evaluations import Evaluated, evaluations_of
from assay.traces.store.paging import calls_from
from assay.traces.store.sealing import openings_line
from assay.traces.store.store import StoreReads

_PHASES = ("test", "gate")  # whose evaluations are those of the baseline and the result, the most important first
_LINES = 24  # of the search history
_CANDIDATES, _DEMOS, _CALLS = 60, 20, 4


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """An example in the compiled prompt, and the tasks that it shows."""

    text: Clipped
    tasks: Sequence[str]


@dataclass(kw_only=True)
class CompilePage:
    """The parts of the page; those that nothing is known of are empty."""

    decisions: list[Decision] = field(default_factory=list)
    openings: str = ""
    candidates: list[dict[str, Any]] = field(default_factory=list)  # those of the report, see `_rows`
    more_candidates: int = 0
    history: Markup = field(default_factory=Markup)
    settings: list[tuple[str, str, str]] = field(default_factory=list)
    instructions: list[tuple[str, list[Change]]] = field(default_factory=list)
    prompts: list[tuple[str, list[Change]]] = field(default_factory=list)
    demonstrations: list[Demonstration] = field(default_factory=list)
    demonstrations_of: int = 0  # their number, of which the first are in `demonstrations`
    demonstrations_note: str = ""
    splits: list[str] = field(default_factory=list)
    split: str = ""
    sides: Sides | None = None


def compile_page(
    store: StoreReads, run_id: str, report: Mapping[str, Any], folder: Path, *, split: str = "", rows: int = 100,
    better_first: bool = False,
) -> CompilePage:  # fmt: skip
    """The page of a compile.

    Args:
        report: `CompileReport.to_dict()`; empty while the run is in progress.
        folder: of the run, with the state of its search.
        split: whose tasks are shown side by side; by default test, else gate.
        rows: maximum number of tasks.
    Raises:
        StoreError: the run has too many rollouts for a page.
    """
    candidates = list(report.get("candidates") or _search_state(folder).get("candidates") or [])
    evaluations, artifact = evaluations_of(store, run_id), _artifact(report)
    winner = _winner(candidates, report)
    page = CompilePage(decisions=list(_decisions(report)), openings=_openings(report))
    page.candidates = _rows(candidates, winner)
    page.more_candidates = max(0, len(candidates) - len(page.candidates))
    page.history = _history(evaluations, candidates, winner)
    if winner is not None and winner is not candidates[0]:
        page.settings = list(_settings(candidates[0], winner))
        page.instructions = list(_instructions(candidates[0], winner))
    page.demonstrations, page.demonstrations_of, page.demonstrations_note = _demonstrations(artifact)
    pairs = _pairs(evaluations, candidates, winner)
    page.splits = list(pairs)
    page.split = split if split in pairs else next(iter(pairs), "")
    if page.split:
        before, after = pairs[page.split]
        page.sides = sides_of(
            store, (run_id, run_id), before, after, rows=rows, better_first=better_first,
            level=_level(report, page.split),
        )  # fmt: skip
        page.prompts = list(_prompts(store, before, after))
    return page


def _level(report: Mapping[str, Any], split: str) -> float:
    """Error of the stored interval of a split."""
    gain = (report.get("test") or {}).get("gain") if split == "test" else report.get("gate")
    return float((gain or {}).get("level", 0.05))


def _search_state(folder: Path) -> dict[str, Any]:
    """The state that a search writes into the run's folder; empty without one."""
    try:
        state = json.loads((folder / "search.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _artifact(report: Mapping[str, Any]) -> dict[str, Any]:
    """Program state and manifest of the report's artifact; empty if it cannot be read here."""
    if not report.get("artifact"):
        return {}
    folder = Path(str(report["artifact"]))
    try:
        return {name: read_json(folder / f"{name}.json", folder) for name in ("program", "manifest")}
    except AssayError:
        return {}


def _winner(candidates: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> Mapping[str, Any] | None:
    named = [candidate for candidate in candidates if candidate["name"] == report.get("winner")]
    return named[-1] if named else None  # a fitted one is added at the end


# -- decisions


def _decisions(report: Mapping[str, Any]) -> Iterator[Decision]:
    """Results of gate and test as text."""
    if not report:
        return
    test = report.get("test") or {}
    if report.get("winner") == "baseline":
        yield Decision(split="result", text="The program is unchanged: no candidate was better on val.")
        yield Decision(split="test", text=why_sealed(report))
        return
    gate = report.get("gate")
    if gate is None:
        yield Decision(split="gate", text="The gate was not evaluated, so nothing was decided there.")
    else:
        yield Decision(
            split="gate",
            text=f"{gain_in_words(gate)} "
            + (
                "The compiled program replaces the baseline: the whole interval is above zero."
                if report.get("replaces")
                else f"That is not proof that it is better: the baseline is kept. {MORE_TASKS}"
            ),
            tone="better" if report.get("replaces") else "worse",
        )
    if test.get("gain"):
        before, after, gain = test["baseline"], test["compiled"], test["gain"]
        text = f"{_score(before)} before, {_score(after)} after. {gain_in_words(gain, report['test_openings'])}"
        yield Decision(split="test", text=text, tone=tone_of(gain))
    else:
        yield Decision(split="test", text=why_sealed(report))


def _score(evaluation: Mapping[str, Any]) -> str:
    if evaluation.get("score") is None:
        return "unscored"
    interval = evaluation.get("interval")
    return f"{evaluation['score']:.3f}" + (f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "")


def _openings(report: Mapping[str, Any]) -> str:
    return openings_line(report["test_openings"]) if report.get("test_openings") else ""


# -- the search history


def _rows(candidates: Sequence[Mapping[str, Any]], winner: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The candidates, the baseline and the winner first, then by expected score.

    Each also has `is_winner`, and `share` and `bar` of the tasks of val that all candidates ran.
    """

    def rank(candidate: Mapping[str, Any]) -> tuple[bool, bool, float, int]:
        value = candidate.get("expected")
        value = candidate.get("val_score") if value is None else value
        is_baseline = candidate is candidates[0]
        return candidate is not winner, not is_baseline, -(value if value is not None else -1.0), -(candidate["n"] or 0)

    total = sum(candidate["n"] or 0 for candidate in candidates) or 1
    rows = []
    for candidate in sorted(candidates, key=rank)[:_CANDIDATES]:
        share = (candidate["n"] or 0) / total
        shown = {"n": candidate["n"] or 0, "is_winner": candidate is winner, "share": share, "bar": share_bar(share)}
        rows.append({"val_score": None, "expected": None, "dropped": None, **candidate, **shown})
    return rows


def _history(
    evaluations: Sequence[Evaluated], candidates: Sequence[Mapping[str, Any]], winner: Mapping[str, Any] | None
) -> Markup:
    """Running mean score of each candidate on val, by the run of the search."""
    searched = [one for one in evaluations if one.phase == "search" and one.split == "val" and len(one.runs) > 1]
    places = {place: rank for rank, place in enumerate(sorted(p for one in searched for p, _ in one.runs), 1)}
    lines = []
    for one in searched:
        candidate = next((c for c in candidates if _is(one, c)), None)
        name = str(candidate["name"]) if candidate else one.name
        total, points = 0.0, []
        for count, (place, score) in enumerate(one.runs, 1):
            total += score
            points.append((float(places[place]), total / count))
        is_first = candidate is not None and candidate is candidates[0]
        kind = "second" if candidate is not None and candidate is winner else "first" if is_first else "other"
        lines.append(Line(name=f"{name}: {total / len(points):.3f} on {len(points)}", points=points, kind=kind))
    lines.sort(key=lambda line: (line.kind == "other", -len(line.points)))
    return lines_chart(
        lines[:_LINES], label="Running mean score of the candidates on val", x_name="runs of the search",
        y_name="mean score so far", unit=True,
    )  # fmt: skip


def evaluation_labels(evaluations: Sequence[Evaluated], report: Mapping[str, Any]) -> dict[str, str]:
    """The names of a run's evaluations, with that of the candidate where they are a compile's, by name.

    Args:
        report: of the run; empty if it has none. Candidates of a judge have no version.
    """
    labels = {}
    for one in evaluations:
        candidate = next((c for c in report.get("candidates") or () if "version" in c and _is(one, c)), None)
        is_winner = candidate is not None and candidate["name"] == report.get("winner") != "baseline"
        name = "" if candidate is None else f"{'winner: ' if is_winner else ''}{candidate['name']}"
        labels[one.name] = one.name.replace(one.version, name) if name else one.name
    return labels


def _is(evaluated: Evaluated, candidate: Mapping[str, Any]) -> bool:
    parameters = (candidate.get("settings") or {}).get("parameters") or {}
    return evaluated.version == candidate["version"] and json.loads(evaluated.parameters) == parameters


# -- the prompt


def _settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Prompt format, thinking and parameters that differ: name, before, after."""
    sides = [
        {
            "prompt format": (candidate.get("settings") or {}).get("adapter"),
            "thinking": (candidate.get("settings") or {}).get("thinking"),
            **((candidate.get("settings") or {}).get("parameters") or {}),
        }
        for candidate in (before, after)
    ]
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        first, second = (side.get(name) for side in sides)
        if first != second:
            yield name, *("the program's own" if value is None else str(value) for value in (first, second))


def _instructions(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, list[Change]]]:
    """Changed instructions by predictor."""
    known = before.get("instructions") or {}
    for name, text in (after.get("instructions") or {}).items():
        if changes := changes_of(known.get(name, ""), text):
            yield name, changes


def _demonstrations(artifact: Mapping[str, Any]) -> tuple[list[Demonstration], int, str]:
    """The first examples in the compiled program's state, the number of all, and what is not shown of them."""
    if not artifact:
        return [], 0, ""
    state, page = artifact["program"], artifact["manifest"].get("shown") or {}
    demos, budget = demos_in(state), Budget(12_000, most=800)
    by_demo = page.get("by_demo") or []
    by_demo = by_demo if len(by_demo) == len(demos) else [[]] * len(demos)
    note = ""
    if state.get("kind") == "nearest":
        note = f"Each call shows the {state.get('k')} most similar of {len(demos)} demonstrations. "
    if len(demos) > _DEMOS:
        note += f"The first {_DEMOS} of {len(demos)} are listed."
    listed = [
        Demonstration(text=budget.clip(_demo_text(demo)), tasks=[str(task) for task in tasks[:8]])
        for demo, tasks in zip(demos[:_DEMOS], by_demo, strict=False)
    ]
    return listed, len(demos), note.strip()


def _demo_text(demo: Any) -> str:
    """The fields of a demonstration, one a line; of an entry of a pool those of its steps."""
    if not isinstance(demo, Mapping):
        return pretty(demo)
    if isinstance(demo.get("demos"), Mapping):
        return "\n".join(_demo_text(step) for steps in demo["demos"].values() for step in steps)
    return "\n".join(f"{name}: {pretty(value)}" for name, value in demo.items() if name != "augmented")


def _prompts(store: StoreReads, before: Evaluated, after: Evaluated) -> Iterator[tuple[str, list[Change]]]:
    """The first calls for one task as they were sent, before and after."""
    shared = sorted(before.tasks.keys() & after.tasks.keys())
    if not shared:
        return
    calls = [calls_from(store, side.tasks[shared[0]].rollouts[-1], 0, limit=_CALLS).rows for side in (before, after)]
    for number in range(max(map(len, calls))):
        texts = [_sent(side[number].request) if number < len(side) else "" for side in calls]
        if changes := changes_of(*texts):
            yield f"Call {number + 1}", changes


def _sent(request: Mapping[str, Any]) -> str:
    return "\n\n".join(
        f"[{message.get('role') or 'user'}]\n{pretty(message.get('content') or '')}"
        for message in chat_messages(dict(request))
    )


# -- before and after


def _pairs(
    evaluations: Sequence[Evaluated], candidates: Sequence[Mapping[str, Any]], winner: Mapping[str, Any] | None
) -> dict[str, tuple[Evaluated, Evaluated]]:
    """The evaluations of baseline and result by split, as far as there are both."""
    pairs = {}
    for phase in _PHASES:
        sides = [one for one in evaluations if one.phase == phase and one.tasks]
        first = [one for one in sides if candidates and _is(one, candidates[0])]
        second = [one for one in sides if winner is not None and _is(one, winner)]
        if first and not second:  # of a run in progress
            second = [one for one in sides if one is not first[0]]
        if first and second and first[0] is not second[0]:
            pairs[phase] = (first[0], second[0])
    return pairs
