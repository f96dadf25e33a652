"""Settings of a training by reward: of the weight update, and of the program whose rollouts it learns from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from assay.errors import ConfigError
from assay.jobs.groups import SPLITS, Source, StagedJob
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


class RLSettings(PolicySettings, StagedJob):
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
    agent: Annotated[str | Callable[..., Any] | None, Flag(metavar="AGENT")] = None
    """Agent to train in place of a program: MODULE:CALLABLE, a command, or remote for one that `assay agent run` runs.
    It calls the policy at OPENAI_BASE_URL. In Python also a function of the task."""
    agent_model: Annotated[str | None, Flag(metavar="NAME")] = None
    """Further name by which the agent may call the policy, such as the one in its code."""
    agent_listen: Annotated[str, Flag(metavar="HOST:PORT", job=False)] = "127.0.0.1:0"
    """Address at which the policy is served to the agent; port 0 is any free one. Beyond loopback `agent_key` is
    required."""
    agent_key: Annotated[str | None, Flag(env="ASSAY_AGENT_KEY", key=False)] = field(default=None, repr=False)
    """Key that `assay agent run` sends; required for the agent remote, and where `agent_listen` is not loopback."""
    judged_by_itself: bool = False
    """Allow the model in training to judge its own rollouts."""
    test: Annotated[bool, Flag(key=False, shown=False)] = True
    """Compare old and new weights on the sealed test split at the end, for `validation`."""

    @classmethod
    def of_file(cls, stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """What the project file sets; its agent is not for a program that was given, nor its program for an agent."""
        other = "agent" if "program" in given else "program" if "agent" in given else ""
        return {name: value for name, value in stored.items() if name != other}

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
