"""What all runs of one command share, and the wrapper that makes a program safe to hand to DSPy's optimizers."""

import copy
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import dspy
from dspy.utils.exceptions import AdapterParseError

from assay.datasets import Task
from assay.datasets.tasks import content_hash, owners_of
from assay.errors import AssayError, ConfigError, FailureKind
from assay.models import LanguageModel, Meter, sample_scope
from assay.models.failures import failure_of_run, is_own, stop_in
from assay.models.limits import DEFAULT_S, OverTime, current_limit, limited, within_limit
from assay.models.toollimits import ToolOverTime
from assay.optimizers.working import FirstRuns
from assay.programs import RANGES, AgentParameters, make_adapter, program_version
from assay.programs.compose import is_agent
from assay.programs.wrapping import as_prediction
from assay.rubrics import Failed, Rubric, ScoreResult
from assay.rubrics.scoring import mark_unscored
from assay.scrubbing import said
from assay.traces import Recorder, Rollout
from assay.traces.listening import listening

__all__ = ["CONTINUES", "Advance", "Measured", "Progress", "Session", "Student", "acting_parameters"]

CONTINUES = "What was run is kept; once that is mended, resume=True continues"

Advance = Callable[[int], None]


class Progress:
    """How a run shows what it is doing. This one shows nothing; the command line draws bars."""

    def say(self, text: str) -> None:
        """One line for the user."""

    def bar(self, name: str, total: int | None) -> AbstractContextManager[Advance]:
        """A bar while the context is open; call what it gives with the number of finished items. `total` None: not known."""
        return nullcontext(lambda _: None)


@dataclass(frozen=True)
class Measured:
    """What one run took. `calls`: of the program; `judge_calls`: of its judges; `tokens` and `latency_s`: of one call, None where unknown.
    `warnings`: what the rubric cannot see in its answer."""

    calls: float
    judge_calls: float
    tokens: float | None
    latency_s: float | None
    warnings: tuple[str, ...] = ()


@dataclass
class Session:
    """Model, rubric, recorder, meter and tasks of one command. Shared by all copies of a program."""

    lm: LanguageModel
    rubric: Rubric
    recorder: Recorder
    meter: Meter
    program_name: str = ""
    source: str = "program"  # of its rollouts; `judge` where a judge is compiled, audited or at work on rows
    seed: int = 0
    threads: int = 4
    progress: Progress = field(default_factory=Progress)
    tasks: dict[str, Task] = field(default_factory=dict)
    split_of: dict[str, str] = field(default_factory=dict)
    prompt_lm: LanguageModel | None = None  # proposes prompts; the program's own model where None
    judge_lm: LanguageModel | None = None  # decides the rubric's judge criteria
    own_models: bool = False  # compiled judges ask the model that they were calibrated with, at its own address, and not `judge_lm`
    measured: Measured | None = None  # by the preflight
    first_runs: FirstRuns | None = None  # after a preflight, until one of them gave an answer
    task_timeout: float = DEFAULT_S  # seconds of a run, a check or a judge, and a quarter of them of a tool; see `assay.models.limits`
    executor: Callable[..., Any] | None = None  # where evaluations run, see `assay.optimizers.executors`; threads where None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __deepcopy__(self, memo: object) -> "Session":
        return self

    def know(self, tasks: Sequence[Task], split: str | None = None) -> None:
        """Makes tasks known by their inputs, so that a run inside a teleprompter finds its task and its split."""
        for task in tasks:
            digest = task.content_hash
            self.tasks[digest] = task
            self.recorder.texts.add(digest, task.inputs)
            if split is not None:
                self.split_of[digest] = split

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts and labels what runs inside."""
        before, self.recorder.phase = self.recorder.phase, name
        try:
            with self.meter.during(name):
                yield
        finally:
            self.recorder.phase = before

    @contextmanager
    def context(self) -> Iterator[None]:
        """DSPy's settings for this session. Without its history of calls and its trace of predictions, which keep the last 10,000 of each:
        the store has them all. Optimizers that read a trace open one of their own."""
        settings = {"lm": self.lm, "num_threads": self.threads, "disable_history": True, "trace": UnreadTrace()}
        with dspy.context(**settings, **listening(self.recorder)):
            yield


class UnreadTrace(list[Any]):
    """Stands where DSPy keeps a trace that nobody reads; always empty."""

    def append(self, entry: Any) -> None:
        """Keeps nothing."""

    def extend(self, entries: Iterable[Any]) -> None:
        """Keeps nothing."""


def kept_of(task: Task) -> dict[str, Any]:
    """What a rollout keeps of its task beside the inputs; whose it is stands in the task's metadata, where it is known."""
    return {"expected": dict(task.expected), "metadata": dict(task.metadata), **owners_of(task.metadata)}


def has_tools(program: dspy.Module) -> bool:
    """Whether a program, or one inside it, calls tools."""
    return any(bool(getattr(module, "tools", None)) for module in (program, *(inner for _, inner in program.named_sub_modules())))


def acting_parameters(student: "Student") -> list[str]:
    """The agent parameters that do something in a program: a plain module has only a temperature."""
    if not is_agent(student.program):
        return ["temperature"]
    return [name for name in RANGES if name != "tool_usage_threshold" or has_tools(student.program)]


class Student(dspy.Module):  # type: ignore[misc]
    """A program under recording: every run is a rollout, scored at once; no failure escapes as an exception.

    DSPy's optimizers give up after ten errors, drop partly parsed rollouts and swallow exceptions. Here a failed run is
    a prediction without fields that says why, so they go on, and the rubric gives it 0 (or unscored, where the model's
    server failed and not the agent).
    """

    def __init__(self, program: dspy.Module, session: Session, *, adapter: str | None = None, sample: int | None = None) -> None:
        super().__init__()
        self.program, self.session, self.sample = program, session, sample
        self.adapter = adapter
        self.group: str | None = None  # rollouts of one task under one group stand together; by default all of the task
        self.temperature: float | None = None
        self.fixed_version: str | None = None  # while an evaluation runs, which changes no prompt
        self.has_tools = has_tools(program)  # a walk through the whole program: once, not once a rollout
        if adapter is not None:
            make_adapter(adapter)
            if is_agent(program):
                program.adapter = adapter

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Inside, the program's version is worked out once and not for each rollout."""
        self.fixed_version = program_version(self.program, self.settings["adapter"])
        try:
            yield
        finally:
            self.fixed_version = None

    def another(self, sample: int) -> "Student":
        """The same program, whose runs are the `sample`-th of their task: the cache keeps them apart."""
        other = copy.copy(self)
        other.sample = sample
        return other

    def set_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Sets agent parameters; a plain module has only a temperature.

        Raises:
            ParameterError: unknown or out of range.
            ConfigError: the program would ignore it.
        """
        if is_agent(self.program):
            self.program.set_parameters(parameters)
            return
        known = AgentParameters.of(parameters)
        if ignored := sorted(set(parameters) - {"temperature"}):
            raise ConfigError(
                f"{ignored} would have no effect: {type(self.program).__name__} is a plain dspy.Module, which has a temperature alone. "
                f"Write it as an assay.Agent to have {', '.join(name for name in RANGES if name != 'temperature')}."
            )
        if "temperature" in parameters:
            self.temperature = known.temperature

    @property
    def settings(self) -> dict[str, Any]:
        """What the program's DSPy state does not hold: adapter and parameters."""
        program = self.program
        parameters = program.agent_parameters.model_dump() if is_agent(program) else {}
        if not is_agent(program) and self.temperature is not None:
            parameters = {"temperature": self.temperature}
        return {"adapter": program.adapter if is_agent(program) else self.adapter, "parameters": parameters}

    def forward(self, **inputs: Any) -> dspy.Prediction:
        return self.run(inputs, content_hash(inputs))

    def run(self, inputs: dict[str, Any], digest: str) -> dspy.Prediction:
        """As a call, for evaluations: of inputs whose hash is known, and without what DSPy does around each module."""
        seconds = self.session.task_timeout
        with limited(None if current_limit() is None else seconds, tools_of=seconds):
            return self._recorded(inputs, digest)

    def _recorded(self, inputs: dict[str, Any], digest: str) -> dspy.Prediction:
        """A rollout: the run under recording, scored."""
        session, settings, group = self.session, self.settings, self.group
        task = session.tasks.get(digest)
        task_id = task.id if task else digest[:16]
        rollout = Rollout(
            task_id=task_id,
            task_type=task.task_type if task else "default",
            group_id=task_id if group is None else f"{group}/{task_id}",
            source=session.source,
            program=session.program_name,
            program_version=self.fixed_version or program_version(self.program, settings["adapter"]),
            parameters=settings["parameters"],
            model=session.lm.model,
            seed=session.seed,
            split=session.split_of.get(digest, ""),
            sample=self.sample or 0,
            inputs=inputs,
            **(kept_of(task) if task else {}),
        )
        if session.recorder.unrecorded.calls:  # a call past the recorder asks no meter: a cap holds between runs, not between calls
            session.meter.check()
        with session.recorder.rollout(rollout, then_scored=task is not None, content=digest):
            prediction = self._run(inputs, rollout)
            failed = getattr(prediction, "_failed", None)
            rollout.prediction = None if failed else dict(prediction.items())
        prediction._rollout, prediction._has_tools = rollout, self.has_tools
        if task is not None:
            with limited(session.task_timeout):  # also where the run has none
                self._score(task, prediction, rollout)
        return prediction

    def _run(self, inputs: dict[str, Any], rollout: Rollout) -> dspy.Prediction:
        try:
            with sample_scope(self.sample), self._settings():
                return within_limit(lambda: as_prediction(self.program(**inputs)), "the run")
        except (AssayError, KeyboardInterrupt):  # a missing package, a setting, the store: the user's to mend, and never a score
            raise
        except BaseException as error:  # of the program, or of whatever client it asks a model with; `sys.exit()` too is the program's failure
            if (stop := stop_in(error)) is not None:
                raise stop from error
            raised, failed = error, self._failure(error, inputs, rollout)
        rollout.status, rollout.error, rollout.failure = ("failed" if failed.own else "error"), failed.reason, failed.kind
        prediction = dspy.Prediction()
        prediction._failed, prediction._error = failed, raised
        return prediction

    def _failure(self, error: BaseException, inputs: dict[str, Any], rollout: Rollout) -> Failed:
        """What an exception of the program means: its kind decides whether the run scores 0 or is unscored."""
        if isinstance(error, OverTime) and not isinstance(error, ToolOverTime):  # its own failure, unless it waited for the model
            return Failed(str(error), own=not error.asking, kind=FailureKind.TIMEOUT)
        if isinstance(error, SystemExit):
            return Failed(f"the program ended itself with sys.exit({error.code!r})", own=True, kind=FailureKind.AGENT)
        kind = failure_of_run(error, rollout.transitions) or FailureKind.AGENT
        reason = said(error)
        if isinstance(error, AdapterParseError):
            self._keep_partial(error, inputs)
            self.session.recorder.unparsed(rollout, str(error.lm_response))
            reason = f"the answer could not be parsed: {str(error.lm_response)[:300]!r}"
        elif kind is FailureKind.CONTEXT:
            reason = f"the prompt is too long for the model: {error}"
        return Failed(reason, own=is_own(kind), kind=kind)

    def _settings(self) -> AbstractContextManager[Any]:
        changed: dict[str, Any] = {}
        if not is_agent(self.program):
            if self.adapter is not None:
                changed["adapter"] = make_adapter(self.adapter)
            if self.temperature is not None:
                changed["lm"] = dspy.settings.lm.copy(temperature=self.temperature)
        return dspy.context(**changed) if changed else nullcontext()

    def _keep_partial(self, error: AdapterParseError, inputs: dict[str, Any]) -> None:
        """Puts the answer that could not be parsed into the trace: reflecting optimizers learn from it."""
        if dspy.settings.trace is None:
            return
        for predictor in self.predictors():
            if predictor.signature.equals(error.signature):
                partial = {**dict.fromkeys(predictor.signature.output_fields, ""), **(error.parsed_result or {})}
                dspy.settings.trace.append((predictor, inputs, dspy.Prediction(**partial)))
                return

    def _score(self, task: Task, prediction: dspy.Prediction, rollout: Rollout) -> None:
        session = self.session
        rubric = session.rubric
        result: ScoreResult = rubric.score(task, prediction, rollout)
        prediction._result = result
        rollout.rubric = f"{rubric.name}@{rubric.version}"
        rollout.score = None if math.isnan(result.value) else result.value
        rollout.coverage, rollout.verdicts = result.coverage, list(result.verdicts)
        mark_unscored(rollout, rubric.criteria, result)
        session.recorder.scored(rollout, rubric.step_rewards(task, rollout))
