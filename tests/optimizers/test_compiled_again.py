"""A compile of a program that was compiled before: its winner sets its own demonstrations at each call."""

import itertools
from pathlib import Path
from typing import Any, Literal

import dspy
import pytest

import assay
from assay.programs.compose import EnsembleProgram, NearestDemos
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


def nearest(program: dspy.Module, predictor: str = "predict") -> NearestDemos:
    """A winner that shows the nearest demonstrations; they say `old` to `red` only."""
    demos = [{"text": f"red {at}", "label": "old"} for at in range(4)]
    return NearestDemos(program, [{"key": row["text"], "demos": {predictor: [row]}} for row in demos], k=2)


def ensemble() -> EnsembleProgram:
    """A winner of three members with demonstrations of their own."""
    members = [Labels() for _ in range(3)]
    for at, member in enumerate(members):
        member.predict.demos = [dspy.Example(text=f"red {at}", label="old")]
    return EnsembleProgram(members)


@pytest.mark.parametrize(
    ("champion", "optimizer"),
    [
        (lambda: nearest(Labels()), "labeled"),
        (ensemble, "auto"),
        (ensemble, "labeled"),
        (lambda: nearest(ensemble(), "members[0].predict"), "auto"),
    ],
    ids=["nearest-labeled", "ensemble-auto", "ensemble-labeled", "both-auto"],
)
def test_demonstrations_of_a_winner_can_be_replaced(own_folder: Path, champion: Any, optimizer: str) -> None:
    rows = [
        {"text": f"{word} {at}", "label": label}
        for at in range(40)
        for word, label in (("red", "old"), ("blue", "new"))
    ]
    lm = scripted_lm(copying)
    report = assay.compile(
        champion(), rubric="classify", data=rows, lm=lm, optimizer=optimizer, max_search_calls=100, demos=4,
        prompt_format="lean", gate=False, test=False, sizes={"val": 12}, threads=1,
    )  # fmt: skip
    baseline = report.to_dict()["candidates"][0]
    assert baseline["name"] == "baseline"
    assert 0 < baseline["val_score"] < 1  # it says `old` to everything
    program = report.program
    with dspy.context(lm=lm):
        assert [program(text=f"{word} 99").label for word in ("red", "blue")] == ["old", "new"]
