"""Recording in process: `with assay.record(...)` around an agent's run, `@assay.recorded` on an agent's function.

LM calls through any `dspy.LM` are recorded. Calls of other clients are added with `Recording.call`, or go through the
gateway (`assay serve`). Other calls are counted as unrecorded where assay notices them. Keywords are fields of a
rollout and of an LM call.
"""

import atexit
import dataclasses
import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypedDict, TypeVar, Unpack, get_args, get_origin, get_type_hints

import dspy

from assay.datasets import SPLITS, Task
from assay.datasets.tasks import consent_text, make_task
from assay.errors import AssayError, ConfigError, FailureKind
from assay.evaluation.session import stored_fields
from assay.evaluation.stored import write_score
from assay.jobs.loading import load_rubric
from assay.models import LanguageModel, with_recording
from assay.models.calls import failure_of_run, is_agent_failure
from assay.models.limits import OverTime
from assay.rubrics.loading import RubricSource
from assay.support.names import nearest, one_of
from assay.support.options import option_of
from assay.support.scrubbing import error_text
from assay.support.values import json_value
from assay.traces import Recorder, Rollout, Store, ToolCall, Transition, store_address
from assay.traces.messages.dialects import chat_messages
from assay.traces.records import Verdict, new_id
from assay.traces.shown import message_texts


class RolloutFields(TypedDict, total=False):
    """Fields of `assay.traces.Rollout` that the caller of `assay.record` may set."""

    id: str
    run_id: str
    task_id: str
    task_type: str
    group_id: str
    sample: int
    program: str
    program_version: str
    parameters: dict[str, Any]
    model: str
    adapters: tuple[str, ...]
    seed: int | None
    split: str
    phase: str
    source: str
    inputs: dict[str, Any]
    expected: dict[str, Any]
    metadata: dict[str, Any]
    prediction: dict[str, Any] | None
    status: str
    error: str | None
    failure: FailureKind | None
    score: float | None
    coverage: float | None
    verdicts: list[Verdict]
    human_rating: float | None
    tenant: str | None
    data_subject: str | None
    consent: Any
    started_at: float
    ended_at: float | None
    deployment: str | None
    stage: int | None
    arm: str | None
    propensity: float | None
    unit: str | None
    version: str | None


class CallFields(TypedDict, total=False):
    """Fields of `assay.traces.Transition` that the caller of `Recording.call` may set, and `finish_reason`."""

    finish_reason: str
    weights: str
    adapters: tuple[str, ...]
    error: str | None
    failure: FailureKind | None
    constrained: bool
    cached: bool
    prompt_tokens: int | None
    completion_tokens: int | None
    thinking_tokens: int | None
    shown_tasks: tuple[str, ...]
    token_ids: Sequence[int] | None
    logprobs: Sequence[float] | None
    latency_ms: float
    cost_usd: float | None
    started_at: float
    step_rewards: dict[str, float]
    agent: str


def check_fields(fields: Mapping[str, Any], allowed: type[Any], owner: str, *, arguments: Sequence[str] = ()) -> None:
    """Raises ConfigError if a name is not a key of the TypedDict `allowed`, naming the nearest one, or a text or a
    mapping is none.

    Args:
        owner: what the fields belong to, for the message: `a rollout`.
        arguments: other arguments of the function, which may have been meant too.
    """
    names = list(allowed.__annotations__)
    for name in sorted(set(fields) - set(names)):
        similar = nearest(name, (*arguments, *names))
        hint = f"Did you mean {similar!r}?" if similar else f"It has {', '.join(sorted(names))}."
        raise ConfigError(f"{owner} has no field {name!r}. {hint}")
    for name, kind in get_type_hints(allowed).items():
        members = get_args(kind) if get_origin(kind) is UnionType else (kind,)
        if name in fields and set(members) <= {str, NoneType}:
            option_of(name, kind, "").checked(fields[name])  # its default: empty texts are allowed
        is_mapping = any(get_origin(member) is dict for member in members)
        if is_mapping and not isinstance(fields.get(name), Mapping | None):
            raise ConfigError(f"must be a mapping, not {fields[name]!r}", field=name)


F = TypeVar("F", bound=Callable[..., Any])
_opened: dict[str, tuple[Store, Recorder]] = {}
_lock = threading.Lock()
_WRITTEN_S = 2.0  # time in which a store takes the rows of a rollout; one that is away does not stop the agent


class Recording:
    """An open rollout. `rollout` is its record, as it is in the store."""

    def __init__(self, rollout: Rollout, recorder: Recorder) -> None:
        self.rollout, self.recorder = rollout, recorder
        self._by_hand: set[int] = set()  # turns that `call` recorded or completed

    def call(
        self,
        messages: Sequence[Mapping[str, Any]],
        output: str,
        *,
        model: str,
        tools: Sequence[ToolCall] = (),
        reward: float | None = None,
        **fields: Unpack[CallFields],
    ) -> None:
        """Records an LM call that another client made. If the call was recorded already, because a `dspy.LM` made it,
        what is given is added to its record.

        Args:
            messages: the OpenAI chat messages of the request.
            output: the text of the answer.
            tools: tool calls that followed the answer.
            reward: step reward of the call.
            fields: further fields of `assay.traces.Transition`: `prompt_tokens`, `token_ids`, `logprobs`, …
        Raises:
            ConfigError: an unknown field.
        """
        check_fields(fields, CallFields, "an LM call")
        request = {"dialect": "chat", "body": {"model": model, "messages": [dict(message) for message in messages]}}
        finish_reason = fields.pop("finish_reason", "stop")
        transition = self._recorded_already(request, output)
        if transition is None:
            choice = {"message": {"role": "assistant", "content": output}, "finish_reason": finish_reason}
            transition = Transition(
                t=len(self.rollout.transitions),
                model=model,
                request=request,
                response={"body": {"choices": [choice]}},
                output=output,
                started_at=time.time(),
            )
            self.recorder.identify(self.rollout, transition)
            self.rollout.transitions.append(transition)
            self.recorder.recorded_by_hand()
        self._by_hand.add(transition.t)
        for name, value in fields.items():
            setattr(transition, name, value)
        transition.tools = list(tools) or transition.tools
        if not self.rollout.model:
            self.rollout.model = model
        if reward is not None:
            self.reward(reward, t=transition.t)
        elif self.recorder.store is not None:
            self.recorder.store.put_transition(self.rollout.id, transition)

    def _recorded_already(self, request: dict[str, Any], output: str) -> Transition | None:
        """The first call with these messages and this answer that was recorded by itself and is not claimed yet."""
        messages, text = message_texts(chat_messages(request)), output.strip()
        unclaimed = (
            transition
            for transition in self.rollout.transitions
            if transition.t not in self._by_hand and transition.error is None and transition.output.strip() == text
        )
        return next((one for one in unclaimed if message_texts(chat_messages(one.request)) == messages), None)

    def reward(self, value: float, *, t: int | None = None, criterion: str = "posted") -> None:
        """The rollout's score, in [0, 1]; with `t` a step reward of any size for that turn.

        Raises:
            ConfigError: not finite, out of range, or no such turn.
        """
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not abs(value) <= 1e6
            or (t is None and not 0 <= value <= 1)
        ):
            raise ConfigError(
                f"reward={value!r} must be {'a number between 0 and 1' if t is None else 'a finite number'}"
            )
        if t is None:
            self.rollout.score, self.rollout.coverage, self.rollout.rubric = (
                float(value),
                1.0,
                self.rollout.rubric or "posted",
            )
            return
        if not 0 <= t < len(self.rollout.transitions):
            raise ConfigError(f"t={t!r}: this rollout has {len(self.rollout.transitions)} turns, the first is 0")
        transition = self.rollout.transitions[t]
        transition.step_rewards[criterion] = float(value)
        if self.recorder.store is not None:
            self.recorder.store.put_transition(self.rollout.id, transition)

    def answer(self, prediction: Any) -> None:
        """Sets the agent's answer: its fields, or one value as the field `answer`."""
        self.rollout.prediction = dict(prediction.items()) if hasattr(prediction, "items") else {"answer": prediction}


def _check_values(fields: RolloutFields) -> None:
    """Checks the fields of a rollout, and stores `consent` in its stored form."""
    check_fields(fields, RolloutFields, "a rollout", arguments=("task", "rubric", "store"))
    for name in ("score", "human_rating"):
        value = fields.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1):
            raise ConfigError(f"{name}={value!r} must be a number between 0 and 1")
    if fields.get("split", "") not in ("", *SPLITS):
        raise ConfigError(f"split={fields['split']!r} {one_of(fields['split'], SPLITS, other='empty')}")
    if fields.get("consent") is not None:
        fields["consent"] = consent_text(fields["consent"])


def _check_store(store: Any) -> None:
    if not isinstance(store, str | Path | None):
        raise ConfigError(f"`store={store!r}` must be a database's file or URL, or None")


@contextmanager
def record(
    task: Task | Mapping[str, Any] | str | None = None,
    *,
    rubric: RubricSource | None = None,
    store: str | Path | None = None,
    **fields: Unpack[RolloutFields],
) -> Iterator[Recording]:
    """Opens a rollout. LM calls and tool calls of DSPy inside the block are its turns.

    The rollout is written when the block begins and when it ends; after the block it can be read from the store.

    Args:
        task: a `Task`, the task's inputs, a row `{"inputs": {…}, "expected": {…}}`, or one text.
        rubric: scores the answer when the block ends; one with judges is `assay.load_rubric(…, judge_model=NAME)`.
            Without one, give a `reward`; without both, it is unscored.
        fields: further fields of `assay.traces.Rollout`: `task_id`, `task_type`, `group_id`, `program`, `split`, …
            Those of a task (`inputs`, `expected`, `metadata`, …) replace the task's, for the rubric too.
    Raises:
        ConfigError: an unknown field, a value out of range, or no model for a judge of the rubric.
    """
    _check_values(fields)
    _check_store(store)
    recorded_task = _with_fields(task if isinstance(task, Task) else _task_from(task), fields)
    scoring = None if rubric is None else load_rubric(rubric)
    if scoring is not None:
        scoring.require_judges()
    opened, recorder = opened_store(store)
    values: dict[str, Any] = {
        "task_id": recorded_task.id,
        "group_id": recorded_task.id,
        "task_type": recorded_task.task_type,
        "inputs": json_value(recorded_task.inputs, placeholders=True),
        **stored_fields(recorded_task),
        "split": recorded_task.split or "",
        "source": "program",
        "phase": "record",
    }
    rollout = Rollout(**(values | dict(fields)))
    recording = Recording(rollout, recorder)
    with ExitStack() as inside:
        lm = dspy.settings.lm
        if isinstance(lm, dspy.LM) and not (
            isinstance(lm, LanguageModel) and recorder.observe in lm.recording.observers
        ):
            inside.enter_context(dspy.context(lm=with_recording(lm, observers=[recorder.observe])))
        inside.enter_context(recorder.active())
        try:
            with recorder.rollout(rollout, shared="id" in fields):
                try:
                    yield recording
                except Exception as error:
                    # A failure of the agent scores 0; one of the model or of this package leaves it unscored.
                    rollout.failure = failure_of_run(error, rollout.transitions) or FailureKind.AGENT
                    agent_failed = is_agent_failure(rollout.failure) and not isinstance(error, AssayError)
                    if isinstance(error, OverTime):  # the agent's failure, unless it was waiting for the model
                        agent_failed = not error.in_model_call
                    rollout.status, rollout.error = "failed" if agent_failed else "error", error_text(error)
                    raise
        finally:
            try:
                if scoring is not None and rollout.score is None and rollout.status in ("done", "failed"):
                    write_score(scoring, recorded_task, rollout, recorder)
            finally:  # also where a check grades outside of its range
                if rollout.prediction is not None:
                    rollout.prediction = json_value(rollout.prediction, placeholders=True)
                opened.put_rollout(rollout)
                opened.written(_WRITTEN_S)


def recorded(
    function: F | None = None,
    *,
    rubric: RubricSource | None = None,
    store: str | Path | None = None,
    **fields: Unpack[RolloutFields],
) -> Any:
    """Records each call of a function as a rollout: its arguments are the task's inputs, its result is the answer.

    Use it as `@assay.recorded` or `@assay.recorded(rubric="math_qa", task_type="sums")`, also on async functions. The
    arguments are those of `record`.
    """
    if function is None:
        return functools.partial(recorded, rubric=rubric, store=store, **fields)
    signature = inspect.signature(function)
    all_fields: RolloutFields = {"program": f"{function.__module__}:{function.__qualname__}", **fields}

    def task(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return Task(inputs={name: value for name, value in bound.arguments.items() if name != "self"})

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with record(task(args, kwargs), rubric=rubric, store=store, **all_fields) as run:
                result = await function(*args, **kwargs)
                run.answer(result)
            return result

        return awaited

    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"{function.__qualname__} gives its answer piece by piece: record it with `with assay.record(...)`"
        )

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with record(task(args, kwargs), rubric=rubric, store=store, **all_fields) as run:
            result = function(*args, **kwargs)
            run.answer(result)
        return result

    return called


def _task_from(task: Mapping[str, Any] | str | None) -> Task:
    if task is not None and not isinstance(task, str | Mapping):
        raise ConfigError(f"task={str(task)[:80]!r} must be a mapping of input names to values, or a text")
    if isinstance(task, Mapping) and isinstance(task.get("inputs"), Mapping):
        return make_task(task, where="task")
    return Task(inputs={} if task is None else {"input": task} if isinstance(task, str) else dict(task))


def _with_fields(task: Task, fields: RolloutFields) -> Task:
    """The task with the fields of it that the caller gave besides it."""
    names = ("task_type", "inputs", "expected", "metadata")
    given: dict[str, Any] = {name: value for name, value in fields.items() if name in names and value is not None}
    if fields.get("task_id"):
        given["id"] = fields["task_id"]
    return dataclasses.replace(task, **given)


def opened_store(target: str | Path | None) -> tuple[Store, Recorder]:
    """The store and recorder of this process for a database; they are closed when the process ends."""
    address = store_address(target)
    url = address.url if address.file is None else str(address.file.absolute())
    with _lock:
        if url not in _opened:
            store = Store(url)
            recorder = Recorder(store, run_id=f"record-{new_id()[:12]}")
            started = store.clock.now()
            _opened[url] = (store, recorder)

            def end() -> None:
                store.put_run(
                    recorder.run_id,
                    kind="record",
                    config={},
                    status="done",
                    started_at=started,
                    unrecorded=recorder.unrecorded,
                )
                store.close()

            atexit.register(end)
        return _opened[url]
