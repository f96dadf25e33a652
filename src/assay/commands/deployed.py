"""Agents in production: `assay.deployed(NAME)` runs the version that its alias and deployment say.

An agent that was written with anything runs as it is; the gateway gives its requests the texts of the version.
"""

import itertools
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any

import dspy
from annotated_types import Ge

from assay.commands.groups import InStore, Trusting
from assay.datasets import Task
from assay.datasets.tasks import known_outputs, other_inputs, own_containers, task_key
from assay.deployment.artifact import check_pinned, load_artifact
from assay.deployment.plan import Notifier
from assay.deployment.registry import Version
from assay.deployment.routing import Assignment, Router
from assay.errors import AssayError, ConfigError, DataError, DeploymentError, FailureKind
from assay.evaluation.stored import BackgroundScoring, task_of
from assay.jobs.groups import StoredJudge
from assay.jobs.loading import load_rubric
from assay.jobs.recording import opened_store, record
from assay.jobs.rescoring import named_judge, threads_for
from assay.models import LanguageModel, Meter, get_lm
from assay.models.calls import failure_of_program
from assay.models.limits import DEFAULT_S, OverTime, limited, within_limit
from assay.programs import program_fields, program_version
from assay.programs.foreign_agent import TextAgent
from assay.programs.isolation import running
from assay.programs.wrapping import as_prediction
from assay.rubrics import Rubric
from assay.rubrics.criteria import OutOfRange
from assay.rubrics.loading import RubricSource
from assay.support.options import Flag, Seconds, function_of
from assay.support.scrubbing import error_text
from assay.traces import Recorder, Rollout, Store
from assay.traces.gateway.texts import TextSwap
from assay.traces.listening import ToolReplay, listening, replacing
from assay.traces.records import new_id

_LOG = logging.getLogger("assay.deployed")
_QUIET_S = 60.0  # between two events that a version fell back


class LoadedVersion:
    """A version that is ready to run."""

    def __init__(self, folder: Path, *, replace_lms: bool = False) -> None:
        artifact = load_artifact(folder)
        if isinstance(artifact.program, TextAgent):
            raise DeploymentError(
                f"{folder} has texts of the agent {artifact.program.agent!r}, which runs where it is started",
                hint="The gateway puts them into its requests: assay serve --registered NAME",
            )
        self.program = artifact.runnable()
        self.fields = program_fields(artifact.program)
        self.name = str(artifact.manifest["program"])
        self.version = program_version(artifact.program, artifact.settings["adapter"])
        self.parameters = artifact.settings["parameters"]
        self.model = artifact.model
        self.lm: LanguageModel = get_lm(artifact.model, **artifact.endpoint.client(artifact.model))
        check_pinned(artifact, self.lm)
        self._settings = replacing(self.lm) if replace_lms else {"lm": self.lm}

    def run(
        self, task: Task, *, rubric: Any, store: str, replay: ToolReplay | None = None,
        later: BackgroundScoring | None = None, timeout_s: float = DEFAULT_S, **fields: Any,
    ) -> dspy.Prediction:  # fmt: skip
        """One recorded prediction; its attribute `rollout` has the id of the rollout.

        Args:
            replay: answers tools with side effects. If a call is not in it, the rollout ends as an error, unscored.
            later: scores the rollout after its end, in place of `rubric`.
            timeout_s: time limit of the program.
        Raises:
            DeploymentError: a call was not in `replay`.
            OverTime: the time limit was exceeded.
        """
        inputs: dict[str, Any] = dict(task.inputs)
        if self.fields is not None:  # no local file is read: a request may come from anywhere
            inputs = self.fields.converted(inputs, where="the request")
            task = replace(task, expected=self.fields.expected(task.expected))
        replaying = {} if replay is None else listening(replay)
        recording = None
        try:
            with dspy.context(**self._settings, **replaying), record(
                task, rubric=None if later is not None else rubric, store=store, program=self.name,
                program_version=self.version, parameters=self.parameters, model=self.model, **fields,
            ) as recording:  # fmt: skip
                try:
                    with limited(timeout_s, tools_of=timeout_s), running(self.program) as program:
                        prediction = within_limit(lambda: as_prediction(program(**own_containers(inputs))), "the agent")
                finally:
                    if replay is not None and replay.missed:  # also where the program has turned it into an answer
                        raise DeploymentError(
                            f"called {replay.missed[0]}, which has side effects, in an unrecorded way"
                        )
                recording.answer(prediction)
        except OutOfRange as error:  # of the rubric: whoever asked gets the answer
            if replay is not None or recording is None:
                raise
            _LOG.warning("a rollout stays unscored: %s", error)
        finally:
            if later is not None and recording is not None:
                later.add(task, recording.rollout)
        # attributes, not outputs: items() has the program's own fields
        object.__setattr__(prediction, "rollout", recording.rollout.id)
        object.__setattr__(prediction, "version", recording.rollout.version)
        return prediction

    def replay(self, original: Rollout, *, rubric: Any, store: str, **fields: Any) -> dspy.Prediction:
        """A recorded rollout, run again; its tools with side effects are answered from the recording.

        Raises:
            DeploymentError: such a tool was called in a way that was not recorded.
        """
        owners = {name: getattr(original, name) for name in ("tenant", "consent", "data_subject", "split")}
        return self.run(
            task_of(original), rubric=rubric, store=store, replay=ToolReplay(original.tools), group_id=original.id,
            **owners, **fields,
        )  # fmt: skip


class Fallbacks:
    """Counts how often the champion took over from another version, and tells it: the log, and the plan's hooks."""

    def __init__(self, router: Router) -> None:
        self.router, self.counts = router, dict[str, int]()
        self._notified_at: dict[str, float] = {}
        self._notifier: tuple[str, Notifier] | None = None
        self._lock = threading.Lock()

    def count(self, version: Version, reason: str) -> None:
        with self._lock:
            self.counts[version.name] = self.counts.get(version.name, 0) + 1
            now, last = time.monotonic(), self._notified_at.get(version.name)
            tells = last is None or now - last >= _QUIET_S
            if tells:
                self._notified_at[version.name] = now
        _LOG.warning("%s fell back to the champion: %s", version.name, reason)
        if tells:
            self._notify(version, reason)

    def _notify(self, version: Version, reason: str) -> None:
        """Tells the hooks of the deployment's plan."""
        deployment = self.router.deployment
        if deployment is None or not deployment.plan.events:
            return
        with self._lock:
            if self._notifier is None or self._notifier[0] != deployment.id:
                self._notifier = (deployment.id, Notifier(deployment.plan.events))
            notifier = self._notifier[1]
        notifier.notify(
            "fallback", agent=self.router.agent, deployment=deployment.id, version=version.name, reason=reason,
            count=self.counts[version.name],
        )  # fmt: skip


class DeployedAgent:
    """An agent in production. Each call is a recorded rollout of the version that the unit is assigned.

    A version that cannot be loaded, or whose model is down, falls back to the champion; `fallbacks` counts that, and
    such a rollout is not part of a comparison. `counts` has the number of rollouts of this process by version, arm and
    status (done, failed, error), `seconds` their duration by version and arm. A version of which `hanging` rollouts
    have run for `long_s` falls back too, so that its threads do not take those of the champion.
    """

    hanging: int = 64
    long_s: float = 60.0

    def __init__(self, settings: "Deployed") -> None:
        opened, self.recorder = opened_store(settings.store)
        self.store, self.agent = opened, settings.agent
        self.rubric = None if settings.rubric is None else _measure(settings.rubric, settings, self.recorder)
        self._scoring: BackgroundScoring | None = None
        if self.rubric is not None and (self.rubric.needs_judge or settings.judge_model is not None):
            self._scoring = BackgroundScoring(self.rubric, self.recorder, threads=threads_for(self.rubric))
        self.router = Router(opened.engine, settings.agent, refresh_s=settings.refresh_s)
        self.timeout_s, self.replace_lms = settings.timeout_s, settings.replace_lms
        self._open = defaultdict[str, dict[int, float]](dict)
        self._fallbacks = Fallbacks(self.router)
        self.fallbacks = self._fallbacks.counts
        self.counts = Counter[tuple[str, str, str]]()
        self.seconds = defaultdict[tuple[str, str], float](float)
        self._loaded: dict[str, LoadedVersion] = {}
        self._lock = threading.Lock()
        self._champion = self.router.champion  # the last one that could be loaded
        self._load(self._champion)  # a champion that cannot be loaded is an error now, not in the first call

    def __call__(
        self,
        inputs: Mapping[str, Any] | None = None,
        *,
        unit: str | None = None,
        task_type: str = "default",
        tenant: str | None = None,
        data_subject: str | None = None,
        consent: Any = None,
        expected: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> dspy.Prediction:
        """One prediction.

        Args:
            inputs: the inputs; or as keywords.
            unit: user or conversation, which keeps its version; by default each rollout is its own unit.
            expected: expected outputs, for a rubric.
        Raises:
            ConfigError: the inputs are not those of the program.
        Returns:
            The prediction; its attributes `rollout` and `version` have the rollout's id and version.
        """
        values = {**(inputs or {}), **fields}
        task = Task(
            id=task_key(values),
            task_type=task_type,
            inputs=values,
            expected=known_outputs(expected or {}),
            metadata={},
        )
        more = {"tenant": tenant, "data_subject": data_subject, "consent": consent}
        assignment = self.router.assign(new_id() if unit is None else unit, tenant=tenant, task_type=task_type)
        loaded, assignment = self._ready(assignment)
        if (known := loaded.fields) is not None:
            if known.missing(values) or values.keys() - known.inputs.keys():
                raise ConfigError(other_inputs(f"agent {self.agent}", list(known.inputs), values))
            try:  # a wrong value is the caller's fault, not the version's
                known.converted(values, where=f"agent {self.agent}")
            except DataError as error:
                raise ConfigError(str(error)) from None
        try:
            return self._run(loaded, assignment, task, more)
        except Exception as error:
            if assignment.fallback is None or not _is_down(error):
                raise
            self._fallbacks.count(assignment.version, error_text(error))
        champion = Assignment(version=assignment.fallback, unit=assignment.unit)
        return self._run(self._load(champion.version), champion, task, more)

    def wait(self, timeout_s: float = 60.0) -> bool:
        """Waits until judges have scored the rollouts so far. False if `timeout_s` is over before.

        A program that ends earlier leaves the others unscored, until `assay traces score`.
        """
        return self._scoring is None or self._scoring.wait(timeout_s)

    def _run(self, loaded: LoadedVersion, assignment: Assignment, task: Task, more: dict[str, Any]) -> dspy.Prediction:
        fields = {"phase": "deployed", **assignment.fields(), **more}
        began, status, key = time.monotonic(), "failed", id(task)
        with self._lock:
            self._open[assignment.version.name][key] = began
        try:
            prediction = loaded.run(
                task, rubric=self.rubric, store=self.store.url, later=self._scoring, timeout_s=self.timeout_s, **fields
            )
            status = "done"
            return prediction
        except Exception as error:
            status = "error" if _is_down(error) else "failed"
            raise
        finally:
            version, arm = assignment.version.name, assignment.arm or ""
            with self._lock:
                self._open[version].pop(key, None)
                self.counts[version, arm, status] += 1
                self.seconds[version, arm] += time.monotonic() - began

    def _ready(self, assignment: Assignment) -> tuple[LoadedVersion, Assignment]:
        """The loaded version; the champion where it cannot be loaded, or hangs; the last one where that cannot be."""
        if assignment.fallback is not None and self._hangs(assignment.version):
            hang = f"{self.hanging} of its rollouts have not ended for {self.long_s:g} s"
            self._fallbacks.count(assignment.version, hang)
            assignment = Assignment(version=assignment.fallback, unit=assignment.unit)
        failures: list[tuple[Version, AssayError]] = []
        for version in (assignment.version, assignment.fallback, self._champion):
            if version is None or any(version.name == failed.name for failed, _ in failures):
                continue
            try:
                loaded = self._load(version)
            except AssayError as error:
                failures.append((version, error))
                continue
            for failed, reason in failures:
                self._fallbacks.count(failed, str(reason))
            if failures:
                return loaded, Assignment(version=version, unit=assignment.unit)
            if assignment.fallback is None:
                self._champion = version
            return loaded, assignment
        raise failures[0][1]

    def _hangs(self, version: Version) -> bool:
        """Whether many rollouts of a version have been running for long, in this process."""
        with self._lock:  # they are in the order in which they began
            began = next(itertools.islice(self._open[version.name].values(), self.hanging - 1, None), None)
        return began is not None and time.monotonic() - began > self.long_s

    def _load(self, version: Version) -> LoadedVersion:
        with self._lock:
            if version.name not in self._loaded:
                folder = self.router.deployments.registry.folder_of(version)
                self._loaded[version.name] = LoadedVersion(folder, replace_lms=self.replace_lms)
            return self._loaded[version.name]


class DeployedTexts:
    """The texts of an agent in production that runs elsewhere, as it is, and calls the model through the gateway.

    Each of its rollouts gets the texts of the version that its unit is assigned, in every request. Where a version
    cannot be loaded it gets those of the champion, and is not part of a comparison.

    Args:
        agent: name, or `AGENT@VERSION` for one version without a deployment.
    Attributes:
        counts: number of rollouts of this process by version, arm and the status `begun`.
    Raises:
        DeploymentError: there is no such agent, it has no champion, or that cannot be loaded.
    """

    rubric = None
    seconds: Mapping[tuple[str, str], float] = {}

    def __init__(self, opened: Store, agent: str, *, refresh_s: float = 1.0) -> None:
        self.store, self.router = opened, Router(opened.engine, agent, refresh_s=refresh_s)
        self._fallbacks = Fallbacks(self.router)
        self.fallbacks = self._fallbacks.counts
        self.counts = Counter[tuple[str, str, str]]()
        self._loaded: dict[str, TextAgent] = {}
        champion = self.router.champion
        self._champion = champion, self._load(champion)

    def are_in(self, body: Mapping[str, Any]) -> bool:
        swap = self._champion[1].swap()
        swap.body(body)
        return bool(swap.seen)

    def of_champion(self) -> tuple[TextSwap, dict[str, Any]]:
        version, loaded = self._champion
        return loaded.swap(), {"phase": "deployed", "version": version.name}

    def count(self, fields: Mapping[str, Any]) -> None:
        self.counts[fields["version"], fields.get("arm") or "", "begun"] += 1

    def assigned(self, rollout: Rollout, unit: str) -> tuple[TextSwap, dict[str, Any]]:
        begun = rollout.version or ""  # by another gateway
        if begun.partition("@")[0] == self.router.agent:
            known = self.router.deployments.registry.version(begun)
            return self._load(known).swap(), {}
        assignment = self.router.assign(unit, tenant=rollout.tenant, task_type=rollout.task_type)
        try:
            loaded = self._load(assignment.version)
        except AssayError as error:
            self._fallbacks.count(assignment.version, str(error))
            assignment = Assignment(version=self.router.champion, unit=assignment.unit)
            loaded = self._load(assignment.version)
        if assignment.fallback is None:
            self._champion = assignment.version, loaded
        return loaded.swap(), {"phase": "deployed", **assignment.fields()}

    def wait(self, timeout_s: float) -> bool:
        return True

    def _load(self, version: Version) -> TextAgent:
        if version.name not in self._loaded:
            program = load_artifact(self.router.deployments.registry.folder_of(version)).program
            if not isinstance(program, TextAgent):
                raise DeploymentError(f"{version.name} is a program, and other versions of its agent are texts")
            self._loaded[version.name] = program
        return self._loaded[version.name]


def _is_down(error: BaseException) -> bool:
    """Whether the model failed, and not the program: a fault of the candidate's own code must not be hidden."""
    if isinstance(error, OverTime):
        return error.in_model_call
    return failure_of_program(error) in (FailureKind.MODEL, FailureKind.TIMEOUT)


def _measure(rubric: RubricSource, settings: StoredJudge, recorder: Recorder) -> Rubric:
    """The rubric with models for all of its judges; their calls are recorded."""
    judge = named_judge(settings, Meter(), observers=[recorder.observe])
    measure = load_rubric(rubric, judge_model=judge)
    measure.require_judges()
    if comparing := [c.name for c in measure.criteria if measure.compares(c.name)]:
        raise ConfigError(
            f"the rubric {measure.name!r} compares several outputs of a task in {', '.join(map(repr, comparing))}; "
            "production has one output of a task: use a judge that grades one output"
        )
    return measure


class Deployed(StoredJudge, InStore, Trusting):
    """An agent of the registry as a callable: `assay.deployed("support")(question="…", unit="user-7")`.

    Judges of the rubric score in threads, after the answer was returned; `DeployedAgent.wait` waits for them.

    Raises:
        DeploymentError: there is no such agent, or it has no champion.
        ConfigError: a criterion has a judge without a model, or one that compares outputs of one task; or a judge's
            model is named without a rubric.
    """

    agent: str = field(kw_only=False)
    """Name, or `AGENT@NUMBER`, `AGENT@ALIAS` for one version without a deployment."""

    rubric: Annotated[Any, Flag(metavar="R")] = None
    """Rubric that scores each rollout when it ends; without one rollouts are unscored until `assay traces score`. It is
    read once. If it has judges, they score in threads, after the answer was returned; so does a DSPy metric for which a
    model is named."""

    refresh_s: Annotated[float, Ge(0)] = 1.0
    """Seconds after which changes of aliases, deployments and flags are seen at the latest."""

    timeout_s: Seconds = DEFAULT_S
    """Time limit of one rollout. Beyond it the agent has failed, or the model if it was being asked."""

    replace_lms: bool = False
    """Call the version's model in place of the models that its program makes itself."""

    def check(self) -> None:
        if self.rubric is None and self.judge_model is not None:
            raise ConfigError("would have no effect without `rubric`", field="judge_model")

    def run(self) -> DeployedAgent:
        return DeployedAgent(self)


deployed = function_of(Deployed, "deployed")
