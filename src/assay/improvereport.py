"""The report of `assay improve`, and its files. Does not run anything."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from assay.reprs import Shown
from assay.scrubbing import results
from assay.traces.sealing import openings_line

__all__ = ["ImproveReport", "finished_report", "write_json"]


@dataclass(repr=False)
class ImproveReport(Shown):
    """What `improve` did. `steps` has each step with the gate's decision; `test` compares the start with what was kept; `stopped` is the cap that
    ended it before it was done."""

    artifact: Path | None
    program: str
    model: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    test: dict[str, Any] | None = None
    test_openings: dict[str, int] | None = None
    notes: list[str] = field(default_factory=list)
    stopped: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "artifact": str(self.artifact) if self.artifact else None}

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> "ImproveReport":
        """From what `to_dict` gave."""
        return cls(**{**kept, "artifact": Path(kept["artifact"]) if kept["artifact"] else None})

    def as_text(self, name: str) -> str:
        """Of the improvement `name`, as Markdown."""
        lines = [f"- {told['step']}: {'kept' if told['kept'] else 'not kept'} {told['gate'] or told.get('note', '')}" for told in self.steps]
        cut = [f"Stopped early: {self.stopped}."] if self.stopped else []
        gain = f"Sealed test, paired: {(self.test or {}).get('gain')}"
        return "\n\n".join([f"# {name}", f"Model `{self.model}`.", *cut, "\n".join(lines), gain, openings_line(self.test_openings)]) + "\n"


def finished_report(path: Path, job: Mapping[str, Any]) -> ImproveReport | None:
    """The report of this very job, where it had finished."""
    if not path.is_file():
        return None
    kept = json.loads(path.read_text(encoding="utf-8"))
    return ImproveReport.of(kept["report"]) if kept["job"] == job else None


def write_json(path: Path, what: Mapping[str, Any]) -> None:
    """Writes a file that is never there in part."""
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(json.dumps(results(what), default=str), encoding="utf-8")
    scratch.replace(path)
