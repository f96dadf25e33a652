"""A compile of a program that was compiled before: its winner sets its own demonstrations at each call."""

import itertools
from pathlib import Path
from typing import Any, Literal

import dspy
import pytest

import assay
from assay.programs.compose import NearestDemos
from assay.testing import scripted_lm


class Labels(dspy.Module):  # type: ignore[misc]
    """One predictor."""

    def __init__(self) -> None:
        super().__init__()
        fields = {"text": (str, dspy.InputField()), "label": (Literal["old", "new"], dspy.OutputField())}
        self.predict = dspy.Predict(dspy.Signature(fields, "Give the text its label."))

    def forward(self, text: str) -> Any:
        return self.predict(text=text)


def copying(request: Any) -> str:
    """The label of the last demonstration with the same first word; `old` without one."""
    turns = [str(message.text or "") for message in request.messages]
    if "text: " not in turns[-1]:
        return "no proposal"
    word = turns[-1].partition("text: ")[2].split()[0]
    labels = [answer for text, answer in itertools.pairwise(turns) if f"text: {word}" in text]
    return labels[-1] if labels else "label: old"


@pytest.mark.parametrize("optimizer", ["auto", "labeled"])
def test_demonstrations_of_a_winner_with_nearest_ones_can_be_replaced(own_folder: Path, optimizer: str) -> None:
    pool = [{"key": f"red {at}", "demos": {"predict": [{"text": f"red {at}", "label": "old"}]}} for at in range(4)]
    champion = NearestDemos(Labels(), pool, k=2)
    rows = [
        {"text": f"{word} {at}", "label": label}
        for at in range(40)
        for word, label in (("red", "old"), ("blue", "new"))
    ]
    lm = scripted_lm(copying)
    report = assay.compile(
        champion, rubric="classify", data=rows, lm=lm, optimizer=optimizer, max_search_calls=120, demos=4,
        prompt_format="lean", gate=False, test=False, sizes={"val": 12}, threads=1,
    )  # fmt: skip
    baseline = report.to_dict()["candidates"][0]
    assert baseline["name"] == "baseline"
    assert 0 < baseline["val_score"] < 1  # it says `old` to everything
    program = report.program
    with dspy.context(lm=lm):
        assert [program(text=f"{word} 99").label for word in ("red", "blue")] == ["old", "new"]
