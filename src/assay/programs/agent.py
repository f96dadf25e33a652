"""The `Agent` base class: parameters, prompt format, thinking and context of a program. Tools: `tool_agent`."""

import copy
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Generic, Protocol, TypedDict, TypeVar, runtime_checkable

import anyio.to_thread
import dspy

from assay.errors import ProgramError
from assay.models import count_tokens, supports
from assay.models.dspy_seam import prompt_text
from assay.models.scope import alternatives_of, settings_for_threads
from assay.models.thinking import Thinking, native_thinking
from assay.programs.adapters import checked_format, listen_under, make_adapter
from assay.programs.estimate import choice_margin, logprobs_options
from assay.programs.parameters import AgentParameters, reasoning_tokens, review_rounds
from assay.programs.thinking import (
    AUTO,
    OFF,
    Round,
    ThinkingPolicy,
    answer_key,
    majority_is_sure,
    think,
    thinking_limit,
    with_thought,
)
from assay.support.values import value_text
from assay.traces.listening import with_lm
from assay.traces.places import current_rollout, note_carried

# -- Supports `dspy.streamify` for programs that run a copy of themselves.
#
# DSPy identifies the predictors of a stream by object identity in the program passed to `streamify`. Output of copied
# predictors is redirected to the listeners of the originals.


class _Renamed:
    """A stream that replaces the ids of copied predictors by those of their originals."""

    def __init__(self, stream: Any, ids: Mapping[int, int]) -> None:
        self._stream, self._ids = stream, ids

    async def send(self, item: Any) -> None:
        if (original := self._ids.get(getattr(item, "predict_id", None) or 0)) is not None:
            item.predict_id = original
        await self._stream.send(item)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def streaming_as(program: dspy.Module, copied: dspy.Module) -> AbstractContextManager[Any]:
    """Context in which the predictors of `copied` stream as those of `program`. Each call has its own copy."""
    stream = dspy.settings.send_stream
    if stream is None:
        return nullcontext()
    pairs = list(zip(program.predictors(), copied.predictors(), strict=True))
    listeners = list(dspy.settings.stream_listeners or ())
    for listener in tuple(listeners):
        for original, part in pairs:
            if listener.predict is original:
                # DSPy streams only predictors that have a listener; the chunks are sent to the original's listener
                duplicate = copy.copy(listener)
                duplicate.predict = part
                listeners.append(duplicate)
    context: AbstractContextManager[Any] = dspy.context(
        send_stream=_Renamed(stream, {id(part): id(original) for original, part in pairs}),
        stream_listeners=listeners,
    )
    return context


async def in_thread(function: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
    """Calls a function in a worker thread of AnyIO, with the caller's context.

    DSPy can stream from AnyIO's threads, but not from those of `asyncio.to_thread`.
    """
    return await anyio.to_thread.run_sync(functools.partial(function, *args, **inputs), abandon_on_cancel=True)


T = TypeVar("T")

WRITTEN_DECISIONS = "assay_written_decisions"
"""Key in DSPy's settings. If true, a tool agent executes the action that it wrote, regardless of probabilities and
threshold. Policy gradient training needs this: tokens are credited with the outcome that they caused."""
GUIDE = "assay_guide"  # key in DSPy's settings: the expected outputs of a training task, see `Agent.guided`


class Held(Generic[T]):
    """Keeps an object as it is where a program is copied, and out of DSPy's sight, which would optimise its prompts."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __deepcopy__(self, memo: object) -> "Held[T]":
        return self


def calls_so_far() -> int | None:
    """Number of LM calls of the rollout; None if it is not recorded."""
    rollout = current_rollout()
    return None if rollout is None else len(rollout.transitions)


@runtime_checkable
class BaseAgent(Protocol):
    """Interface of an agent that can be tuned. Both methods are required."""

    def execute(self, task: Any) -> Any:
        """Returns the agent's output for one task. An exception counts as a failed run."""
        raise NotImplementedError(f"{type(self).__name__} has no execute(task)")

    def set_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Sets some or all of the five agent parameters by name, for the following calls of `execute`."""
        raise NotImplementedError(f"{type(self).__name__} has no set_parameters(parameters)")


class AgentSettings(TypedDict, total=False):
    """Keyword arguments of every agent, see `Agent`."""

    parameters: AgentParameters | None
    prompt_format: str
    thinking: Any
    policy: Any


class Agent(dspy.Module):  # type: ignore[misc]
    """A `dspy.Module` with its own `agent_parameters` and prompt format.

    Its `thinking` is a budget that replaces the one of `reasoning_depth`: a `Thinking` or its short form (tokens, an
    effort word, `off`, `auto`). Its `policy` decides when a step thinks and stops: a `ThinkingPolicy` or its fields by
    name; with the budget `auto` the default is `assay.programs.thinking.AUTO`. Both are part of the program's state.

    Subclasses implement `solve(**inputs)` and put every constructor argument that is not an agent parameter into
    `config`, so that an artifact can rebuild the program. `parameters()` is DSPy's method and returns predictors.
    """

    input_names: ClassVar[tuple[str, ...]] = ()
    guided: ClassVar[bool] = False  # whether `solve` can follow the labels of a training task

    def __init__(
        self,
        parameters: AgentParameters | None = None,
        prompt_format: str = "json",
        *,
        thinking: Any = None,
        policy: Any = None,
    ) -> None:
        super().__init__()
        self.thinking, self.policy = Thinking.of(thinking), None if policy is None else ThinkingPolicy.of(policy)
        self.agent_parameters = AgentParameters.of({} if parameters is None else parameters)
        self.prompt_format = checked_format(prompt_format)
        self.config: dict[str, Any] = {}
        # set for a loaded artifact: returns the model to use if none is configured in DSPy
        self.own_lm: Callable[[], Any] | None = None

    def set_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Sets some or all of the five parameters by name.

        Raises:
            ParameterError: an unknown name or a value out of range; no parameter is changed.
        """
        self.agent_parameters = AgentParameters.of(parameters, base=self.agent_parameters)

    @property
    def rounds(self) -> int:
        """Refinement rounds that `reasoning_depth` sets; each takes one of `max_steps`."""
        return min(review_rounds(self.agent_parameters.reasoning_depth), self.agent_parameters.max_steps - 1)

    def execute(self, task: Any) -> Any:
        """Runs the agent on a `Task` or a mapping of inputs."""
        return self(**dict(getattr(task, "inputs", task)))

    def forward(self, **inputs: Any) -> Any:
        note_carried(self)
        lm = dspy.settings.lm if dspy.settings.lm is not None or self.own_lm is None else self.own_lm()
        if lm is None:
            raise ProgramError("no language model is configured: call dspy.configure(lm=assay.get_lm(NAME))")
        options: dict[str, Any] = {"temperature": self.agent_parameters.temperature}
        if self.thinking is not None:
            options["thinking"] = self.thinking
        lm = lm.copy(**options)
        if lm.kwargs.get("max_tokens") is not None:  # the thinking budget is in addition to the answer's limit
            lm.kwargs["max_tokens"] += thinking_limit(lm, reasoning_tokens(self.agent_parameters.reasoning_depth))
        adapter = make_adapter(self.prompt_format)
        listen_under(adapter)
        with dspy.context(adapter=adapter, **with_lm(lm)), settings_for_threads():
            return self._sampled(inputs) if self.thinking_policy.samples > 1 else self.solve(**inputs)

    @property
    def thinking_policy(self) -> ThinkingPolicy:
        """The agent's policy, or that of `auto`, or one in which nothing is dynamic."""
        if self.policy is not None:
            return self.policy
        return AUTO if self.thinking is not None and self.thinking.is_auto else OFF

    def _sampled(self, inputs: dict[str, Any]) -> Any:
        """The most frequent of several predictions; the first one of it. Its trace is the only one that is kept."""
        policy, lm = self.thinking_policy, dspy.settings.lm
        votes: Counter[Hashable] = Counter()
        first: dict[Hashable, tuple[Any, list[Any]]] = {}
        for sample in range(policy.samples):
            own = {} if sample == 0 else with_lm(lm.copy(rollout_id=sample))
            with dspy.context(trace=[], **own):
                prediction = self.solve(**inputs)
                key = answer_key(prediction)
                votes[key] += 1
                first.setdefault(key, (prediction, list(dspy.settings.trace)))
            if majority_is_sure(votes, policy.posterior):
                break
        prediction, trace = first[votes.most_common(1)[0][0]]
        if dspy.settings.trace is not None:
            dspy.settings.trace.extend(trace)
        return prediction

    def decided(
        self,
        ask: Callable[[Any, dict[str, Any], dict[str, Any]], tuple[Any, Hashable, float | None]],
        signature: Any,
        inputs: dict[str, Any],
        *,
        tokens: int,
        field: str = "",
        reads: bool = False,
    ) -> Round:
        """What the model chooses, after as much thinking as the policy allows; `result` is the prediction.

        Only the last choice is in the trace. A policy in training is credited with the tokens of its decision, so it
        makes one.

        Args:
            ask: (signature, inputs, options of the call) -> the prediction, the choice in it, and the difference of the
                probabilities of the best two choices, None if it is unknown.
            signature, inputs: without a thought.
            tokens: limit of the thought.
            field: the output field whose token alternatives are kept; "" keeps those of all.
            reads: request these alternatives.
        """
        policy = OFF if dspy.settings.get(WRITTEN_DECISIONS) else self.thinking_policy
        options = logprobs_options(dspy.settings.lm) if reads else {}

        def choose(limit: int, thoughts: str) -> Round:
            asked = {**inputs, "thoughts": thoughts} if thoughts else inputs
            with alternatives_of(field) if field else nullcontext(), dspy.context(trace=[]):
                prediction, choice, margin = ask(with_thought(signature, limit, bool(thoughts)), asked, options)
                trace = list(dspy.settings.trace)
            prediction._store.pop("logprobs", None)
            prediction._completions = None  # they contain the alternatives too, and a trace would store them
            return Round(choice, margin, str(prediction.get("thought") or ""), prediction, trace)

        last = think(policy, tokens, choose, measured=reads).last
        if dspy.settings.trace is not None:
            dspy.settings.trace.extend(last.trace)
        return last

    def reviewed(self, answer: T, review: Callable[[T], T]) -> T:
        """The answer after the rounds that `reasoning_depth` sets, or until a review leaves it as it is."""
        for _ in range(self.rounds):
            before, answer = answer, review(answer)
            if answer == before:
                break
        return answer

    async def aforward(self, **inputs: Any) -> Any:
        return await in_thread(self.forward, **inputs)

    def solve(self, **inputs: Any) -> Any:
        """Returns the prediction for one task. Implemented by subclasses."""
        raise NotImplementedError("a subclass of Agent must implement solve(**inputs)")

    @property
    def thought_tokens(self) -> int:
        """Limit of a step's thought field: the budget, or else that of `reasoning_depth`.

        It is 0 if the model thinks by itself within the budget.
        """
        lm, depth = dspy.settings.lm, reasoning_tokens(self.agent_parameters.reasoning_depth)
        return 0 if getattr(lm, "thinking", None) is not None and native_thinking(lm) else thinking_limit(lm, depth)

    @property
    def deep_thought_tokens(self) -> int:
        """As `thought_tokens`, for steps that are simple or many: 0 without a budget up to a `reasoning_depth` of 3."""
        has_budget = getattr(dspy.settings.lm, "thinking", None) is not None
        return self.thought_tokens if has_budget or self.agent_parameters.reasoning_depth > 3 else 0

    def fit_context(
        self,
        predictor: dspy.Predict,
        signature: Any,
        inputs: dict[str, Any],
        window: Sequence[Any],
        field: str,
        *,
        keep: int = 0,
        joined: Callable[[list[Any]], Any] = "\n".join,
    ) -> dict[str, Any]:
        """Returns inputs and `demos` whose rendered prompt has at most `context_length` tokens, if possible.

        The oldest observations are dropped first, then the oldest demonstrations. The task itself is never cut.

        Args:
            window: observations, oldest first; they become the input `field`.
            keep: number of the newest observations that are never dropped.
            joined: makes the input of the observations.
        """
        limit, remaining, demos = self.agent_parameters.context_length, list(window), list(predictor.demos)
        while True:
            filled = {**inputs, field: joined(remaining)}
            text = prompt_text(dspy.settings.adapter.format(signature, demos, filled))
            # a token has at least one byte, so the tokens of short prompts need not be counted
            if len(text.encode("utf-8", "replace")) <= limit or count_tokens(dspy.settings.lm, text) <= limit:
                break
            if len(remaining) > keep:
                remaining.pop(0)
            elif demos:
                demos.pop(0)
            else:
                break
        return {**filled, "demos": demos}


# -- Base class of agents that write all their fields in one call.


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
        if self.thinking_policy == OFF:
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
