"""The program `math_qa`: answers a question with a number, with a calculator as its tool."""

from typing import Any, ClassVar

import dspy

from assay.programs import AgentParameters, ToolAgent
from assay.programs.calculator import calculator


class Question(dspy.Signature):  # type: ignore[misc]
    """Answer the question with a number."""

    question: str = dspy.InputField()
    answer: str = dspy.OutputField(pattern=r"^[0-9./-]{1,40}$")


class MathQA(ToolAgent):
    """Answers math questions with a calculator tool."""

    input_names: ClassVar = ("question",)

    def __init__(
        self,
        parameters: AgentParameters | None = None,
        prompt_format: str = "json",
        *,
        thinking: Any = None,
        policy: Any = None,
    ) -> None:
        expression = dspy.OutputField(desc="one arithmetic expression", pattern=r"^[0-9+*/^(). sqrt=-]{1,60}$")
        super().__init__(
            Question,
            [calculator],
            arguments={"calculator": {"expression": (str, expression)}},
            parameters=parameters,
            prompt_format=prompt_format,
            thinking=thinking,
            policy=policy,
        )

    def clean_arguments(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Removes the text after a `=`: small models append their own result."""
        return {key: str(value).split("=")[0].strip() for key, value in arguments.items()}
