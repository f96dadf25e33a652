"""The program `classify`: gives a text one of the labels that the data has."""

from collections.abc import Sequence
from typing import Literal, Unpack

import dspy

from assay.datasets import Task
from assay.errors import ProgramError
from assay.programs.agent import AgentSettings, OneCallAgent


class Classify(OneCallAgent):
    """Assigns one label to a text.

    Args:
        labels: the choices, at least two.
    """

    def __init__(self, labels: Sequence[str], **agent: Unpack[AgentSettings]) -> None:
        super().__init__(**agent)
        if not labels:
            raise ProgramError("classify reads its labels from the data: compile it and run the artifact")
        if len(set(labels)) < 2:
            raise ProgramError(f"classify needs at least two labels, the data has {sorted(set(labels))}")
        self.config = {"labels": list(labels)}
        self.choice = ("label", list(labels))
        choice = Literal[tuple(labels)]  # type: ignore[valid-type]
        fields = {"text": (str, dspy.InputField()), "label": (choice, dspy.OutputField())}
        self.predict = dspy.Predict(dspy.Signature(fields, f"Give the text its label: {', '.join(labels)}."))

    @classmethod
    def from_tasks(cls, tasks: Sequence[Task]) -> "Classify":
        """Creates the program with the labels of the tasks, in alphabetical order."""
        return cls(
            sorted({str(task.expected["label"]) for task in tasks if task.expected.get("label") not in (None, "")})
        )
