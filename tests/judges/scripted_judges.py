"""Models that prefer, grade and list, for tests of the kinds of judges."""

import json
import re
from typing import Any

from assay.judges import (
    ListwiseJudge,
)


def prompt_field(request: Any, name: str) -> str:
    """The text of a named field of the request, without its fence."""
    return str(json.loads(re.search(rf'{name}: ("(?:[^"\\]|\\.)*")', request.messages[-1].text)[1]))


def listed(request: Any) -> dict[str, str]:
    """Letter -> text, as shown."""
    return {m[1]: json.loads(m[2]) for m in re.finditer(r'\b([A-T]): ("(?:[^"\\]|\\.)*")', request.messages[-1].text)}


def graded(change: Any = None) -> Any:
    grades = {"best": "yes", "middle": "partly", "worst": "no"}

    def script(request: Any) -> str:
        lines = [{"id": letter, "grade": grades[text]} for letter, text in listed(request).items()]
        return json.dumps({"grades": change(lines) if change else lines})

    return script


LIST = ListwiseJudge({"text": "Good?", "scale": ["no", "partly", "yes"]})
