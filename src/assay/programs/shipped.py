"""The shipped programs: `math_qa`, `classify`, `extract`."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Literal

import dspy

from assay.datasets import Task
from assay.errors import ProgramError
from assay.models import supports
from assay.models.scope import alternatives_of
from assay.programs.agent import Agent
from assay.programs.allocation import Round, ThinkingPolicy, margin_of, think
from assay.programs.calculator import calculator
from assay.programs.estimate import choice_probabilities, has_probabilities, logprobs_options
from assay.programs.parameters import AgentParameters
from assay.programs.thinking import thought_field
from assay.programs.tool_agent import ToolAgent
from assay.support.values import value_text

__all__ = ["Classify", "Extract", "MathQA"]


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


class _OnePredictor(Agent):
    """One call for all fields, with reasoning from depth 4 on, and reviews (see `review_rounds`).

    The text is the task, so it is never cut; demonstrations are dropped to fit `context_length`. There are no tools, so
    `tool_usage_threshold` has no effect.
    """

    input_names: ClassVar = ("text",)
    predict: dspy.Predict
    choice: tuple[str, list[str]] | None = None  # output field whose probabilities are read, with its values

    def solve(self, **inputs: Any) -> dspy.Prediction:
        names = list(self.predict.signature.output_fields)
        tokens = self._thought_tokens()
        signature = _with_thought(self.predict.signature, tokens, False)
        filled = self.fit_context(self.predict, signature, inputs, [str(inputs["text"])], "text", keep=1)
        if self.thinking_policy == ThinkingPolicy():
            prediction = self.predict(signature=signature, **filled)
        else:
            prediction = self._allocated(tokens, filled, names)
        reviewing = signature.append("draft", dspy.InputField(desc="a first answer, to check and correct"), str)
        for _ in range(self.rounds):
            draft = "; ".join(f"{name}: {value_text(prediction[name])}" for name in names)
            reviewed = self.predict(signature=reviewing, **{**filled, "draft": draft})
            unchanged = all(reviewed[name] == prediction[name] for name in names)
            prediction = reviewed
            if unchanged:
                break
        return dspy.Prediction(**{name: prediction[name] for name in names})

    def _allocated(self, tokens: int, filled: dict[str, Any], names: list[str]) -> Any:
        """The prediction after as much thinking as the policy allows."""
        reads = self.choice is not None and supports(dspy.settings.lm, "top_logprobs")
        config = logprobs_options(dspy.settings.lm) if reads else {}
        field, choices = self.choice or ("", [])

        def ask(limit: int, thoughts: str) -> Round:
            signature = _with_thought(self.predict.signature, limit, bool(thoughts))
            asked = {**filled, "thoughts": thoughts} if thoughts else filled
            with alternatives_of(field) if reads else nullcontext(), dspy.context(trace=[]):
                prediction = self.predict(signature=signature, config=config, **asked)
                trace = list(dspy.settings.trace)
            known = reads and has_probabilities(prediction)
            margin = margin_of(choice_probabilities(prediction, field, choices)) if known else None
            prediction._store.pop("logprobs", None)
            prediction._completions = None  # they contain the alternatives too, and a trace would store them
            answer = tuple(value_text(prediction[name]) for name in names)
            return Round(answer, margin, str(prediction.get("thought") or ""), (prediction, trace))

        prediction, trace = think(self.thinking_policy, tokens, ask, measured=reads).last.result
        if dspy.settings.trace is not None:
            dspy.settings.trace.extend(trace)
        return prediction

    def _thought_tokens(self) -> int:
        set_budget = getattr(dspy.settings.lm, "thinking", None) is not None
        low = not set_budget and self.agent_parameters.reasoning_depth <= 3  # simple tasks need no reasoning then
        return 0 if low else self.thought_tokens


def _with_thought(signature: Any, tokens: int, continued: bool) -> Any:
    if tokens:
        signature = signature.prepend("thought", thought_field(tokens), str)
    return signature.append("thoughts", dspy.InputField(desc="your thoughts so far"), str) if continued else signature


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
        policy: Any = None,
    ) -> None:
        super().__init__(parameters, prompt_format, thinking=thinking, policy=policy)
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
        policy: Any = None,
    ) -> None:
        super().__init__(parameters, prompt_format, thinking=thinking, policy=policy)
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
