"""Readings from a decision model: a client that answers typed questions with a probability per option.

DSPy detects such a client by `supports_decision_requests`; `dspy.experimental.TypeSafe` is one, over HTTP. The request
has the format of DSPy's own predictors. These clients are not `dspy.LM`s, so their calls are not in the store.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from assay.judges.reading import MASS
from assay.rubrics import JudgeSpec, NoGrade


def asks_decisions(lm: Any) -> bool:
    """Whether the client supports decision requests, `client(state=…, questions=…)`."""
    return getattr(lm, "supports_decision_requests", False) is True


def decision_reading(
    lm: Any, signature: Any, spec: JudgeSpec, inputs: Mapping[str, str], demos: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the client's probability of each label.

    Raises:
        NoGrade: the client returned no probability for a label.
    """
    state: dict[str, Any] = {
        "instructions": signature.instructions,
        "input_fields": _described(signature.input_fields),
        "inputs": dict(inputs),
    }
    if demos:
        state["demos"] = [dict(demo) for demo in demos]
    question = {
        "type": "choice",
        "instructions": spec.text,
        "criteria": {label: spec.anchors.get(label) for label in spec.scale},
    }
    probabilities = lm(state=state, questions={"verdict": question})["verdict"].get("probabilities") or {}
    if missing := [label for label in spec.scale if label not in probabilities]:
        raise NoGrade(f"the decision model returned no probability for {missing}, only {dict(probabilities)}")
    return {label: float(probabilities[label]) for label in spec.scale} | {"tokens": {}, MASS: 1.0}


def _described(fields: Mapping[str, Any]) -> str:
    """Names and descriptions of input fields, which are texts."""
    described = []
    for number, (name, field) in enumerate(fields.items(), 1):
        text = field.json_schema_extra["desc"]
        described.append(f"{number}. `{name}` (str): {'' if text == f'${{{name}}}' else text}")
    return "\n".join(described).strip()
