"""Judges that know the right answer or grade everything alike, and rows for them."""

import contextlib
from pathlib import Path
from typing import Any

from assay.judges import PointwiseJudge
from assay.judges.quality.audit import BASES
from assay.testing import scripted_lm
from rigs.command_line import Done, assay_command

GOOD = PointwiseJudge({"text": "Is it a right answer?", "scale": ["no", "yes"]})


def knows(request: Any) -> dict[str, float]:
    """A model that knows the shipped answers and resists every attack."""
    text = request.messages[-1].text or ""
    right = any(str(base.good["output"])[-12:] in text and str(base.bad["output"]) not in text for base in BASES)
    return {"yes": 0.9, "no": 0.1} if right else {"yes": 0.1, "no": 0.9}


def options(tmp_path: Path, script: Any = knows, **more: Any) -> dict[str, Any]:
    return {"lm": scripted_lm(script, logprobs=True), "store": tmp_path / ".assay" / "a.db", **more}


def kind(request: Any) -> dict[str, float]:
    return {"yes": 0.95, "no": 0.05} if "lovely" in (request.messages[-1].text or "") else {"yes": 0.05, "no": 0.95}


def label(folder: Path, answers: str, *flags: str, judge: str = "Is it a right answer?") -> Done:
    with contextlib.chdir(folder):
        return assay_command("judge", "label", judge, "--store", str(folder / "a.db"), *flags, stdin=answers)
