"""`assay traces score`: scores stored rollouts by a rubric."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from assay.commands.groups import InExistingStore, JobOutput, Reported, Trusting
from assay.jobs.groups import ScoringSettings
from assay.rubrics import Rubric
from assay.support.numbers import counted, price
from assay.support.options import Flag, function_of
from assay.support.report import Report


@dataclass(frozen=True, kw_only=True, repr=False)
class ScoringReport(Report):
    """Scores of stored rollouts.

    Attributes:
        scored: number of rollouts that were scored.
        unscored: number that keep their earlier score, or none, because a criterion was undecided.
        mean: mean of the new scores.
        coverage: smallest share of rollouts on which a criterion was decided, of those scored now.
        undecided: criteria that were not decided on each of them, see `assay.rubrics.scoring`.
        rubric: name and version of the rubric.
        skipped: number that had a score.
        skipped_of_other_rubrics: those among them that another rubric scored, by its name and version; `again`
            replaces them.
        running: number that have not ended, and are not scored.
        calls: LM calls of the judges; null, as tokens and cost, where these name their own models.
        tokens: prompt and completion tokens of these.
        cost_usd: US dollars of these; null if no price is known.
        unrecorded: LM calls of judges and checks that could not be recorded; null if unknown.
    """

    scored: int
    unscored: int
    mean: float | None
    coverage: float
    undecided: dict[str, Any]
    rubric: str
    skipped: int
    skipped_of_other_rubrics: dict[str, int]
    running: int
    calls: int | None
    tokens: int | None
    cost_usd: float | None
    unrecorded: int | None

    def lines(self) -> Iterator[str]:
        from assay.reports.markdown import gap_lines

        mean = "" if self.mean is None else f", mean {self.mean:.3f}"
        skipped = f", {self.skipped} already had a score" if self.skipped else ""
        scored = f"{counted(self.scored, 'rollouts')} scored{mean}"
        yield f"{scored}; {self.unscored} could not be scored and are unchanged{skipped}"
        if self.calls:
            cost = "cost unknown" if self.cost_usd is None else price(self.cost_usd)
            yield f"judges: {counted(self.calls, 'calls')}, {self.tokens:,} tokens, {cost}"
        yield from gap_lines(vars(self))
        if by_rubric := self.skipped_of_other_rubrics:
            rubrics = ", ".join(f"{count} of {name or 'a rubric without a name'}" for name, count in by_rubric.items())
            yield f"note: existing scores of other rubrics than {self.rubric}: {rubrics}. `again` replaces them"
        if self.running:
            verb = "is" if self.running == 1 else "are"
            yield (
                f"{counted(self.running, 'rollouts')} {verb} still running and not scored. A gateway ends rollouts "
                "when it is stopped, or --idle-s after their last call; assay traces close ends those of a killed "
                "gateway"
            )


class ScoreRollouts(ScoringSettings, InExistingStore, Trusting, Reported):
    """Score stored rollouts (of the gateway, or imported) by a rubric, step rewards included.

    A rollout on which a criterion could not be decided keeps the score it had, or stays unscored. Rollouts are scored
    in parallel and stored in their order; an interrupt keeps the scores so far. The calls of judges are stored next to
    them. Where another process has judges score by the same rubric, this one waits until it has ended.

    Raises:
        ConfigError: a criterion needs a judge and no model is named for it.
        DataError: there is no run of one of these names.
        ModelError: a judge did not answer.
    """

    OUTPUT: ClassVar[Any] = JobOutput

    rubric: Annotated[str | Path | Rubric | Callable[..., Any], Flag(metavar="R", path=True)]
    """Rubric: a YAML file, a shipped name (math_qa, classify, extract, tool_user, code_repair, text_to_sql,
    answer_from_documents, converse, nim, experiment), a check (exact), or metrics.py:NAME of a DSPy metric."""

    runs: Annotated[Sequence[str], Flag(name="--run", key=False)] = ()
    """Only rollouts of this run; repeatable."""

    def run(self) -> ScoringReport:
        from assay.jobs.rescoring import score_stored

        with self.opened() as store:
            return ScoringReport(**score_stored(store, self.rubric, self, runs=self.runs, progress=self.progress))


score_rollouts = function_of(ScoreRollouts, "score_rollouts")
