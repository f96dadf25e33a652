"""The shipped programs: `math_qa`, `classify`, `extract`."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import dspy

from assay.datasets import Task
from assay.errors import ProgramError
from assay.programs.agent import REVIEW_DEPTH, Agent, ToolAgent
from assay.programs.calculator import calculator
from assay.programs.parameters import AgentParameters
from assay.programs.thinking import thought_field

__all__ = ["Classify", "Extract", "MathQA"]


class Question(dspy.Signature):  # type: ignore[misc]
    """Answer the question with a number."""

    question: str = dspy.InputField()
    answer: str = dspy.OutputField(pattern=r"^[0-9./-]{1,40}$")


class MathQA(ToolAgent):
    """Answers math questions with a calculator tool."""

    input_names: ClassVar = ("question",)

    def __init__(
        self, parameters: AgentParameters | None = None, prompt_format: str = "json", *, thinking: Any = None
    ) -> None:
        expression = dspy.OutputField(desc="one arithmetic expression", pattern=r"^[0-9+*/^(). sqrt=-]{1,60}$")
        super().__init__(
            Question,
            [calculator],
            arguments={"calculator": {"expression": (str, expression)}},
            parameters=parameters,
            prompt_format=prompt_format,
            thinking=thinking,
        )

    def clean_arguments(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Removes the text after a `=`: small models append their own result."""
        return {key: str(value).split("=")[0].strip() for key, value in arguments.items()}


class _OnePredictor(Agent):
    """One call for all fields, with reasoning from depth 4 on and a review from `REVIEW_DEPTH` on (if `max_steps` > 1).

    The text is the task, so it is never cut; demonstrations are dropped to fit `context_length`. There are no tools, so
    `tool_usage_threshold` has no effect.
    """

    input_names: ClassVar = ("text",)
    predict: dspy.Predict

    def solve(self, **inputs: Any) -> dspy.Prediction:
        depth, steps = self.agent_parameters.reasoning_depth, self.agent_parameters.max_steps
        signature = self._with_thought(self.predict.signature)
        filled = self.fit_context(self.predict, signature, inputs, [str(inputs["text"])], "text", keep=1)
        prediction = self.predict(signature=signature, **filled)
        names = list(self.predict.signature.output_fields)
        if depth >= REVIEW_DEPTH and steps > 1:
            draft = "; ".join(f"{name}: {prediction[name]}" for name in names)
            reviewing = signature.append("draft", dspy.InputField(desc="a first answer, to check and correct"), str)
            prediction = self.predict(signature=reviewing, **{**filled, "draft": draft})
        return dspy.Prediction(**{name: prediction[name] for name in names})

    def _with_thought(self, signature: Any) -> Any:
        set_budget = getattr(dspy.settings.lm, "thinking", None) is not None
        low = not set_budget and self.agent_parameters.reasoning_depth <= 3  # simple tasks need no reasoning then
        tokens = 0 if low else self.thought_tokens
        return signature.prepend("thought", thought_field(tokens), str) if tokens else signature


class Classify(_OnePredictor):
    """Assigns one label to a text.

    Args:
        labels: the choices, at least two.
    """

    def __init__(
        self,
        labels: Sequence[str],
        parameters: AgentParameters | None = None,
        prompt_format: str = "json",
        *,
        thinking: Any = None,
    ) -> None:
        super().__init__(parameters, prompt_format, thinking=thinking)
        if not labels:
            raise ProgramError("classify reads its labels from the data: compile it and run the artifact")
        if len(set(labels)) < 2:
            raise ProgramError(f"classify needs at least two labels, the data has {sorted(set(labels))}")
        self.config = {"labels": list(labels)}
        choice = Literal[tuple(labels)]  # type: ignore[valid-type]
        fields = {"text": (str, dspy.InputField()), "label": (choice, dspy.OutputField())}
        self.predict = dspy.Predict(dspy.Signature(fields, f"Give the text its label: {', '.join(labels)}."))

    @classmethod
    def from_tasks(cls, tasks: Sequence[Task]) -> "Classify":
        """Creates the program with the labels of the tasks, in alphabetical order."""
        return cls(
            sorted({str(task.expected["label"]) for task in tasks if task.expected.get("label") not in (None, "")})
        )


class Extract(_OnePredictor):
    """Extracts typed fields from a text.

    Args:
        fields: field name -> JSON type (`string`, `integer`, `number`, `boolean`).
    """

    def __init__(
        self,
        fields: dict[str, str],
        parameters: AgentParameters | None = None,
        prompt_format: str = "json",
        *,
        thinking: Any = None,
    ) -> None:
        super().__init__(parameters, prompt_format, thinking=thinking)
        kinds = {"string": str, "integer": int, "number": float, "boolean": bool}
        if not isinstance(fields, dict):
            raise ProgramError(f"fields={fields!r} must be a mapping of names to types, such as {{'city': 'string'}}")
        if not fields:
            raise ProgramError("extract reads its fields from the data: compile it and run the artifact")
        if unknown := sorted(set(fields.values()) - kinds.keys()):
            raise ProgramError(f"extract needs fields of the types {sorted(kinds)}, got {unknown}")
        if clash := {"text", "thought", "draft"} & fields.keys():
            raise ProgramError(f"extract cannot have fields named {sorted(clash)}")
        self.config = {"fields": dict(fields)}
        outputs = {
            name: (kinds[kind], dspy.OutputField(max_length=500) if kind == "string" else dspy.OutputField())
            for name, kind in fields.items()
        }
        self.predict = dspy.Predict(
            dspy.Signature({"text": (str, dspy.InputField()), **outputs}, f"Extract {', '.join(fields)} from the text.")
        )

    @classmethod
    def from_tasks(cls, tasks: Sequence[Task]) -> "Extract":
        """Creates the program with the expected fields of the tasks; a field with several types is a string."""
        types: dict[str, set[str]] = {}
        names = {bool: "boolean", int: "integer", float: "number"}
        for task in tasks:
            for name, value in task.expected.items():
                types.setdefault(name, set()).add(names.get(type(value), "string"))
        return cls({name: kinds.pop() if len(kinds) == 1 else "string" for name, kinds in sorted(types.items())})
