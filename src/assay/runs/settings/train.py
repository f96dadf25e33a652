"""Settings of `train`: those of the weight update, and those of the program whose rollouts it learns from."""

from collections.abc import Sequence
from dataclasses import dataclass

from assay.errors import ConfigError
from assay.optimizers.finetuning.settings import PolicySettings
from assay.runs.settings.shared import CurriculumSettings
from assay.support.settings import setting, settings_of


@dataclass(frozen=True, kw_only=True)
class TrainSettings(PolicySettings, CurriculumSettings):
    """Settings of `assay.train`: of the weight update and of the program whose rollouts it learns from."""

    kind: str = "train"
    adapter_name: str = ""  # internal: part of the job, so that each adapter has its own run
    retention: Sequence[str] = setting(
        (),
        "Retention task: a program, rubric and data whose score must not fall; repeatable.",
        metavar="PROGRAM,RUBRIC,DATA",
        many=True,
    )
    monitor: str | None = setting(
        None, "Monitor rubric: scores the rollouts, but gives no reward.", metavar="R", file=True
    )
    agent: str | None = setting(
        None,
        "Agent to train in place of a program: MODULE:CALLABLE, a command, or remote for one that `assay agent run` "
        "runs. It calls the policy at OPENAI_BASE_URL.",
        metavar="AGENT",
    )
    agent_model: str | None = setting(
        None, "Further name by which the agent may call the policy, such as the one in its code.", metavar="NAME"
    )
    agent_listen: str = setting(
        "127.0.0.1:0",
        "Address at which the policy is served to the agent; port 0 is any free one. Beyond loopback --agent-key is "
        "required.",
        metavar="HOST:PORT",
        job=False,
    )
    judged_by_itself: bool = setting(False, "Allow the model in training to judge its own rollouts.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.curriculum is not None and not self.evaluate_every:
            raise ConfigError(
                "evaluate_every=0 with a curriculum: stages are promoted by their val score, which is measured every "
                "evaluate_every steps; give a number of steps"
            )

    @property
    def policy(self) -> PolicySettings:
        """The settings of the weight update alone."""
        return PolicySettings(**{name: getattr(self, name) for name in settings_of(PolicySettings)})


# Training on an export ignores these: tasks and rewards are in the export, and no program runs.
ROLLOUTS_ONLY = (
    "step_weight",
    "outcome_weight",
    "rollout_timeout_s",
    "evaluate_every",
    "eval_tasks",
    "max_score_drop",
    "samples_every",
    "max_completion",
    "vllm",
)
