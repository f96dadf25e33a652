"""Settings and report of `assay improve`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from assay.commands.groups import InStore, NewArtifact, Reported
from assay.errors import ConfigError
from assay.optimizers.finetuning.settings import PolicySettings, SFTSettings, settings_from
from assay.runs.groups import PromptJob, Source
from assay.runs.job_report import EndedReport
from assay.support.options import Flag, Parse, Positive
from assay.support.report import Table

STEPS = ("prompts", "sft", "grpo")


@dataclass(frozen=True, kw_only=True, repr=False)
class ImproveReport(EndedReport):
    """What `improve` returns.

    Attributes:
        program: name of the program
        steps: one entry per step with its gate, whether it was kept, and whether its training converged: false if it
            diverged, null for other steps and where too few optimizer steps were made to tell
        test: comparison of start and result on the sealed test
    """

    artifact: Path | None = None
    program: str
    model: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    test: Mapping[str, Any] | None = None
    test_openings: Mapping[str, int] | None = None
    notes: list[str] = field(default_factory=list)
    stopped: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    models: Sequence[Mapping[str, Any]] = ()

    def lines(self) -> Iterator[str | Table]:
        from assay.reports.training import in_numbers, interval

        rows = [
            (step["step"], interval(step["gate"]), "kept" if step["kept"] else "not kept", step.get("model", ""))
            for step in self.steps
        ]
        yield Table(title="steps", header=("step", "gate, paired 95 %", "", "model"), rows=rows)
        yield from (f"note: {step['step']}: {step['note']}" for step in self.steps if step.get("note"))
        yield from self.limits()
        if self.test:
            title, header = f"sealed tasks, {self.test['before']['n']}", ("", "start", "end", "gain, paired 95 %")
            yield Table(title=title, header=header, rows=list(in_numbers({"test": self.test})))
        elif not any(step["kept"] for step in self.steps):
            yield "no step was kept, so there is nothing to compare: the program is unchanged"
        yield from self.opened()
        yield from self.called()
        yield f"model: {self.model}"
        if self.artifact is not None:  # not yet while its own page is written
            yield f"artifact: {self.artifact}"


def _by_field(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that may be named by the flags of `assay train`."""
    return {name.replace("-", "_"): value for name, value in settings.items()}


class ImproveSettings(Reported, InStore, NewArtifact, PromptJob):
    """Steps."""

    kind: ClassVar[str] = "improve"
    state: ClassVar[None] = None  # type: ignore[misc]
    lm: ClassVar[None] = None  # type: ignore[misc]  # later steps load the model by its name

    name: Annotated[str, Flag(key=False)]
    """Name of this improvement; its adapters are called NAME-1, NAME-2, …"""
    order: Annotated[Sequence[str], Flag(commas=True)] = ("prompts", "sft", "prompts")
    """Steps in order, separated by commas: prompts (compile), sft (collect on train, export this program's good
    rollouts from the store, fine-tune on them), grpo (policy gradient on train)."""
    rollouts: Positive = 2
    """Number of rollouts of each train task that sft collects."""
    sft: Annotated[Mapping[str, Any] | None, Flag(metavar="NAME=VALUE"), Parse(_by_field)] = None
    """Setting of sft, named as in `assay train sft`: epochs=2."""
    grpo: Annotated[Mapping[str, Any] | None, Flag(metavar="NAME=VALUE"), Parse(_by_field)] = None
    """Setting of grpo, named as in `assay train grpo`: steps=12, beta=0."""
    retention: Annotated[Sequence[str], Flag(metavar="PROGRAM,RUBRIC,DATA")] = ()
    """Retention task: a program, rubric and data whose score grpo must not lower; repeatable."""
    monitor: Annotated[Source | None, Flag(metavar="R", path=True)] = None
    """Monitor rubric: scores the rollouts of grpo, but gives no reward."""

    def check(self) -> None:
        from assay.support.names import one_of

        if unknown := [step for step in self.order if step not in STEPS]:
            raise ConfigError(f"{unknown[0]!r} {one_of(unknown[0], STEPS)}", field="order")
        if not self.order:
            raise ConfigError(f"must name at least one of the steps {', '.join(STEPS)}", field="order")
        if "grpo" not in self.order and (guards := self.changed("retention", "monitor")):
            raise ConfigError(
                f"would have no effect: it guards grpo, and the `order` is {', '.join(self.order)}", field=guards[0]
            )
        settings_from(SFTSettings, self.sft or {}, "sft")
        if settings_from(PolicySettings, self.grpo or {}, "grpo").evaluate_every == 0 and self.retention:
            raise ConfigError(
                "needs evaluations, and evaluate_every=0 evaluates none: give `grpo` evaluate_every=STEPS",
                field="retention",
            )
