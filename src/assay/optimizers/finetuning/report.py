"""What the reports of all trainings have: the lines for people, and the page."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from assay.optimizers.finetuning.settings import PolicySettings, SFTSettings
from assay.reports.markdown import curriculum_lines
from assay.reports.trained import compared_runs, trained_tasks
from assay.reports.training import in_numbers, write_training
from assay.support.report import Report, Table
from assay.support.reprs import ReportRepr
from assay.traces import Store
from assay.traces.store.sealing import openings_line


@dataclass(repr=False)
class TrainingReport(ReportRepr):
    """A report of `assay.support.report`, which grows while the training runs.

    Attributes:
        name: the model to serve; None for a base model that is not embedded, where `path` is PEFT's folder.
        validation: `[program][mode]` has `before`, `after` and their paired `gain` on tasks that were used neither for
            training nor for model selection.
        test_openings: by program, see `assay.traces.store.sealing.Openings`.
        agreement: share of prompts, in [0, 1], that torch and the served GGUF continue with the same greedy text.
    """

    name: str | None
    path: Path
    config: PolicySettings | SFTSettings
    steps: int = 0
    best_step: int | None = None
    agreement: float | None = None
    stopped: str | None = None
    alarms: list[str] = field(default_factory=list)
    validation: dict[str, dict[str, Any]] = field(default_factory=dict)
    test_openings: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    is_list: ClassVar[bool] = Report.is_list
    is_data: ClassVar[bool] = Report.is_data
    is_stream: ClassVar[bool] = Report.is_stream
    none: ClassVar[str] = Report.none
    has_key: ClassVar[bool] = Report.has_key
    failure: ClassVar[str] = ""

    def to_dict(self) -> dict[str, Any]:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**values, "path": str(self.path), "config": asdict(self.config)}

    def summary(self, data: Mapping[str, Any]) -> Iterator[str | Table]:
        """The lines of this kind of training."""
        raise NotImplementedError

    def warnings(self) -> Iterator[str]:
        yield from ()

    def lines(self) -> Iterator[str | Table]:
        data = self.to_dict()
        for title, modes in data["validation"].items():
            rows = [list(row) for row in in_numbers(modes)]
            yield Table(
                title=f"{title}: sealed tasks, {next(iter(modes.values()))['before']['n']}", rows=rows,
                header=("", "before", "after", "gain, paired 95 %"),
                strong=[row[0] for row in rows if row[0].endswith(": score")],
            )  # fmt: skip
            if openings := data["test_openings"].get(title):
                yield openings_line(openings)
        yield from self.summary(data)
        if data["agreement"] is not None:
            same = f"{100 * data['agreement']:.0f} % of the prompts"
            yield f"llama.cpp, which serves it, writes the same greedy text as torch for {same}"
        yield from (f"{count} left out: {reason}" for reason, count in data["left_out"].items())
        yield from curriculum_lines(data.get("curriculum"))
        stopped = [data["stopped"]] if data["stopped"] else []
        yield from (f"note: {note}" for note in dict.fromkeys([*data["notes"], *data["alarms"], *stopped]))
        if data.get("report"):
            yield f"report: {data['report']}"
        yield str(data["path"])
        if data["name"]:
            yield f"In any command: `model` {data['name']}"

    def write_page(self, path: str | Path, *, store: str | Path | None = None) -> Path:
        """Writes the report as one HTML file, with the tasks of the store's evaluations before and after.

        Raises:
            ConfigError: the file cannot be written.
        """
        data, tasks = self.to_dict(), []
        if data["validation"]:  # a training on an export has none, and then the store is not needed
            with Store(store) as opened:
                tasks = trained_tasks(opened, data["validation"])
                opened.put_report(path, *compared_runs(data["validation"]))
        return write_training(Path(path), data, tasks=tasks)
