"""Recording in process: `with assay.record(...)` around an agent's run, `@assay.recorded` on the function that is one.

LM calls through DSPy are seen by themselves, whoever made the `dspy.LM`; calls of other clients are told with `call`, or go to the
gateway (`assay serve`). Calls that went past are counted as unrecorded, where they can be seen.
"""

import atexit
import functools
import inspect
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import dspy

from assay.datasets import SPLITS, Task
from assay.datasets.tasks import consent_text, content_hash
from assay.deployment.artifact import demand_trust_around
from assay.errors import AssayError, ConfigError, FailureKind
from assay.models import LanguageModel, with_recording
from assay.models.failures import failure_of_run, is_own, unanswered
from assay.rubrics import Rubric, ScoreResult, load_rubric
from assay.rubrics.criteria import Failed
from assay.rubrics.scoring import mark_unscored
from assay.scrubbing import said
from assay.traces import Recorder, Rollout, Store, ToolCall, Transition, store_url
from assay.traces.ending import NO_ANSWER, NOT_RECORDED, final_answer, prediction_of
from assay.traces.records import Verdict, new_id

__all__ = ["Graded", "Recording", "grade_rollout", "record", "recorded", "score_rollout", "task_of"]

F = TypeVar("F", bound=Callable[..., Any])
_opened: dict[str, tuple[Store, Recorder]] = {}
_lock = threading.Lock()


class Recording:
    """An open rollout. `rollout` is what stands in the store."""

    def __init__(self, rollout: Rollout, recorder: Recorder) -> None:
        self.rollout, self._recorder = rollout, recorder

    def call(
        self,
        messages: Sequence[Mapping[str, Any]],
        output: str,
        *,
        model: str,
        tools: Sequence[ToolCall] = (),
        reward: float | None = None,
        **told: Any,
    ) -> None:
        """An LM call that another client made: OpenAI chat messages, and the text that came back.

        Args:
            reward: a step reward for it.
            told: further fields of `assay.traces.Transition`: `prompt_tokens`, `token_ids`, `logprobs`, `latency_ms`, …
        """
        request = {"dialect": "chat", "body": {"model": model, "messages": [dict(message) for message in messages]}}
        choice = {"message": {"role": "assistant", "content": output}, "finish_reason": told.pop("finish_reason", "stop")}
        transition = Transition(
            t=len(self.rollout.transitions), model=model, request=request, response={"body": {"choices": [choice]}}, output=output,
            tools=list(tools), started_at=told.pop("started_at", time.time()), **told,
        )  # fmt: skip
        self.rollout.transitions.append(transition)
        self._recorder.recorded_by_hand()
        if not self.rollout.model:
            self.rollout.model = model
        if reward is not None:
            self.reward(reward, t=transition.t)
        elif self._recorder.store is not None:
            self._recorder.store.put_transition(self.rollout.id, transition)

    def reward(self, value: float, *, t: int | None = None, criterion: str = "posted") -> None:
        """The rollout's score, in [0, 1]; with `t` a step reward of any size for that turn.

        Raises:
            ConfigError: not finite, out of range, or no such turn.
        """
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e6 or (t is None and not 0 <= value <= 1):
            raise ConfigError(f"reward={value!r} must be {'a number between 0 and 1' if t is None else 'a finite number'}")
        if t is None:
            self.rollout.score, self.rollout.coverage, self.rollout.rubric = float(value), 1.0, self.rollout.rubric or "posted"
            return
        if not 0 <= t < len(self.rollout.transitions):
            raise ConfigError(f"t={t!r}: this rollout has {len(self.rollout.transitions)} turns, the first is 0")
        transition = self.rollout.transitions[t]
        transition.step_rewards[criterion] = float(value)
        if self._recorder.store is not None:
            self._recorder.store.put_transition(self.rollout.id, transition)

    def answer(self, prediction: Any) -> None:
        """What the agent answered: its fields, or one value as `answer`."""
        self.rollout.prediction = dict(prediction.items()) if hasattr(prediction, "items") else {"answer": prediction}


@contextmanager
def record(
    task: Task | Mapping[str, Any] | str | None = None, *, rubric: Rubric | str | Path | None = None, store: str | Path | None = None, **told: Any
) -> Iterator[Recording]:
    """Opens a rollout: LM calls and tool calls of DSPy inside it are its turns. It is written when it opens and when it closes.

    Args:
        task: a `Task`, the task's inputs, or one text.
        rubric: scores what `answer` was given, when it closes; else give a `reward`, or none: the rollout is then unscored.
        told: further fields of `assay.traces.Rollout`: `task_id`, `task_type`, `group_id`, `program`, `split`, `data_subject`, …
    Raises:
        ConfigError: an unknown field.
    """
    if unknown := sorted(set(told) - set(inspect.signature(Rollout).parameters)):
        raise ConfigError(f"{unknown} are no fields of a rollout")
    for name in ("score", "human_rating"):
        value = told.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1):
            raise ConfigError(f"{name}={value!r} must be a number between 0 and 1")
    if told.get("split", "") not in ("", *SPLITS):
        raise ConfigError(f"split={told['split']!r} must be one of {', '.join(SPLITS)}, or none")
    if told.get("consent") is not None:
        told["consent"] = consent_text(told["consent"])
    known = task if isinstance(task, Task) else _task_from(task)
    if isinstance(rubric, str | Path):
        demand_trust_around(rubric)
    scoring = load_rubric(rubric) if isinstance(rubric, str | Path) else rubric
    opened, recorder = _store(store)
    fields = {"task_id": known.id, "group_id": known.id, "task_type": known.task_type, "inputs": dict(known.inputs), "expected": dict(known.expected),
              "metadata": dict(known.metadata), "source": "program", "phase": "record"}  # fmt: skip
    rollout = Rollout(**{**fields, **told})
    recording = Recording(rollout, recorder)
    with ExitStack() as inside:
        lm = dspy.settings.lm
        if isinstance(lm, dspy.LM) and not (isinstance(lm, LanguageModel) and recorder.observe in lm.recording.observers):
            inside.enter_context(dspy.context(lm=with_recording(lm, observers=[recorder.observe])))
        inside.enter_context(recorder.active())
        try:
            with recorder.rollout(rollout):
                try:
                    yield recording
                except Exception as error:  # of the agent itself, unless the model or this package failed: then it is no score
                    rollout.failure = failure_of_run(error, rollout.transitions) or FailureKind.AGENT
                    own = is_own(rollout.failure) and not isinstance(error, AssayError)
                    rollout.status, rollout.error = "failed" if own else "error", said(error)
                    raise
        finally:
            if scoring is not None and rollout.score is None and rollout.status in ("done", "failed"):
                score_rollout(scoring, known, rollout, recorder)
            opened.put_rollout(rollout)


def score_rollout(rubric: Rubric, task: Task, rollout: Rollout, recorder: Recorder, *, whole: bool = False) -> float:
    """Gives a rollout its score, verdicts and step rewards by a rubric, writes them, and returns the score (NaN: unscored).

    A rollout without a prediction has the answer that its LM calls ended with (`assay.traces.ending`); where they ended without one, that is
    the agent's failure: 0. It stays unscored where its last call failed, and where the record does not hold what it answered.

    Args:
        whole: where a final criterion that applies could not be decided, nothing is written and the rollout counts as unscored.
    """
    graded = grade_rollout(rubric, task, rollout, whole=whole)
    if graded.rewards is not None:
        recorder.scored(rollout, graded.rewards)
    return graded.value


@dataclass(frozen=True)
class Graded:
    """What a rubric says of a rollout: its score (NaN: unscored), the `result` (None: it was not asked), and the step rewards to write with
    it; `rewards` None: nothing is to be written."""

    value: float
    result: ScoreResult | None = None
    rewards: list[dict[str, float]] | None = None


def grade_rollout(rubric: Rubric, task: Task, rollout: Rollout, *, whole: bool = False) -> Graded:
    """As `score_rollout`, and writes nothing: for threads, whose scores are written in the order of the rollouts."""
    if rollout.prediction is None and rollout.status == "done" and not _ended(rollout):
        return Graded(math.nan)
    failed = Failed(rollout.error or "the agent gave no answer", kind=rollout.failure or FailureKind.AGENT)
    found = rollout.prediction if rollout.status == "done" and rollout.prediction is not None else failed
    result = rubric.score(task, found, rollout)
    rollout.score = None if math.isnan(result.value) else result.value
    mark_unscored(rollout, rubric.criteria, result)
    rollout.rubric, rollout.coverage, rollout.verdicts = f"{rubric.name}@{rubric.version}", result.coverage, list(result.verdicts)
    if whole and (math.isnan(result.value) or (result.failed is None and any(_undecided(verdict) for verdict in result.verdicts))):
        return Graded(math.nan, result)
    return Graded(result.value, result, rubric.step_rewards(task, rollout))


def _ended(rollout: Rollout) -> bool:
    """Gives a rollout without a prediction the answer of its LM calls. False where it is not known what they ended with."""
    if (broken := unanswered(rollout.transitions)) is not None:
        rollout.failure = broken
        return False
    if rollout.transitions and rollout.transitions[-1].error is None:
        ending = final_answer(rollout.transitions)
        if not ending.known:
            rollout.error = rollout.error or NOT_RECORDED
            return False
        rollout.prediction = prediction_of(ending.value)
        rollout.error = rollout.error or (NO_ANSWER if ending.value is None else None)
    return True


def _undecided(verdict: Verdict) -> bool:
    return verdict.scope == "final" and verdict.applies and verdict.grade is None


def task_of(rollout: Rollout) -> Task:
    """The task of a stored rollout, as far as the store knows it."""
    name = rollout.task_id or (content_hash(rollout.inputs)[:16] if rollout.inputs else "")  # `assay run` knows no task
    return Task(id=name, task_type=rollout.task_type, inputs=rollout.inputs, expected=rollout.expected, metadata=rollout.metadata)


def recorded(function: F | None = None, *, rubric: Rubric | str | Path | None = None, store: str | Path | None = None, **told: Any) -> Any:
    """Every call of the function is a rollout: its arguments are the task's inputs, what it returns is the answer.

    `@assay.recorded` or `@assay.recorded(rubric="math_qa", task_type="sums")`; also on async functions. Arguments as in `record`.
    """
    if function is None:
        return functools.partial(recorded, rubric=rubric, store=store, **told)
    signature = inspect.signature(function)
    options = {"rubric": rubric, "store": store, "program": f"{function.__module__}:{function.__qualname__}", **told}

    def inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return {name: value for name, value in bound.arguments.items() if name != "self"}

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with record(inputs(args, kwargs), **options) as run:
                found = await function(*args, **kwargs)
                run.answer(found)
            return found

        return awaited

    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{function.__qualname__} gives its answer piece by piece: record it with `with assay.record(...)`")

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with record(inputs(args, kwargs), **options) as run:
            found = function(*args, **kwargs)
            run.answer(found)
        return found

    return called


def _task_from(given: Mapping[str, Any] | str | None) -> Task:
    inputs = {} if given is None else {"input": given} if isinstance(given, str) else dict(given)
    return Task(id=content_hash(inputs)[:16] if inputs else "", inputs=inputs)


def _store(where: str | Path | None) -> tuple[Store, Recorder]:
    """One store and recorder a database and process, closed at its end."""
    url = store_url(where)
    if url.startswith("sqlite:///"):
        url = f"sqlite:///{Path(url.removeprefix('sqlite:///')).absolute()}"
    with _lock:
        if url not in _opened:
            store = Store(url)
            recorder = Recorder(store, run_id=f"record-{new_id()[:12]}")
            started = time.time()
            _opened[url] = (store, recorder)

            def end() -> None:
                store.put_run(recorder.run_id, kind="record", config={}, status="done", started_at=started, unrecorded=recorder.unrecorded)
                store.close()

            atexit.register(end)
        return _opened[url]
