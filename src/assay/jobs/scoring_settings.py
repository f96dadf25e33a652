"""Settings of the judges that score stored rollouts, for `assay traces score`, deployments and loops."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

from assay.errors import ConfigError
from assay.jobs.project_file import is_of_project
from assay.models.limits import DEFAULT_S
from assay.models.prices import price_text
from assay.models.roles import check_address
from assay.models.thinking import short_form
from assay.support.options import Flag, Parse, Positive, Seconds, Settings


class StoredJudge(Settings):
    """Judges."""

    judge_model: str | None = None
    """Language model of the rubric's judges; by default the one that a judge's file names."""

    judge_api_base: Annotated[str | None, Flag(metavar="URL")] = None
    """Base URL of an OpenAI-compatible server for the judges' model."""

    judge_api_key_env: Annotated[str | None, Flag(metavar="NAME")] = None
    """Environment variable with the API key for the judges' model; by default the provider's usual one."""

    judge_thinking: Annotated[int | str | None, Flag(metavar="BUDGET"), Parse(short_form)] = None
    """How much the rubric's judges may think in a call: a number of tokens, minimal, low, medium, high, xhigh, max, off
    or auto (no limit). A model or program that cannot keep it is refused."""

    price: Annotated[str | Sequence[float] | None, Flag(metavar="IN,OUT"), Parse(price_text)] = None
    """Price of the judges' model in US dollars for a million tokens of prompt and answer: 0.15,0.60. By default
    litellm's, to which litellm.register_model adds."""

    OF_JUDGE: ClassVar[Sequence[str]] = ("judge_api_base", "judge_api_key_env", "judge_thinking", "price")

    def check(self) -> None:
        check_address(self.judge_api_base, "judge_api_base")
        if self.judge_model is None:
            for name in self.changed(*self.OF_JUDGE):
                if not is_of_project(name, getattr(self, name)):
                    raise ConfigError("would have no effect without `judge_model`", field=name)


class ScoringSettings(StoredJudge):
    """Scoring."""

    again: Annotated[bool, Flag(key=False)] = False
    """Also score rollouts that have a score, and replace it."""

    threads: Positive | None = None
    """Number of rollouts scored at the same time; by default chosen for the judges' model."""

    task_timeout: Seconds = DEFAULT_S
    """Time limit in seconds of one check or one judge; beyond it the criterion is unscored."""

    preflight: bool = True
    """Stop if a judge leaves each of the first three rollouts with an answer unscored."""
