"""Settings of a training by reward: of the weight update, and of the program whose rollouts it learns from."""

from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from assay.errors import ConfigError
from assay.jobs.groups import SPLITS, AgentJob, Source, StagedJob
from assay.jobs.project_file import is_of_project
from assay.optimizers.finetuning.settings import PolicySettings
from assay.support.names import check_name
from assay.support.options import Flag, Positive, options_of

# Training on an export has no use for these: tasks and rewards are in the export, and no program runs.
ROLLOUTS_ONLY = (
    "step_weight", "outcome_weight", "rollout_timeout_s", "evaluate_every", "eval_tasks", "max_score_drop",
    "samples_every", "max_completion", "vllm",
)  # fmt: skip
_OF_CALL = ("program", "name", "store", "resume", "progress", "trust", "preflight", "agent_key", "test")


def is_export(program: Any) -> bool:
    """Whether a program is the folder of an export; as `assay.traces.export`, which loads the database."""
    named = isinstance(program, str | Path)
    return named and all((Path(program) / file).is_file() for file in ("manifest.json", "data.jsonl"))


class RLSettings(AgentJob, PolicySettings, StagedJob):
    """Training."""

    kind: ClassVar[str] = "train"
    cache: ClassVar[bool] = False  # type: ignore[misc]  # a policy in training is never answered from a cache
    executor: ClassVar[str] = "threads"  # type: ignore[misc]
    state: ClassVar[None] = None  # type: ignore[misc]
    lm: ClassVar[None] = None  # type: ignore[misc]
    api_base: Annotated[str | None, Flag(metavar="URL", shown=False)] = None
    """Base URL of an OpenAI-compatible server for the models that have no base URL of their own."""
    api_key_env: Annotated[str | None, Flag(metavar="NAME", job=False, shown=False)] = None
    """Environment variable with the API key for this server."""

    program: Annotated[Source, Flag(path=True)] = field(default=None, kw_only=False)
    """Program: a name, an artifact's folder (its prompts and demonstrations stay), or an export of transitions. In
    Python also a module."""
    name: Annotated[str, Flag(key=False)]
    """The adapter's name; it is served as MODEL+NAME."""
    rubric: Annotated[Source, Flag(metavar="R", path=True)] = None
    """Rubric: a YAML file or a shipped name. Not needed for an export, which has rewards."""
    data: Annotated[Source, Flag(metavar="D", path=True)] = None
    """Tasks: a file or a spec, as in assay compile. Not needed for an export, or if the stages of a curriculum name
    theirs."""
    train_size: Positive | None = None
    """Maximum number of train tasks."""
    val_size: Positive | None = None
    """Maximum number of val tasks."""
    test_size: Positive | None = None
    """Maximum number of test tasks."""
    retention: Annotated[Sequence[str], Flag(metavar="PROGRAM,RUBRIC,DATA")] = ()
    """Retention task: a program, rubric and data whose score must not fall; repeatable."""
    monitor: Annotated[Source, Flag(metavar="R", path=True)] = None
    """Monitor rubric: scores the rollouts, but gives no reward."""
    judged_by_itself: bool = False
    """Allow the model in training to judge its own rollouts."""
    test: Annotated[bool, Flag(key=False, shown=False)] = True
    """Compare old and new weights on the sealed test split at the end, for `validation`."""

    @property
    def needs_data(self) -> bool:
        return not is_export(self.program)

    def check(self) -> None:
        check_name(self.name, plain=True)
        if is_export(self.program):
            kind: Any = type(self)
            update = options_of(PolicySettings).keys() - {*ROLLOUTS_ONLY}
            names = [name for name in options_of(kind) if name not in update and name not in _OF_CALL]
            ignored = [name for name in self.changed(*names) if not is_of_project(name, getattr(self, name))]
            if ignored:
                raise ConfigError("would have no effect: an export brings its tasks and rewards", field=ignored[0])
            return
        if self.rubric is None:
            raise ConfigError("is missing", field="rubric", hint="Give it here or in assay.toml")
        if self.curriculum is not None and not self.evaluate_every:
            raise ConfigError(
                "must not be 0 with a `curriculum`: stages are promoted by their val score, measured at evaluations",
                field="evaluate_every",
            )
        sizes = {name: size for name in SPLITS if (size := getattr(self, f"{name}_size", None)) is not None}
        object.__setattr__(self, "sizes", {**self.sizes, **sizes})

    @property
    def policy(self) -> PolicySettings:
        """The settings of the weight update alone."""
        return self.part(PolicySettings)

    def _stored(self, *, of_job: bool = False) -> dict[str, Any]:
        return {**super()._stored(of_job=of_job), "adapter_name": self.name}  # each adapter has its own run
