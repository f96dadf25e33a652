"""The report of a run that has ended, kept in the run's folder: `--resume` gives it again and asks no model.

Without it an ended run would be replayed, and a replay that asks a model once more (a call that had failed, a program that does not do the same
twice) finds its cap spent. Does not keep runs that were killed or whose model failed: they are resumed.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from assay.datasets.tasks import content_hash
from assay.deployment.artifact import is_artifact
from assay.errors import ArtifactError
from assay.models import Caps
from assay.optimizers import Progress
from assay.scrubbing import results

__all__ = ["FinishedRun"]

_FORMAT = 1
_FILE = "report.json"


class FinishedRun:
    """Where a run's report is kept.

    Args:
        folder: of the run.
        caps: of this attempt. With one that is higher than when the run ended, the run continues.
        about: all else that the report depends on; where any of it is different now, the report is not that of this job.
    """

    def __init__(self, folder: Path, *, caps: Caps, about: Mapping[str, Any]) -> None:
        self.path, self.caps = folder / _FILE, asdict(caps)
        self.about = content_hash(json.loads(json.dumps(dict(about), default=str)))

    def report(self, progress: Progress, *, out: str | Path | None = None) -> dict[str, Any] | None:
        """The JSON-ready report; None where the run has not ended, or can continue.

        Args:
            out: where the artifact is wanted; it is copied there.
        """
        if not self.path.is_file():
            return None
        kept = json.loads(self.path.read_text(encoding="utf-8"))
        if kept["format"] != _FORMAT or kept["about"] != self.about or self._raised(kept["caps"]):
            return None
        report: dict[str, Any] = kept["report"]
        if "artifact" in report:
            if not is_artifact(report["artifact"]):
                return None
            report["artifact"] = str(_copied(Path(report["artifact"]), out))
        if report["stopped"] is None:
            progress.say("this run has finished: its report is given again, and nothing is run")
        else:
            progress.say(f"nothing is left under this cap ({report['stopped']}): the report is given again. Raise the cap to continue")
        return report

    def keep(self, report: Mapping[str, Any]) -> None:
        """Writes the report of a run that is done, or that its caps ended."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_name(f".{_FILE}")
        whole = {"format": _FORMAT, "about": self.about, "caps": self.caps, "report": results(dict(report))}
        scratch.write_text(json.dumps(whole, default=str), "utf-8")
        scratch.replace(self.path)

    def _raised(self, before: Mapping[str, float | None]) -> bool:
        now = self.caps
        return any(cap is not None and (now[name] is None or now[name] > cap) for name, cap in before.items())


def _copied(artifact: Path, out: str | Path | None) -> Path:
    place = artifact if out is None else Path(out).resolve()
    if not place.exists():
        try:
            shutil.copytree(artifact, place)
        except OSError as error:
            raise ArtifactError(f"cannot write the artifact to {place}: {error}. Choose another folder with --out") from error
    return place if is_artifact(place) else artifact
