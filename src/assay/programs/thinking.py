"""Thinking of programs: when a step thinks and stops, and the limits of the output field in which it does.

For models that think by themselves, `assay.models.thinking` sets the engine's own budget.
"""

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import dspy
from annotated_types import Ge, Gt, Le

from assay.errors import LoopStopped, NoJsonForm
from assay.models import supports
from assay.models.thinking import CHARACTERS, THOUGHT_FIELDS, Thinking, ThinkingError, native_thinking
from assay.support.options import Positive, Settings, Share
from assay.support.sections import LINES
from assay.support.values import json_text, json_value

# -- Dynamic allocation of thinking: whether a step thinks, when it stops, and how often a task is solved.
#
# The functions here decide; `Agent.decided` asks the model. Nothing is used unless an agent has a policy.


_NOT_ANSWERS = ("calls", "steps", "reasoning", "thought")  # fields of a prediction that are not part of its answer


class ThinkingPolicy(Settings):
    """When an agent thinks, and when it stops. Every default is off: without a policy each step thinks once."""

    probe_margin: Share | None = None
    """A step first chooses without a thought, and thinks only if the probabilities of the best two choices differ by
    less than this. Higher thinks more. Needs an engine with log-probabilities; others think always, and are not probed
    unless `stable` is set."""
    stable: Annotated[int, Ge(2)] | None = None
    """A thought ends once this many choices in a row were the same."""
    confidence: Share | None = None
    """A thought ends once the best two choices differ by at least this."""
    piece: Annotated[int, Ge(4)] = 32
    """Thinking tokens between two choices; used with `stable` or `confidence`."""
    samples: Positive = 1
    """How often a task is solved at most; the most frequent answer is returned."""
    posterior: Annotated[float, Gt(0.5), Le(1)] = 0.95
    """Solving ends once the probability that the most frequent answer stays ahead of the second is at least this.
    Source: Adaptive-Consistency, Beta stopping rule (arXiv 2305.11860)."""

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from their defaults, JSON-ready."""
        plain = asdict(type(self)())
        return {name: value for name, value in asdict(self).items() if value != plain[name]}

    @property
    def stops_early(self) -> bool:
        return self.stable is not None or self.confidence is not None


OFF = ThinkingPolicy()
"""The policy of an agent without one: each step thinks once."""
AUTO = ThinkingPolicy(probe_margin=0.6, stable=2)
"""The policy of an agent whose `thinking` is `auto` and that has none of its own."""


THRESHOLDS = {"probe_margin": (0.0, 1.0), "stable": (1, 6), "confidence": (0.0, 1.0), "samples": (1, 9)}
"""Thresholds of a policy that `assay tune` searches, with their ranges. 1 turns each of them off."""


@dataclass(frozen=True)
class Round:
    """One choice.

    Attributes:
        choice: what was chosen.
        margin: difference of the probabilities of the best two choices; None if the engine gives none.
        thought: what was thought before it; empty without a thought.
        result: the prediction, with the trace of its calls.
    """

    choice: Hashable
    margin: float | None = None
    thought: str = ""
    result: Any = None
    trace: Sequence[Any] = ()


@dataclass
class Thought:
    """A step's choice with the rounds that led to it."""

    rounds: list[Round] = field(default_factory=list)
    why: str = ""  # `probe`, `confident`, `stable`, `ended` by itself, `limit`, `loop` or `off`

    @property
    def last(self) -> Round:
        return self.rounds[-1]


def think(policy: ThinkingPolicy, budget: int, ask: Callable[[int, str], Round], *, measured: bool = True) -> Thought:
    """Thinks as far as the policy and the budget allow. The answer at the limit is the last choice.

    Args:
        measured: whether rounds have a margin. Without one a probe could not end the step, so it is made only to count
            towards `stable`.
        budget: thinking tokens of the step.
        ask: asks for a thought of at most so many tokens, after the thoughts so far, and then a choice; with 0 tokens
            for a choice alone.
    Raises:
        LoopStopped: the first thought was a loop, no choice was made before it, and the policy has no thresholds.
    """
    thought = Thought()
    probes = policy.probe_margin is not None and (measured or policy.stable is not None)
    if probes or budget == 0:
        thought.rounds.append(ask(0, ""))
        margin = thought.last.margin
        if budget == 0 or (margin is not None and margin >= (policy.probe_margin or 0.0)):
            thought.why = "off" if budget == 0 else "probe"
            return thought
    written: list[str] = []
    left = budget
    while not thought.why:
        tokens = min(policy.piece, left) if policy.stops_early else left
        try:
            thought.rounds.append(ask(tokens, " ".join(written)))
        except LoopStopped:
            if policy == OFF:
                raise
            thought.rounds += [] if thought.rounds else [ask(0, "")]  # the forced answer
            thought.why = "loop"
            break
        left -= tokens
        written.append(thought.last.thought)
        thought.why = _ended(policy, thought.rounds, left, tokens)
    return thought


def _ended(policy: ThinkingPolicy, rounds: list[Round], left: int, tokens: int) -> str:
    """Why thinking ends after these rounds; empty if it continues."""
    last = rounds[-1]
    if policy.confidence is not None and last.margin is not None and last.margin >= policy.confidence:
        return "confident"
    if policy.stable is not None and len(rounds) >= policy.stable:
        choices = {entry.choice for entry in rounds[-policy.stable :]}
        if len(choices) == 1:
            return "stable"
    if left <= 0:
        return "limit"
    repeats = any(last.thought.strip() == entry.thought.strip() for entry in rounds[:-1])
    # a thought well below its limit ended by itself; one that only repeats an earlier one brings nothing new
    return "ended" if repeats or len(last.thought) < 2 * tokens else ""


def margin_of(odds: Mapping[str, float]) -> float:
    """Difference of the two highest probabilities; 1 if there is one choice."""
    first, second = sorted([*odds.values(), 0.0], reverse=True)[:2]
    return first - second


def answer_key(prediction: Any) -> Hashable:
    """What is compared between the samples of a task: the answer's fields as text, ignoring case and white space."""
    fields_of = {name: value for name, value in prediction.items() if name not in _NOT_ANSWERS}
    return tuple((name, _text(value).casefold()) for name, value in sorted(fields_of.items()))


def _text(value: Any) -> str:
    """A value as text, with its keys in one order; one without a JSON form equals only itself."""
    try:
        plain = json_value(value)
    except NoJsonForm:
        return f"<{type(value).__name__} at {id(value):x}>"
    return " ".join((plain if isinstance(plain, str) else json_text(plain, sort_keys=True)).split())


def majority_is_sure(answers: Counter[Hashable], posterior: float) -> bool:
    """Whether more samples would hardly change the most frequent answer.

    With v and w votes for the best two, the chance of the best one beating the second has the posterior
    Beta(v + 1, w + 1); this is its probability above one half.
    """
    from scipy.special import betainc

    votes = [count for _, count in answers.most_common(2)]
    if not votes:
        return False
    first, second = votes[0], votes[1] if len(votes) > 1 else 0
    return bool(betainc(second + 1, first + 1, 0.5) >= posterior)


LIMIT = 16_384  # tokens; a larger budget is not a limit for the models that fit into one process


def thought_field(tokens: int) -> Any:
    """An output field for a thought of at most so many tokens."""
    tokens = min(tokens, LIMIT)
    return dspy.OutputField(desc=f"at most {tokens} tokens", max_length=CHARACTERS * tokens)


@functools.lru_cache(maxsize=256)
def with_thought(signature: Any, tokens: int, continued: bool = False) -> Any:
    """A signature with a thought of at most so many tokens before its outputs, none for 0.

    Args:
        continued: whether there are earlier thoughts, which become an input.
    """
    if continued:
        signature = signature.append("thoughts", dspy.InputField(desc="your thoughts so far"), str)
    return signature.prepend("thought", thought_field(tokens), str) if tokens else signature


def thinking_limit(lm: Any, default: int) -> int:
    """Tokens that a model may think per call: its budget, at most `LIMIT`; `default` without one."""
    thinking = getattr(lm, "thinking", None)
    limit = None if thinking is None else thinking.limit
    return default if limit is None else min(int(limit), LIMIT)


@dataclass(frozen=True)
class _Plan:
    """A call with its budget applied: `removed` is the thought field that it has no longer.

    `thinking` is what is left of the budget for the engine; None without one.
    """

    thinking: Thinking | None
    signature: Any
    removed: str = ""

    def options(self, lm: Any, lm_kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The model and the options of the call. A budget is set on the model: DSPy's requests have none."""
        if self.thinking is None or not hasattr(lm, "thinking"):
            return lm, lm_kwargs
        lm_kwargs = {name: value for name, value in lm_kwargs.items() if name != "thinking"}
        return (lm if lm.thinking == self.thinking else lm.copy(thinking=self.thinking)), lm_kwargs


class LimitsThoughts:
    """Mixin of adapters.

    If the model does not think by itself, the budget becomes the limit of the output field `thought` or `reasoning`;
    without a budget (`off`) the field is left out of the prompt and is "" in the prediction. A program without such a
    field does not think, which every budget allows.
    """

    without_limits = ""  # name of the format if it sends no schema that limits the length of a field

    def __call__(self, lm: Any, lm_kwargs: Any, signature: Any, demos: Any, inputs: Any) -> Any:
        plan = self._plan(lm, lm_kwargs, signature)
        lm, lm_kwargs = plan.options(lm, lm_kwargs)
        outputs = super().__call__(lm, lm_kwargs, plan.signature, demos, inputs)  # type: ignore[misc]
        return _restored(outputs, plan.removed)

    async def acall(self, lm: Any, lm_kwargs: Any, signature: Any, demos: Any, inputs: Any) -> Any:
        plan = self._plan(lm, lm_kwargs, signature)
        lm, lm_kwargs = plan.options(lm, lm_kwargs)
        outputs = await super().acall(lm, lm_kwargs, plan.signature, demos, inputs)  # type: ignore[misc]
        return _restored(outputs, plan.removed)

    def left_of(self, lm: Any, thinking: Thinking, signature: Any) -> Thinking:
        """What is left of a call's budget for the engine; `auto` if the thought field keeps it.

        Raises:
            ThinkingError: the field cannot keep it.
        """
        left = self._plan(lm, {"thinking": thinking}, signature).thinking
        return Thinking.auto() if left is None else left

    def _plan(self, lm: Any, lm_kwargs: dict[str, Any], signature: Any) -> _Plan:
        thinking = Thinking.of(lm_kwargs.get("thinking", getattr(lm, "thinking", None)))
        if thinking is None or thinking.is_auto or native_thinking(lm):
            return _Plan(thinking, signature)
        name = next((name for name in THOUGHT_FIELDS if name in signature.output_fields), "")
        if not name or (thinking.is_off and len(signature.output_fields) > 1):
            return _Plan(Thinking.auto(), signature.delete(name) if name else signature, name)
        limits = supports(lm, LINES) or getattr(lm, "supports_response_schema", False)
        if thinking.is_off or self.without_limits or not limits:
            reason, advice = "it is the only output field", ""
            if not thinking.is_off and self.without_limits:
                reason, advice = (
                    f"the prompt format {self.without_limits} sends no schema that limits it",
                    "Use json or lean",
                )
            elif not thinking.is_off:
                reason = f"{lm.model} is not known to take a schema that limits it"
                advice = "Name a server that does (`api_base=…`), or a model that thinks by itself"
            raise ThinkingError(thinking.value, f" cannot be kept in the field {name!r}: {reason}", advice)
        field, tokens = signature.output_fields[name], thinking.limit or 0
        if field.annotation is not str:
            raise ThinkingError(
                thinking.value, f" cannot limit the field {name!r} of type {field.annotation}: make it a str"
            )
        return _Plan(Thinking.auto(), _limited(signature, name, tokens))


def _limited(signature: Any, name: str, tokens: int) -> Any:
    at = list(signature.output_fields).index(name)
    return signature.delete(name).insert(at, name, thought_field(tokens), str)


def _restored(outputs: list[dict[str, Any]], removed: str) -> list[dict[str, Any]]:
    return [{removed: "", **output} for output in outputs] if removed else outputs
