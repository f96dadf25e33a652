"""Readings from a decision model: a client that answers typed questions with a probability for each option and writes nothing.

DSPy knows such a client by its `supports_decision_requests`; `dspy.experimental.TypeSafe` is one, over HTTP. The request is the one
that DSPy's own predictors send. These clients are not `dspy.LM`s, so their calls are not in the store.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dspy.adapters.utils import get_field_description_string

from assay.judges.reading import MASS
from assay.rubrics import JudgeSpec, NoGrade

__all__ = ["asks_decisions", "decision_reading"]


def asks_decisions(lm: Any) -> bool:
    """Whether this client answers decision requests, `client(state=…, questions=…)`."""
    return getattr(lm, "supports_decision_requests", False) is True


def decision_reading(lm: Any, signature: Any, spec: JudgeSpec, shown: Mapping[str, str], demos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Probability of each word of the scale, as the client gives them.

    Raises:
        NoGrade: the client left out a word of the scale.
    """
    state: dict[str, Any] = {
        "instructions": signature.instructions, "input_fields": get_field_description_string(signature.input_fields), "inputs": dict(shown),
    }  # fmt: skip
    if demos:
        state["demos"] = [dict(demo) for demo in demos]
    question = {"type": "choice", "instructions": spec.text, "criteria": {label: spec.anchors.get(label) for label in spec.scale}}
    given = lm(state=state, questions={"verdict": question})["verdict"].get("probabilities") or {}
    if missing := [label for label in spec.scale if label not in given]:
        raise NoGrade(f"the decision model gave no probability for {missing}; it gave {dict(given)}")
    return {label: float(given[label]) for label in spec.scale} | {"tokens": {}, MASS: 1.0}
