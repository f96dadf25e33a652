"""The program `math_qa`: answers a question with a number, with a calculator as its tool."""

from typing import Any, ClassVar, Unpack

import dspy

from assay.programs import ToolAgent
from assay.programs.agent import AgentSettings
from assay.programs.calculator import calculator


class Question(dspy.Signature):  # type: ignore[misc]
    """Answer the question with a number."""

    question: str = dspy.InputField()
    answer: str = dspy.OutputField(pattern=r"^[0-9./-]{1,40}$")


class MathQA(ToolAgent):
    """Answers math questions with a calculator tool."""

    input_names: ClassVar = ("question",)

    def __init__(self, **agent: Unpack[AgentSettings]) -> None:
        expression = dspy.OutputField(desc="one arithmetic expression", pattern=r"^[0-9+*/^(). sqrt=-]{1,60}$")
        super().__init__(Question, [calculator], arguments={"calculator": {"expression": (str, expression)}}, **agent)

    def clean_arguments(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Removes the text after a `=`: small models append their own result."""
        return {key: str(value).split("=")[0].strip() for key, value in arguments.items()}
