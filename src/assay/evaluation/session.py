"""`Session`: the state that all runs of one command share. `RecordedProgram`: a program whose runs are recorded and
scored.

Does not choose tasks or compare programs.
"""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import dspy
from dspy.utils.exceptions import AdapterParseError, LMError

from assay.datasets import Task
from assay.datasets.tasks import TaskIndex, own_containers, owners_of, task_key
from assay.errors import AssayError, ConfigError, DataError, FailureKind, ModelError
from assay.evaluation.failures import Deaths, FirstRuns
from assay.evaluation.progress import Progress, SilentProgress
from assay.models import LanguageModel, Meter, Thinking, sample_scope
from assay.models.calls import failure_of_program, failure_of_run, is_agent_failure, is_refused, stop_in
from assay.models.hosted import error_reason
from assay.models.limits import DEFAULT_S, OverTime, ToolOverTime, current_limit, limited, within_limit
from assay.models.scope import looping_answers_as_text
from assay.programs import RANGES, AgentParameters, ToolAgent, make_adapter, program_fields, program_version
from assay.programs.compose import is_agent
from assay.programs.foreign_agent import TextAgent
from assay.programs.isolation import copied, running
from assay.programs.wrapping import as_prediction, is_wrapped
from assay.rubrics import Failed, Rubric
from assay.rubrics.rubric import score_rollout
from assay.rubrics.scoring import ScoredRun
from assay.sources.opened import watching
from assay.support.scrubbing import error_text, message
from assay.support.values import json_value
from assay.traces import Recorder, Rollout
from assay.traces.listening import replacing
from assay.traces.messages.endings import ending_of
from assay.traces.places import OpenRollout, current_open_rollout, current_rollout, note_carried

CONTINUES = "What was run is kept; after fixing the cause, continue with `resume=True`"


@dataclass(frozen=True)
class Measured:
    """Resource usage of one run, as the preflight measured it.

    Attributes:
        calls: LM calls of the program.
        judge_calls: LM calls of the rubric's judges.
        tokens: of one call; None where unknown.
        latency_s: of one call in seconds; None where unknown.
        warnings: fields that the rubric reads and the answer does not have.
    """

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
    progress: Progress = field(default_factory=SilentProgress)
    tasks: TaskIndex = field(default_factory=TaskIndex)
    given_lm: dspy.LM | None = None  # the caller's object that `lm` was made of
    prompt_lm: LanguageModel | None = None  # proposes prompts; the program's own model where None
    judge_lm: LanguageModel | None = None  # decides the rubric's judge criteria
    own_models: bool = False  # compiled judges use the model they were calibrated with, and not `judge_lm`
    measured: Measured | None = None  # by the preflight
    first_runs: FirstRuns | None = None  # after a preflight, until one of them gave an answer
    replace_lms: bool = False  # the program's own models are replaced by `lm`
    # Seconds that a run, a check or a judge may take; a tool may take a quarter of them. See `assay.models.limits`.
    task_timeout: float = DEFAULT_S
    thinking: Thinking | None = None  # budget of a plain module's calls; an agent has its own
    executor: Callable[..., Any] | None = None  # see `assay.evaluation.executors`; None runs in threads
    deaths: Deaths = field(default_factory=Deaths)  # tasks that ended the process that ran them
    only_own_models: bool = False  # models that the program makes itself answer all its calls, so `lm` is not called
    model_calls: int = 0  # of `lm` in runs of the program in this process
    own_calls: int = 0  # of models that the program made itself, likewise
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.recorder.meter, self.recorder.cache = self.meter, self.lm.recording.cache

    def __deepcopy__(self, memo: object) -> "Session":
        return self

    def register(self, tasks: Iterable[Task]) -> None:
        """Makes tasks known: teleprompters pass inputs alone, and the recorder finds the tasks that a prompt shows."""
        for task in tasks:
            self.tasks.add(task)
            self.recorder.texts.add(task.key, task.inputs)

    def count_calls(self, place: OpenRollout | None) -> None:
        """Counts the calls of a run of the program in its open rollout."""
        if place is not None:
            with self._lock:
                self.model_calls += len(place.rollout.transitions) - place.own_calls
                self.own_calls += place.own_calls

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Inside, calls are counted under this phase and rollouts are labelled with it."""
        before, self.recorder.phase = self.recorder.phase, name
        try:
            with self.meter.during(name):
                yield
        finally:
            self.recorder.phase = before

    @contextmanager
    def context(self) -> Iterator[None]:
        """DSPy's settings for this session.

        DSPy's call history and prediction trace are disabled: they would keep the last 10,000 entries in memory, and
        the store has all of them. Each run has its own, see `running`. Optimizers that read a trace open their own.
        """
        settings = {"lm": self.lm, "num_threads": self.threads, "disable_history": True, "trace": UnreadTrace()}
        with dspy.context(**settings), self.recorder.active():
            yield


class UnreadTrace(list[Any]):
    """Replaces DSPy's trace where nothing reads it; always empty."""

    def append(self, entry: Any) -> None:
        """Keeps nothing."""

    def extend(self, entries: Iterable[Any]) -> None:
        """Keeps nothing."""


def stored_fields(task: Task) -> dict[str, Any]:
    """Fields of a task that its rollout stores besides the inputs. The owners come from the task's metadata."""
    stored = {"expected": dict(task.expected), "metadata": dict(task.metadata)}
    return {**json_value(stored, placeholders=True), **owners_of(task.metadata)}


def has_tools(program: dspy.Module) -> bool:
    """Whether a program, or one inside it, calls tools."""
    return any(
        isinstance(module, ToolAgent) or bool(getattr(module, "tools", None))
        for module in (program, *(inner for _, inner in program.named_sub_modules()))
    )


def acting_parameters(recorded: "RecordedProgram") -> list[str]:
    """The agent parameters that affect a program. A plain `dspy.Module` has only `temperature`, which does nothing if
    the program's own models answer all its calls. A `TextAgent` has none: its settings are in its own code."""
    if isinstance(recorded.program, TextAgent):
        return []
    idle = {"temperature"} if recorded.session.only_own_models else set[str]()
    if not has_tools(recorded.program):
        idle.add("tool_usage_threshold")
    return [name for name in (RANGES if is_agent(recorded.program) else ["temperature"]) if name not in idle]


class RecordedProgram(dspy.Module):  # type: ignore[misc]
    """A program whose runs are recorded as rollouts and scored at once.

    A failed run returns a prediction without fields instead of raising: DSPy's optimizers stop after ten errors, drop
    partly parsed rollouts and swallow exceptions. The rubric scores a failed run 0, or leaves it unscored if the model
    server failed and not the agent.
    """

    def __init__(
        self, program: dspy.Module, session: Session, *, prompt_format: str | None = None, sample: int | None = None
    ) -> None:
        super().__init__()
        self.program, self.session, self.sample = program, session, sample
        self.prompt_format = prompt_format
        self.group: str | None = None  # prefix of the rollouts' group id; None: all rollouts of a task are one group
        self.temperature: float | None = None
        self.fixed_version: str | None = None  # set during an evaluation, which changes no prompt
        self.has_tools = has_tools(program)  # searches all submodules, so it is done once and not for each rollout
        self.fields = program_fields(program)
        if prompt_format is not None:
            make_adapter(prompt_format)
            if is_agent(program):
                program.prompt_format = prompt_format

    def __deepcopy__(self, memo: object) -> "RecordedProgram":
        other = copy.copy(self)
        other.program = copied(self.program)
        return other

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Inside, the program must not change: its version is computed once and not for each rollout."""
        self.fixed_version = program_version(self.program, self.settings["adapter"])
        try:
            yield
        finally:
            self.fixed_version = None

    def around(self, program: dspy.Module, *, prompt_format: str | None = None) -> "RecordedProgram":
        """Another program under the same recording, with this one's temperature.

        Args:
            prompt_format: None is this one's.
        """
        prompt_format = self.settings["adapter"] if prompt_format is None else prompt_format
        other = RecordedProgram(program, self.session, prompt_format=prompt_format)
        other.temperature = self.temperature
        return other

    def another(self, sample: int) -> "RecordedProgram":
        """The same program with a sample number; the cache keeps samples, and those of different tasks, apart."""
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
        checked = AgentParameters.of(parameters)
        if ignored := sorted(set(parameters) - {"temperature"}):
            raise ConfigError(
                f"{ignored} would have no effect: {type(self.program).__name__} is a plain dspy.Module, "
                "which has a temperature alone. "
                f"Write it as an assay.Agent to have {', '.join(name for name in RANGES if name != 'temperature')}."
            )
        if "temperature" in parameters:
            self.temperature = checked.temperature

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that DSPy's program state does not contain: `adapter` (prompt format), `parameters`, and the
        `thinking` of a plain module, if it is set."""
        program = self.program
        parameters = program.agent_parameters.model_dump() if is_agent(program) else {}
        if is_agent(program):
            return {"adapter": program.prompt_format, "parameters": parameters}
        if self.temperature is not None:
            parameters = {"temperature": self.temperature}
        thinking = self.session.thinking
        budget = {} if thinking is None else {"thinking": thinking.value}
        return {"adapter": self.prompt_format, "parameters": parameters, **budget}

    def forward(self, **inputs: Any) -> dspy.Prediction:
        return self._recorded(inputs, self.session.tasks.find(inputs)).attach()

    def run(self, task: Task) -> ScoredRun:
        """As a call with the task's inputs, without what DSPy does around each module. Two rows can have the same
        inputs, so a run of a row names its task."""
        return self._recorded(dict(task.inputs), task)

    def _recorded(self, inputs: dict[str, Any], task: Task | None) -> ScoredRun:
        seconds, deaths = self.session.task_timeout, self.session.deaths
        name = task.id if task else task_key(inputs)
        within = current_rollout() is not None or deaths.failure_of(name) is not None
        with (
            nullcontext() if within else deaths.running(name),
            limited(None if current_limit() is None else seconds, tools_of=seconds),
        ):
            return self._scored(inputs, task)

    def _scored(self, inputs: dict[str, Any], task: Task | None) -> ScoredRun:
        """A rollout: the run under recording, scored."""
        session, settings, group = self.session, self.settings, self.group
        key = task.key if task else task_key(inputs)
        task_id = task.id if task else key
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
            split=(task.split if task else None) or "",
            sample=self.sample or 0,
            inputs=json_value(inputs, placeholders=True),
            **(stored_fields(task) if task else {}),
        )
        # Unrecorded calls do not pass the meter, so their cap can only be checked between runs.
        if session.recorder.missed.calls:
            session.meter.check()
        with session.recorder.rollout(rollout, then_scored=task is not None, key=key):
            note_carried(self.program)
            run = self._run(inputs, rollout)
            run.task = task
            session.count_calls(current_open_rollout())
            if is_wrapped(self.program) and not rollout.transitions:
                rollout.model = ""  # it called no model, or one whose calls are not recorded
            if run.failed is None:
                rollout.prediction = json_value(dict(run.prediction.items()), placeholders=True)
        if task is not None:
            with limited(session.task_timeout):  # also where the run has none
                self._score(task, run)
        return run

    def _run(self, inputs: dict[str, Any], rollout: Rollout) -> ScoredRun:
        if (failed := self.session.deaths.failure_of(rollout.task_id)) is not None:
            rollout.status, rollout.error, rollout.failure = "failed", failed.reason, failed.kind
            return ScoredRun(dspy.Prediction(), rollout, self.has_tools, failed=failed)
        try:
            with (
                sample_scope(self.sample, rollout.task_id),
                looping_answers_as_text(False),
                self._settings(),
                watching(self.session.program_name),
                running(self.program) as program,
            ):
                prediction = within_limit(lambda: as_prediction(program(**self._given(inputs, rollout))), "the run")
                return ScoredRun(prediction, rollout, self.has_tools)
        except DataError as error:  # the task is malformed, which the program found
            error.args = (f"task {rollout.task_id!r}: {error}", *error.args[1:])
            raise
        except (AssayError, KeyboardInterrupt):
            raise  # a missing package, a wrong setting, the store: the user has to correct it; it is never a score
        except BaseException as error:
            # From the program or its model client; `sys.exit()` is a failure of the program too.
            if (stop := stop_in(error)) is not None:
                raise stop from error
            if self.session.meter.server_gone and is_refused(error):
                reason = f"the model's server is gone: {message(error_reason(error))}. {CONTINUES}"
                raise ModelError(reason) from error
            raised, failed = error, self._failure(error, inputs, rollout)
        rollout.status, rollout.error, rollout.failure = (
            ("failed" if failed.by_agent else "error"),
            failed.reason,
            failed.kind,
        )
        return ScoredRun(dspy.Prediction(), rollout, self.has_tools, failed=failed, error=raised)

    def _given(self, inputs: dict[str, Any], rollout: Rollout) -> dict[str, Any]:
        """The inputs in the types that the program declares: those of stored tasks are JSON values."""
        if self.fields is not None:
            inputs = self.fields.converted(inputs, where="its inputs")
        given: dict[str, Any] = own_containers(inputs)
        return given

    def _failure(self, error: BaseException, inputs: dict[str, Any], rollout: Rollout) -> Failed:
        """Classifies an exception of the program: the failure kind decides whether the run scores 0 or is unscored."""
        # A timeout is the program's failure, unless it was waiting for the model.
        if isinstance(error, OverTime) and not isinstance(error, ToolOverTime):
            return Failed(str(error), by_agent=not error.in_model_call, kind=FailureKind.TIMEOUT)
        if isinstance(error, SystemExit):
            return Failed(
                f"the program ended itself with sys.exit({error.code!r})", by_agent=True, kind=FailureKind.AGENT
            )
        kind = failure_of_run(error, rollout.transitions) or FailureKind.AGENT
        if kind is FailureKind.CAP and failure_of_program(error) is FailureKind.CAP:
            # `sys.exit()` in a group or before another exception: errors that end the job were raised above.
            kind = FailureKind.AGENT
        is_client_error = isinstance(error, LMError) and not is_agent_failure(kind)
        reason = message(error_reason(error)) if is_client_error else error_text(error)
        if isinstance(error, AdapterParseError):
            self._keep_partial(error, inputs)
            self.session.recorder.unparsed(rollout, str(error.lm_response))
            reason = f"the answer could not be parsed: {str(error.lm_response)[:300]!r}"
            if rollout.transitions and (ending := ending_of(rollout.transitions[-1])):
                reason = f"{ending}; {reason}"
        elif kind is FailureKind.CONTEXT:
            reason = f"the prompt is too long for the model: {error}"
        return Failed(reason, by_agent=is_agent_failure(kind), kind=kind)

    def _settings(self) -> AbstractContextManager[Any]:
        changed: dict[str, Any] = {}
        if not is_agent(self.program):
            if self.prompt_format is not None:
                changed["adapter"] = make_adapter(self.prompt_format)
            options = {"temperature": self.temperature, "thinking": self.session.thinking}
            if options := {name: value for name, value in options.items() if value is not None}:
                changed["lm"] = dspy.settings.lm.copy(**options)
        if self.session.replace_lms:
            changed |= replacing(changed.get("lm", dspy.settings.lm))
        return dspy.context(**changed) if changed else nullcontext()

    def _keep_partial(self, error: AdapterParseError, inputs: dict[str, Any]) -> None:
        """Adds an answer that could not be parsed to DSPy's trace: reflective optimizers (GEPA) learn from it."""
        if dspy.settings.trace is None:
            return
        for predictor in self.predictors():
            if predictor.signature.equals(error.signature):
                partial = {**dict.fromkeys(predictor.signature.output_fields, ""), **(error.parsed_result or {})}
                dspy.settings.trace.append((predictor, inputs, dspy.Prediction(**partial)))
                return

    def _score(self, task: Task, run: ScoredRun) -> None:
        rubric, recorder, rollout = self.session.rubric, self.session.recorder, run.rollout
        with recorder.checking(rollout, name=rubric.name):
            run.result = score_rollout(rubric, task, run.answer, rollout)
            rewards = rubric.step_rewards(task, rollout)
        recorder.scored(rollout, rewards)
