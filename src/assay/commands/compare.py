"""`assay compare`: two programs or artifacts, paired, task by task."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from assay.commands.evaluate import Evaluate, EvaluationReport, evaluate
from assay.commands.groups import InStore, JobOutput, Reported, Trusting, WithPage
from assay.errors import ConfigError
from assay.runs.groups import JobSettings, Sampled, Source, State
from assay.support.numbers import counted, figure
from assay.support.options import Flag, function_of, options_of
from assay.support.report import Report, Table, Words

if TYPE_CHECKING:
    from assay.evaluation import Gain

_CAPS = ("max_calls", "max_tokens", "max_cost_usd")


@dataclass(frozen=True, kw_only=True, repr=False)
class CompareReport(Report):
    """What `compare` returns. `gain`: score of `b` minus score of `a`. `models`, `states`: those of each side."""

    names: tuple[str, str]
    models: tuple[str, str]
    a: EvaluationReport
    b: EvaluationReport
    gain: "Gain"
    states: tuple[str | None, str | None] = (None, None)

    def to_dict(self) -> dict[str, Any]:
        a, b = self.a.evaluation.scores, self.b.evaluation.scores
        tasks = [
            {"task": task, "a": _or_none(a.get(task)), "b": _or_none(b.get(task))} for task in dict.fromkeys([*a, *b])
        ]
        sides = {
            side: {
                "program": name,
                "state": state,
                "model": model,
                **report.to_dict()["result"],
                "models": report.called.get("models", []),
            }
            for side, name, state, model, report in zip(
                "ab", self.names, self.states, self.models, (self.a, self.b), strict=True
            )
        }
        both = {
            key: [report.to_dict()[key] for report in (self.a, self.b)]
            for key in ("calls", "cached", "tokens", "cost_usd", "unrecorded")
        }
        spent: dict[str, Any] = {key: None if None in values else sum(values) for key, values in both.items()}
        openings = self.b.openings or self.a.openings  # those of both sides, as one job
        spent["test_openings"] = openings.to_dict() if openings else None
        notes = list(dict.fromkeys([*self.a.notes, *self.b.notes]))
        about = {
            "gain": self.gain.to_dict(),
            "split": self.a.split,
            "tasks": tasks,
            "notes": notes,
            "data": self.a.rows.to_dict(),
        }
        return {**sides, **about, **spent, "stopped": self.a.stopped or self.b.stopped}

    def lines(self) -> Iterator[str | Table]:
        from assay.datasets.rows import near_notes
        from assay.reports.markdown import models_text, with_interval
        from assay.runs.ending import advised
        from assay.traces.store.sealing import openings_line

        data = self.to_dict()
        yield self._table(data)
        for side in "ab":
            if text := models_text(data[side]):
                yield f"LM calls by model of {side}: {text}"
        paired = [task for task in data["tasks"] if task["a"] is not None and task["b"] is not None]
        better, worse = sum(task["b"] > task["a"] for task in paired), sum(task["b"] < task["a"] for task in paired)
        yield f"b is better on {counted(better, 'tasks')}, worse on {worse}, level on {len(paired) - better - worse}"
        gain = data["gain"]
        verdict = (
            "no significant difference"
            if gain["mean"] is None or gain["low"] <= 0 <= gain["high"]
            else "a gain"
            if gain["low"] > 0
            else "a loss"
        )
        yield f"gain of b: {with_interval(gain)}: {verdict}"
        stopped = [f"stopped early: {advised(data['stopped'])}"] if data["stopped"] else []
        for note in [*data["notes"], *near_notes(data["data"]), *stopped]:
            yield f"note: {note}"
        if data["test_openings"]:
            yield openings_line(data["test_openings"])

    def write_page(self, path: str | Path, *, store: str | Path | None = None, words: Words = str) -> Path:
        from assay.reports.files import (
            ROWS,
            called_facts,
            opened_facts,
            page_notes,
            short_name,
            spent_facts,
            stopped_facts,
            write_report,
        )
        from assay.reports.sides import sides_of
        from assay.traces import Store

        data = self.to_dict()
        with Store(store) as opened:
            runs = self.a.run_id, self.b.run_id
            evaluated = [side.evaluated(opened) for side in (self.a, self.b)]
            sides = sides_of(opened, runs, *evaluated, rows=ROWS, better_first=False)
            opened.put_report(path, *runs)
        labels = {"First": data["a"], "Second": data["b"]}
        called = [fact for label in labels for fact in called_facts(labels[label], f"{label}, LM calls by model")]
        facts = [
            *((label, _side_text(side)) for label, side in labels.items()), ("Split", data["split"]),
            *spent_facts(data), *called, *stopped_facts(data, words), *opened_facts(data),
        ]  # fmt: skip
        return write_report(
            path, "report_compare.html", title=f"Comparison of {' and '.join(map(short_name, self.names))}",
            facts=facts, sides=sides, notes=page_notes(data, words),
        )  # fmt: skip

    def _table(self, data: dict[str, Any]) -> Table:
        from assay.reports.markdown import graded, tool_rows

        a, b = data["a"], data["b"]
        rows = [
            ("program", a["program"], b["program"]),
            *([("state", a["state"] or "–", b["state"] or "–")] if a["state"] or b["state"] else []),
            ("model", a["model"] or "–", b["model"] or "–"),
            ("score", figure(a["score"]), figure(b["score"])),
            *((f"  {name}", graded(a, name), graded(b, name)) for name in b["criteria"]),
            *tool_rows([a, b]),
            ("failed, unscored", f"{a['failed']}, {a['unscored']}", f"{b['failed']}, {b['unscored']}"),
        ]
        title = f"{data['split']}, {counted(b['n'], 'tasks')}"
        return Table(title=title, header=("", "a", "b"), rows=rows, strong=("score",))


def _side_text(side: dict[str, Any]) -> str:
    state = f" with the state {side['state']}" if side["state"] else ""
    return f"{side['program']}{state}, {side['model']}"


class ComparisonOutput(WithPage, JobOutput):
    """Output."""


class Compare(Reported, Trusting, InStore, Sampled, JobSettings):
    """Score A and B (programs' names or artifacts' folders) on the same tasks. The gain is the score of B minus that of
    A, with a 95 % interval.

    By default the tasks of the gate split decide. The opening of the test split is counted once for both sides.
    Without `model`, an artifact runs with the model that it was measured with; a program compared with an artifact uses
    the artifact's model. The caps are those of both: the first side stops at half of them.

    Raises:
        ConfigError: a program is compared with itself.
        AssayError: what was wrong, which rule, what to do.
    """

    OUTPUT: ClassVar[Any] = ComparisonOutput
    RUNS: ClassVar[Sequence[str]] = ("a", "b")

    a: Annotated[Source, Flag(key=False)] = field(kw_only=False)
    """The baseline: a program or an artifact, as in `evaluate`."""
    b: Annotated[Source, Flag(key=False)] = field(kw_only=False)
    """What is compared with it."""
    state_a: State = None
    """State of a, as DSPy's program.save('x.json') writes it: instructions, field texts and demonstrations. It must
    have the program's predictors and fields. Not for an artifact, which has its own."""
    state_b: State = None
    """State of b, in the same form."""
    split: Literal["train", "val", "gate", "test", "all"] = "gate"
    """Split to score. The test split is sealed; each opening is counted. 'all' scores every row; such a score is not
    held out."""

    def run(self) -> CompareReport:
        from assay.deployment.artifact import with_model_of
        from assay.evaluation import paired_gain
        from assay.runs.arguments import check_state, resolve_lm
        from assay.sources.artifact_files import is_artifact
        from assay.traces.records import new_id

        a, b, states = self.a, self.b, (self.state_a, self.state_b)
        common: dict[str, Any] = {name: value for name, value in vars(self).items() if name in options_of(Evaluate)}
        common |= {"lm": resolve_lm(self.lm, common), "opens_as": f"compare-{new_id()[:12]}"}
        models: list[dict[str, Any]] = [{}, {}]
        if common["lm"] is None and self.model is None:
            asked = {name: common[name] for name in ("api_base", "api_key_env", "thinking")}
            artifacts = [side for side in (a, b) if isinstance(side, str | Path) and is_artifact(side)]
            if artifacts:
                models = [with_model_of(side if side in artifacts else artifacts[0], asked) for side in (a, b)]
        same = a is b or (isinstance(a, str | Path) and isinstance(b, str | Path) and str(a) == str(b))
        if same and models[0] == models[1] and states[0] == states[1]:
            raise ConfigError(
                f"a and b are both {a}, with the same model: there is nothing to compare. Score it alone with evaluate"
            )
        check_state(a, states[0])
        check_state(b, states[1])
        _check_loads(b)
        caps = {name: cap for name in _CAPS if (cap := getattr(self, name)) is not None}
        first = evaluate(a, **{**common, **models[0], "state": states[0], **_first_half(caps)})
        second = evaluate(b, **{**common, **models[1], "state": states[1], **_rest(caps, first)})
        gain = paired_gain(first.evaluation.scores, second.evaluation.scores)
        files = [None if state is None else str(state) for state in states]
        return CompareReport(
            names=(str(a), str(b)), models=(first.called["model"], second.called["model"]), a=first, b=second,
            gain=gain, states=(files[0], files[1]),
        )  # fmt: skip


def _first_half(caps: dict[str, Any]) -> dict[str, Any]:
    """Caps of the first side, so that the second can be scored on the same tasks."""
    return {name: cap / 2 if name == "max_cost_usd" else (cap + 1) // 2 for name, cap in caps.items()}


def _rest(caps: dict[str, Any], first: EvaluationReport) -> dict[str, Any]:
    """Caps of the second side: what the first has left of those of both."""
    spent = first.to_dict() if caps else {}
    return {name: max(0, cap - (spent[name.removeprefix("max_")] or 0)) for name, cap in caps.items()}


def _check_loads(side: Any) -> None:
    """Refuses a side that cannot be loaded before the other side has been evaluated."""
    from assay.deployment.artifact import load_artifact
    from assay.programs.loading import program_class
    from assay.sources.artifact_files import is_artifact

    if isinstance(side, str | Path):
        _ = load_artifact(side) if is_artifact(side) else program_class(str(side))


def _or_none(score: float | None) -> float | None:
    return None if score is None or math.isnan(score) else score


compare = function_of(Compare, "compare")
