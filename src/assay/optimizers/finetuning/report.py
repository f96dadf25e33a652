"""What the reports of all trainings have: the lines for people, and the page."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from assay.reports.markdown import curriculum_lines
from assay.reports.trained import compared_runs, trained_tasks
from assay.reports.training import in_numbers, write_training
from assay.support.report import Report, Table
from assay.support.reprs import ReportRepr
from assay.traces import Store
from assay.traces.store.sealing import openings_line


class TrainingReport(ReportRepr):
    """A report of `assay.support.report`, which grows while the training runs."""

    is_list: ClassVar[bool] = Report.is_list
    is_data: ClassVar[bool] = Report.is_data
    is_stream: ClassVar[bool] = Report.is_stream
    none: ClassVar[str] = Report.none
    has_key: ClassVar[bool] = Report.has_key
    failure: ClassVar[str] = ""

    if TYPE_CHECKING:

        def to_dict(self) -> dict[str, Any]: ...

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
