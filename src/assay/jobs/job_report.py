"""What the reports of jobs have: how the job ended, what it used, and which models answered."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import ConfigError
from assay.support.report import Report, Table

if TYPE_CHECKING:
    from assay.reports.files import Page
    from assay.traces import Store


@dataclass(frozen=True, kw_only=True, repr=False)
class EndedReport(Report):
    """Report of one or more jobs on data with splits."""

    stopped: str | None
    notes: Sequence[str]
    test_openings: Mapping[str, int] | None
    data: Mapping[str, Any]

    def opened(self) -> Iterator[str]:
        """How often the test split was opened, if the job opened it."""
        from assay.traces.store.sealing import openings_line

        if self.test_openings:
            yield openings_line(self.test_openings)

    def page_of(self, store: "Store") -> "Page":
        """The page of the report. Reads the store."""
        raise NotImplementedError(f"{type(self).__name__} has no page")

    def write_page(self, path: str | Path, *, store: str | Path | None = None) -> Path:
        from assay.reports.files import write_report
        from assay.traces import Store

        with Store(store) as opened:
            page = self.page_of(opened)
            opened.put_report(path, *page.runs)
        lines = list(self.lines())
        return write_report(path, page.template, title=page.title, facts=page.facts, lines=lines, **page.values)

    def called(self) -> Iterator[str]:
        """LM calls by model, if several answered."""
        from assay.reports.markdown import models_text

        if text := models_text(vars(self)):
            yield f"LM calls by model: {text}"

    def limits(self) -> Iterator[str]:
        """What limits the result: notes, and what ended the job early."""
        from assay.datasets.rows import near_notes
        from assay.jobs.ending import advised

        stopped = [f"stopped early: {advised(self.stopped)}"] if self.stopped else []
        for note in [*self.notes, *near_notes(self.data), *stopped]:
            yield f"note: {note}"


@dataclass(frozen=True, kw_only=True, repr=False)
class JobReport(EndedReport):
    """Report of a job. Most of its fields are those of `Job.spent`.

    Attributes:
        unrecorded: LM calls that could not be recorded; null if unknown
        unrecorded_seen: how many of them were seen, where the number is unknown
        unrecorded_reason: why it is unknown
        unpriced_calls: calls without a known price
    """

    calls: int
    cached: int
    repeated_calls: int
    tokens: int
    cost_usd: float | None
    unpriced_calls: int
    model: str | None
    models: Sequence[Mapping[str, Any]]
    unrecorded: int | None
    unrecorded_seen: int | None = None
    unrecorded_reason: str | None = None
    rows_not_stored: int

    def to_dict(self) -> dict[str, Any]:
        data = super().to_dict()
        known = () if self.unrecorded is None else ("unrecorded_seen", "unrecorded_reason")
        return {name: value for name, value in data.items() if name not in known}

    def limits(self) -> Iterator[str]:
        """Also calls that were not recorded."""
        from assay.reports.markdown import gap_lines

        yield from gap_lines(vars(self))
        yield from super().limits()


@dataclass(frozen=True, kw_only=True, repr=False)
class JoinReport(JobReport):
    """What `join_tune` returns: what one process that joined a search has done.

    Attributes:
        run_id: its run
        leads: run of the process that leads the search, and reports it
        study: name of the study
        trials: number of trials of this process
        complete: trials that ran all tasks
        pruned: trials that were ended early
        failed: trials without a result
    """

    run_id: str
    leads: str
    study: str
    trials: int
    complete: int
    pruned: int
    failed: int

    def lines(self) -> Iterator[str | Table]:
        from assay.reports.markdown import cost_words
        from assay.support.numbers import calls_text, counted

        yield (
            f"{counted(self.trials, 'trials')} ({self.pruned} pruned, {self.failed} failed) of study {self.study}; "
            f"LM calls: {calls_text(self.calls, self.cached)}, {cost_words(self.cost_usd)}"
        )
        yield from self.called()
        yield from self.limits()
        yield f"the result is that of run {self.leads}"

    def write_page(self, path: str | Path, *, store: str | Path | None = None) -> Path:
        raise ConfigError(f"has no page: the process that leads the search, run {self.leads}, has it", field="report")
