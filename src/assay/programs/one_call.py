"""Base class of agents that write all their fields in one call."""

from typing import Any, ClassVar

import dspy

from assay.models import supports
from assay.programs.agent import Agent
from assay.programs.allocation import ThinkingPolicy
from assay.programs.estimate import choice_margin
from assay.programs.thinking import with_thought
from assay.support.values import value_text


class OneCallAgent(Agent):
    """One call for all fields, with reasoning from depth 4 on, and reviews (see `review_rounds`).

    The text is the task, so it is never cut; demonstrations are dropped to fit `context_length`. There are no tools, so
    `tool_usage_threshold` has no effect.
    """

    input_names: ClassVar = ("text",)
    predict: dspy.Predict
    choice: tuple[str, list[str]] | None = None  # output field whose probabilities are read, with its values

    def solve(self, **inputs: Any) -> dspy.Prediction:
        tokens, names = self.deep_thought_tokens, list(self.predict.signature.output_fields)
        signature = self.predict.signature
        thinking = with_thought(signature, tokens)
        filled = self.fit_context(self.predict, thinking, inputs, [str(inputs["text"])], "text", keep=1)
        if self.thinking_policy == ThinkingPolicy():
            prediction = self.predict(signature=thinking, **filled)
        else:
            field, choices = self.choice or ("", [])
            reads = self.choice is not None and supports(dspy.settings.lm, "top_logprobs")

            def ask(own: Any, asked: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any, float | None]:
                made = self.predict(signature=own, config=options, **asked)
                margin = choice_margin(made, field, choices if reads else ())
                return made, tuple(value_text(made[name]) for name in names), margin

            read_field = field if reads else ""
            prediction = self.decided(ask, signature, filled, tokens=tokens, field=read_field, reads=reads).result
        reviewing = thinking.append("draft", dspy.InputField(desc="a first answer, to check and correct"), str)

        def review(answer: dict[str, Any]) -> dict[str, Any]:
            draft = "; ".join(f"{name}: {value_text(value)}" for name, value in answer.items())
            reviewed = self.predict(signature=reviewing, **{**filled, "draft": draft})
            return {name: reviewed[name] for name in names}

        return dspy.Prediction(**self.reviewed({name: prediction[name] for name in names}, review))
