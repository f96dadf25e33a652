"""Base class of agents that write all their fields in one call."""

from contextlib import nullcontext
from typing import Any, ClassVar

import dspy

from assay.models import supports
from assay.models.scope import alternatives_of
from assay.programs.agent import Agent
from assay.programs.allocation import Round, ThinkingPolicy, margin_of, think
from assay.programs.estimate import choice_probabilities, has_probabilities, logprobs_options
from assay.programs.thinking import thought_field
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
