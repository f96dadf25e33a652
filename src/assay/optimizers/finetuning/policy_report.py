"""Report, page and printed table of a policy gradient training. Does not train."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from assay.errors import AssayError
from assay.models.lora.adapters import list_adapters
from assay.optimizers.finetuning.rows import RowStats
from assay.optimizers.finetuning.settings import PolicySettings
from assay.reports.training import of_other_seeds, write_training
from assay.support.reprs import ReportRepr

_COLUMNS = {
    "reward": "reward",
    "score": "score",
    "entropy": "entropy",
    "kl": "kl",
    "clip_ratio/region_mean": "clipped",
    "zero_variance_groups": "no var.",
    "turns": "turns",
    "tokens": "tokens",
    "step_time": "seconds",
}
HEADING = f"{'step':>5}" + "".join(f"{label:>9}" for label in _COLUMNS.values())


@dataclass(repr=False)
class PolicyReport(ReportRepr):
    """Result of `train_policy`.

    `name` is the model to serve; it is None for a base model that is not embedded, where `path` is PEFT's folder.
    `curves[name][step]` are the logged values. `validation[name][mode]` has `before`, `after` and their paired `gain`
    on tasks that were used neither for training nor for model selection. `agreement`, in [0, 1], is the share of
    prompts that torch and the served GGUF continue with the same greedy text.
    """

    name: str | None
    path: Path
    config: PolicySettings
    curves: dict[str, dict[int, float]] = field(default_factory=dict)
    validation: dict[str, dict[str, Any]] = field(default_factory=dict)
    # by evaluation task, see `assay.traces.store.sealing.Openings`
    test_openings: dict[str, dict[str, int]] = field(default_factory=dict)
    alarms: list[str] = field(default_factory=list)
    converged: bool | None = None
    best_step: int | None = None
    steps: int = 0
    row_stats: RowStats = field(default_factory=RowStats)
    report: Path | None = None
    agreement: float | None = None
    stopped: str | None = None
    curriculum: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "row_stats"}
        paths = {"path": str(self.path), "report": str(self.report) if self.report else None}
        return {**values, **self.row_stats.to_dict(), **paths, "config": asdict(self.config)}

    def write_page(self, words: Callable[[str], str] = str) -> None:
        """Writes the HTML page next to the adapter. A note says so if the charts cannot be drawn.

        Args:
            words: puts the flags of the command into alarms and notes, in place of Python arguments.
        """
        try:
            content = self.to_dict()
            reports = of_other_seeds(content, (adapter.made for adapter in list_adapters()))
            self.report = write_training(self.path / "training.html", content, reports, words=words)
        except AssayError as error:
            self.notes.append(f"no page was written: {error}")


def table_row(step: int, values: Mapping[str, float]) -> str:
    """One row of the table printed during training, under `HEADING`."""
    return f"{step:>5}" + "".join(f"{values[key]:>9.3g}" if key in values else " " * 9 for key in _COLUMNS)
