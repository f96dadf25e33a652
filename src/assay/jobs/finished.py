"""The report of a run that has ended, stored in the run's folder. `--resume` returns it without calling a model.

Without the stored report an ended run would be replayed. A replay may call a model again, for a call that had failed
or in a program that is not deterministic, and would then exceed its cap. Runs that were killed, or whose model failed,
have no stored report: they are resumed.
"""

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from assay.errors import ArtifactError, AssayError, StopRun, unspoken
from assay.evaluation import Progress
from assay.models import Caps
from assay.sources.artifact_files import is_artifact
from assay.support.places import write_whole
from assay.support.refused import FULL_DISK, count_refused
from assay.support.scrubbing import error_text, message, results
from assay.support.values import digest_of, json_text
from assay.traces.store.listing import FAILURE

_FORMAT = 1
_FILE = "report.json"
_LONGEST = 4_000  # characters of an error


def keep_failure(folder: Path, error: BaseException | None) -> str:
    """Writes to a run's folder why the run ended, for its page; None removes it, as a resumed run may end well.

    Returns:
        The status of the run: stopped by the user or a cap, failed, or running.
    """
    file = folder / FAILURE
    if error is None:
        file.unlink(missing_ok=True)
        return "running"
    text = message(unspoken(error)) if isinstance(error, AssayError) else error_text(error)
    if text := text.strip():
        with suppress(OSError, AssayError):  # the disk may be full, and the run ends with this error anyway
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(file, text[:_LONGEST])
    return "stopped" if isinstance(error, StopRun | KeyboardInterrupt) else "failed"


class FinishedRun:
    """The stored report of a run.

    Args:
        folder: folder of the run.
        caps: caps of this attempt. If one is higher than when the run ended, the run continues.
        about: everything else that the report depends on. If it has changed, the stored report is not used.
        file: name of its file.
    """

    def __init__(self, folder: Path, *, caps: Caps, about: Mapping[str, Any], file: str = _FILE) -> None:
        self.path, self.caps = folder / file, asdict(caps)
        self.about = digest_of(dict(about))

    def report(self, progress: Progress, *, out: str | Path | None = None) -> dict[str, Any] | None:
        """The report, ready for JSON; None if the run has not ended or can continue.

        Args:
            out: folder to copy the artifact to.
        """
        if not self.path.is_file():
            return None
        content = json.loads(self.path.read_text(encoding="utf-8"))
        if content.get("format") != _FORMAT or content["about"] != self.about or self._raised(content["caps"]):
            return None
        report: dict[str, Any] = content["report"]
        if FULL_DISK in (report["stopped"] or ""):  # not a cap: it continues as soon as there is space
            return None
        if "artifact" in report:
            if not is_artifact(report["artifact"]):
                return None
            report["artifact"] = str(_copied(Path(report["artifact"]), out))
        if report["stopped"] is None:
            progress.say("this run has finished: its report is given again, and nothing is run")
        else:
            progress.say(
                f"nothing is left under this cap ({report['stopped']}): the report is given again. "
                "Raise the cap to continue"
            )
        return report

    def keep(self, report: Mapping[str, Any]) -> None:
        """Writes the report of a run that is done, or that was stopped by a cap."""
        content = {"format": _FORMAT, "about": self.about, "caps": self.caps, "report": results(dict(report))}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json_text(content))
        except (OSError, AssayError):  # the report itself must not be lost: it is returned all the same
            count_refused(full_disks=1)

    def _raised(self, before: Mapping[str, float | None]) -> bool:
        caps = self.caps
        return any(cap is not None and (caps[name] is None or caps[name] > cap) for name, cap in before.items())


def _copied(artifact: Path, out: str | Path | None) -> Path:
    place = artifact if out is None else Path(out).resolve()
    if not place.exists():
        try:
            shutil.copytree(artifact, place)
        except OSError as error:
            raise ArtifactError(
                f"cannot write the artifact to {place}: {error}. Choose another folder with `out=…`"
            ) from error
    return place if is_artifact(place) else artifact
