"""Public API for agents in production: `assay.deployed(NAME)` runs the version that its alias and deployment say."""

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dspy

from assay.api.record import opened_store, record
from assay.datasets import Task
from assay.datasets.tasks import content_hash
from assay.deployment.artifact import check_pinned, load_artifact
from assay.deployment.events import Notifier
from assay.deployment.registry import Version
from assay.deployment.routing import Assignment, Router
from assay.errors import AssayError, ConfigError, DeploymentError, FailureKind
from assay.models import LanguageModel, get_lm
from assay.models.failures import failure_of_program
from assay.programs import program_inputs, program_version
from assay.programs.wrapping import as_prediction
from assay.rubrics import Rubric
from assay.sources.trust import trusts
from assay.support.scrubbing import error_text
from assay.traces.listening import listening
from assay.traces.records import new_id
from assay.traces.replaying import ToolReplay

__all__ = ["DeployedAgent", "LoadedVersion", "deployed"]

_LOG = logging.getLogger("assay.deployed")
_QUIET_S = 60.0  # between two events that a version fell back


class LoadedVersion:
    """A version that is ready to run."""

    def __init__(self, folder: Path) -> None:
        artifact = load_artifact(folder)
        self.program = artifact.runnable()
        self.inputs = program_inputs(artifact.program)
        self.name = str(artifact.manifest["program"])
        self.version = program_version(artifact.program, artifact.settings["adapter"])
        self.parameters = artifact.settings["parameters"]
        self.model = artifact.model
        self.lm: LanguageModel = get_lm(artifact.model, **artifact.endpoint.client(artifact.model))
        check_pinned(artifact, self.lm)

    def run(
        self, task: Task, *, rubric: Any, store: str, replay: ToolReplay | None = None, **fields: Any
    ) -> dspy.Prediction:
        """One recorded prediction; its attribute `rollout` has the id of the rollout.

        Args:
            replay: answers tools with side effects. If a call is not in it, the rollout ends as an error, unscored.
        Raises:
            DeploymentError: a call was not in `replay`.
        """
        replaying = {} if replay is None else listening(replay)
        with dspy.context(lm=self.lm, **replaying), record(
            task, rubric=rubric, store=store, program=self.name, program_version=self.version,
            parameters=self.parameters, model=self.model, **fields,
        ) as recording:  # fmt: skip
            try:
                prediction = as_prediction(self.program(**task.inputs))
            finally:
                if replay is not None and replay.missed:  # also where the program has turned it into an answer
                    raise DeploymentError(f"called {replay.missed[0]}, which has side effects, in an unrecorded way")
            recording.answer(prediction)
        # attributes, not outputs: items() has the program's own fields
        object.__setattr__(prediction, "rollout", recording.rollout.id)
        object.__setattr__(prediction, "version", recording.rollout.version)
        return prediction


class DeployedAgent:
    """An agent in production. Each call is a recorded rollout of the version that the unit is assigned.

    A version that cannot be loaded, or whose model is down, falls back to the champion; `fallbacks` counts that, and
    such a rollout is no part of a comparison. `counts` has the number of rollouts of this process by version, arm and
    status (done, failed, error), `seconds` their duration by version and arm.

    Args:
        agent: name, or `AGENT@VERSION`.
        store: see `assay.Store`.
        rubric: scores each rollout when it ends; without one rollouts are unscored until `assay traces score`.
        refresh_s: seconds after which changes of aliases, deployments and flags are seen at the latest.
    """

    def __init__(
        self, agent: str, *, store: str | Path | None = None, rubric: Rubric | str | Path | None = None,
        refresh_s: float = 1.0,
    ) -> None:  # fmt: skip
        opened, self.recorder = opened_store(store)
        self.store, self.rubric, self.agent = opened, rubric, agent
        self.router = Router(opened.engine, agent, refresh_s=refresh_s)
        self.fallbacks: dict[str, int] = {}
        self.counts = Counter[tuple[str, str, str]]()
        self.seconds = defaultdict[tuple[str, str], float](float)
        self._notified_at: dict[str, float] = {}
        self._notifier: tuple[str, Notifier] | None = None
        self._loaded: dict[str, LoadedVersion] = {}
        self._lock = threading.Lock()
        self._load(self.router.champion)  # a champion that cannot be loaded is an error now, not in the first call

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
            id=content_hash(values)[:16], task_type=task_type, inputs=values, expected=dict(expected or {}), metadata={}
        )
        more = {"tenant": tenant, "data_subject": data_subject, "consent": consent}
        assignment = self.router.assign(new_id() if unit is None else unit, tenant=tenant, task_type=task_type)
        loaded, assignment = self._ready(assignment)
        if loaded.inputs is not None and set(values) != set(loaded.inputs):
            raise ConfigError(f"agent {self.agent} takes the inputs {loaded.inputs}, got {sorted(values)}")
        try:
            return self._run(loaded, assignment, task, more)
        except Exception as error:
            if assignment.fallback is None or not _is_down(error):
                raise
            self._count(assignment.version, error_text(error))
        champion = Assignment(version=assignment.fallback, unit=assignment.unit)
        return self._run(self._load(champion.version), champion, task, more)

    def _run(self, loaded: LoadedVersion, assignment: Assignment, task: Task, more: dict[str, Any]) -> dspy.Prediction:
        fields = {"phase": "deployed", **assignment.fields(), **more}
        began, status = time.monotonic(), "failed"
        try:
            prediction = loaded.run(task, rubric=self.rubric, store=self.store.url, **fields)
            status = "done"
            return prediction
        except Exception as error:
            status = "error" if _is_down(error) else "failed"
            raise
        finally:
            version, arm = assignment.version.name, assignment.arm or ""
            with self._lock:
                self.counts[version, arm, status] += 1
                self.seconds[version, arm] += time.monotonic() - began

    def _ready(self, assignment: Assignment) -> tuple[LoadedVersion, Assignment]:
        """The loaded version; the champion where it cannot be loaded."""
        try:
            return self._load(assignment.version), assignment
        except AssayError as error:
            if assignment.fallback is None:
                raise
            self._count(assignment.version, str(error))
            champion = Assignment(version=assignment.fallback, unit=assignment.unit)
            return self._load(champion.version), champion

    def _load(self, version: Version) -> LoadedVersion:
        with self._lock:
            if version.name not in self._loaded:
                self._loaded[version.name] = LoadedVersion(self.router.deployments.registry.folder_of(version))
            return self._loaded[version.name]

    def _count(self, version: Version, reason: str) -> None:
        with self._lock:
            self.fallbacks[version.name] = self.fallbacks.get(version.name, 0) + 1
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
            "fallback", agent=self.agent, deployment=deployment.id, version=version.name, reason=reason,
            count=self.fallbacks[version.name],
        )  # fmt: skip


def _is_down(error: BaseException) -> bool:
    """Whether the model failed, and not the program: a fault of the candidate's own code must not be hidden."""
    return failure_of_program(error) in (FailureKind.MODEL, FailureKind.TIMEOUT)


@trusts
def deployed(
    agent: str, *, store: str | Path | None = None, rubric: Rubric | str | Path | None = None, refresh_s: float = 1.0
) -> DeployedAgent:
    """An agent of the registry as a callable: `assay.deployed("support")(question="…", unit="user-7")`.

    Args:
        agent: name, or `AGENT@NUMBER`, `AGENT@ALIAS` for one version without a deployment.
        rubric: scores each rollout when it ends.
        refresh_s: seconds after which changes of aliases, deployments and flags are seen at the latest.
    Raises:
        DeploymentError: there is no such agent, or it has no champion.
    """
    return DeployedAgent(agent, store=store, rubric=rubric, refresh_s=refresh_s)
