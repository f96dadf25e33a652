"""The report of `assay improve`, and its files. Does not run anything."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from assay.datasets.rows import NO_ROWS
from assay.reports.markdown import models_text, with_interval
from assay.support.places import write_whole
from assay.support.reprs import ReportRepr
from assay.support.scrubbing import results
from assay.support.values import json_text
from assay.traces.store.sealing import openings_line

__all__ = ["ImproveReport", "finished_report", "write_json"]


@dataclass(repr=False)
class ImproveReport(ReportRepr):
    """What `improve` returns.

    `steps`: each step with the decision of its gate, and `converged`: whether its policy gradient converged; False if
    a training diverged, None for other steps and where too few optimizer steps were made to tell. `test`: comparison
    of start and result on the sealed test. `stopped`: the cap that ended the improvement early. `models`: LM calls,
    tokens and dollars of all steps by model.
    """

    artifact: Path | None
    program: str
    model: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    test: dict[str, Any] | None = None
    test_openings: dict[str, int] | None = None
    notes: list[str] = field(default_factory=list)
    stopped: str | None = None
    data: dict[str, Any] = field(default_factory=lambda: NO_ROWS.to_dict())
    models: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "artifact": str(self.artifact) if self.artifact else None}

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "ImproveReport":
        """From the output of `to_dict`."""
        return cls(**{**stored, "artifact": Path(stored["artifact"]) if stored["artifact"] else None})

    def as_text(self, name: str, words: Callable[[str], str] = str) -> str:
        """The report of the improvement `name` as Markdown. `words` changes notes, and why it was stopped."""
        lines = [
            "; ".join(
                [
                    f"- {step['step']}: {'kept' if step['kept'] else 'not kept'}",
                    *([f"gate {with_interval(step['gate'])}"] if step["gate"] else []),
                    *([words(str(step["note"]))] if step.get("note") else []),
                ]
            )
            for step in self.steps
        ]
        cut = [f"Stopped early: {words(self.stopped)}."] if self.stopped else []
        gain = f"Sealed test, paired: {_gain(self.test)}."
        called = [f"LM calls by model: {text}."] if (text := models_text(asdict(self))) else []
        parts = [f"# {name}", f"Model `{self.model}`.", *cut, "\n".join(lines), gain, openings_line(self.test_openings)]
        return "\n\n".join([*parts, *called]) + "\n"


def _gain(test: Mapping[str, Any] | None) -> str:
    gain = (test or {}).get("gain")
    return "not run" if gain is None else with_interval(gain)


def finished_report(path: Path, job: Mapping[str, Any]) -> ImproveReport | None:
    """The report of this very job, where it had finished."""
    if not path.is_file():
        return None
    stored = json.loads(path.read_text(encoding="utf-8"))
    return ImproveReport.of(stored["report"]) if stored["job"] == job else None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file that is never there in part."""
    write_whole(path, json_text(results(content)))
