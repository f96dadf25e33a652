"""`assay compare`: two programs or artifacts, paired, task by task."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from assay.commands.evaluate import Evaluate, EvaluationReport, evaluate
from assay.commands.groups import InStore, JobOutput, Reported, Trusting, WithPage
from assay.errors import ConfigError
from assay.jobs.groups import AgentServing, JobSettings, Sampled, Source, State
from assay.jobs.job_report import EndedReport
from assay.support.numbers import calls_text, counted, figure
from assay.support.options import Flag, function_of, options_of
from assay.support.report import OBJECT, Table
from assay.support.values import json_value

if TYPE_CHECKING:
    from assay.reports.files import Page
    from assay.traces import Store

_CAPS = ("max_calls", "max_tokens", "max_cost_usd")


@dataclass(frozen=True, kw_only=True, repr=False)
class CompareReport(EndedReport):
    """What `compare` returns. `gain`: score of `b` minus score of `a`."""

    a: Mapping[str, Any]
    b: Mapping[str, Any]
    gain: Mapping[str, Any]
    split: str
    tasks: Sequence[Mapping[str, Any]]
    calls: int
    cached: int
    tokens: int
    cost_usd: float | None
    unrecorded: int | None
    evaluations: tuple[EvaluationReport, EvaluationReport] = field(metadata=OBJECT)

    def lines(self) -> Iterator[str | Table]:
        from assay.reports.markdown import cost_words, gain_claim, models_text, with_interval

        yield self._table()
        calls = calls_text(self.calls, self.cached)
        yield f"LM calls: {calls}, {self.tokens:,} tokens, {cost_words(self.cost_usd)}"
        for side in "ab":
            if text := models_text(getattr(self, side)):
                yield f"LM calls by model of {side}: {text}"
        paired = [task for task in self.tasks if task["a"] is not None and task["b"] is not None]
        better, worse = sum(task["b"] > task["a"] for task in paired), sum(task["b"] < task["a"] for task in paired)
        yield f"b is better on {counted(better, 'tasks')}, worse on {worse}, equal on {len(paired) - better - worse}"
        low, high = (0, 0) if self.gain["mean"] is None else (self.gain["low"], self.gain["high"])
        yield f"gain of b: {with_interval(self.gain)}: {gain_claim(low, high)}"
        yield from self.limits()
        yield from self.opened()

    def page_of(self, store: "Store") -> "Page":
        from assay.reports.files import ROWS, Page, short_name
        from assay.reports.sides import sides_of

        runs = self.evaluations[0].run_id, self.evaluations[1].run_id
        evaluated = [side.evaluated(store) for side in self.evaluations]
        title = f"Comparison of {' and '.join(short_name(side['program']) for side in (self.a, self.b))}"
        values = {"sides": sides_of(store, runs, *evaluated, rows=ROWS, better_first=False)}
        return Page(template="report_compare.html", title=title, values=values, runs=runs)

    def _table(self) -> Table:
        from assay.reports.markdown import graded, tool_rows

        a, b = self.a, self.b
        rows = [
            ("program", a["program"], b["program"]),
            *([("state", a["state"] or "–", b["state"] or "–")] if a["state"] or b["state"] else []),
            ("model", a["model"] or "–", b["model"] or "–"),
            ("score", figure(a["score"]), figure(b["score"])),
            *((f"  {name}", graded(a, name), graded(b, name)) for name in b["criteria"]),
            *tool_rows([a, b]),
            ("failed, unscored", f"{a['failed']}, {a['unscored']}", f"{b['failed']}, {b['unscored']}"),
        ]
        title = f"{self.split}, {counted(b['n'], 'tasks')}"
        return Table(title=title, header=("", "a", "b"), rows=rows, strong=("score",))


class _OfAgent(AgentServing):
    """Agent of one's own."""

    agent: Annotated[str | Callable[..., Any] | None, Flag(metavar="AGENT", key=False)] = None
    """Agent as the baseline, as in `evaluate`; A is then compared with it, and there is no B."""


class ComparisonOutput(WithPage, JobOutput):
    """Output."""


class Compare(Reported, Trusting, InStore, _OfAgent, Sampled, JobSettings):
    """Score A and B (programs' names or artifacts' folders) on the same tasks. The gain is the score of B minus that of
    A, with a 95 % interval.

    With an agent of any framework (`agent`), A, such as the artifact of its compiled texts, is compared with it. By
    default the tasks of the gate split decide. The opening of the test split is counted once for both sides.
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
    b: Annotated[Source, Flag(key=False)] = field(default=None, kw_only=False)
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
        from assay.jobs.arguments import check_state, resolve_lm
        from assay.sources.artifact_files import is_artifact
        from assay.traces.records import new_id

        a, b, states = self.a, self.b, (self.state_a, self.state_b)
        if (self.agent is None) == (b is None):
            why = "is missing" if b is None else "must be left out with `agent`, with which A is compared"
            raise ConfigError(why, field="b")
        if self.agent is not None:
            a, b, states = None, self.a, (None, self.state_a)
        served = {name: value for name, value in vars(self).items() if name in options_of(_OfAgent)}
        common: dict[str, Any] = {name: value for name, value in vars(self).items() if name in options_of(Evaluate)}
        common = {name: value for name, value in common.items() if name not in served}
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
        first = evaluate(a, **{**common, **served, **models[0], "state": states[0], **_first_half(caps)})
        second = evaluate(b, **{**common, **models[1], "state": states[1], **_rest(caps, first)})
        return _compared((first.program if self.agent is not None else a, b), states, (first, second))


def _compared(
    programs: tuple[Any, Any], states: tuple[Any, Any], evaluations: tuple[EvaluationReport, EvaluationReport]
) -> CompareReport:
    """The report of two evaluations of the same tasks."""
    from assay.evaluation import paired_gain

    first, second = evaluations
    sides = [
        {
            "program": str(program), "state": None if state is None else str(state), "model": side.model, **side.result,
            "models": side.models,
        }
        for program, state, side in zip(programs, states, evaluations, strict=True)
    ]  # fmt: skip
    scores = first.evaluation.scores, second.evaluation.scores
    tasks = [{"task": task, "a": scores[0].get(task), "b": scores[1].get(task)} for task in {**scores[0], **scores[1]}]
    spent = ("calls", "cached", "tokens", "cost_usd", "unrecorded")
    used: dict[str, list[Any]] = {name: [getattr(side, name) for side in evaluations] for name in spent}
    total: dict[str, Any] = {name: None if None in values else sum(values) for name, values in used.items()}
    return CompareReport(
        a=sides[0], b=sides[1], gain=paired_gain(*scores).to_dict(), split=first.split, tasks=json_value(tasks),
        notes=list(dict.fromkeys([*first.notes, *second.notes])), data=first.data,
        test_openings=second.test_openings or first.test_openings,  # those of both sides, as one job
        stopped=first.stopped or second.stopped, evaluations=evaluations,
        **total,
    )  # fmt: skip


def _first_half(caps: dict[str, Any]) -> dict[str, Any]:
    """Caps of the first side, so that the second can be scored on the same tasks."""
    return {name: cap / 2 if name == "max_cost_usd" else (cap + 1) // 2 for name, cap in caps.items()}


def _rest(caps: dict[str, Any], first: EvaluationReport) -> dict[str, Any]:
    """Caps of the second side: what the first has left of those of both."""
    return {name: max(0, cap - (getattr(first, name.removeprefix("max_")) or 0)) for name, cap in caps.items()}


def _check_loads(side: Any) -> None:
    """Refuses a side that cannot be loaded before the other side has been evaluated."""
    from assay.deployment.artifact import load_artifact
    from assay.programs.loading import program_class
    from assay.sources.artifact_files import is_artifact

    if isinstance(side, str | Path):
        _ = load_artifact(side) if is_artifact(side) else program_class(str(side))


compare = function_of(Compare, "compare")
