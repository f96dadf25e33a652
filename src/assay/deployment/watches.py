"""What a deployment is watched for, besides its comparison: settings. Evaluated by `assay.deployment.watching`."""

from dataclasses import dataclass
from pathlib import Path

from assay.errors import ConfigError
from assay.support.settings import Settings, one_of, setting

INPUT_DRIFT, JUDGE_DRIFT = "input_drift", "judge_drift"
RATES = ("error_rate", "parse_error_rate", "tool_error_rate", "refusal_rate")
SCORES = ("score", "human_rating")
AMOUNTS = ("latency_s", "cost_usd", "tokens")


def check_metric(name: str, *others: str) -> None:
    """Raises `ConfigError` if this is neither the name of a metric nor one of the others."""
    known = (*SCORES, *RATES, *AMOUNTS, *others)
    if name not in known and not name.startswith(("criterion:", "judge:")):
        raise ConfigError(f"name={name!r} {one_of(name, known, other='criterion:NAME or judge:NAME')}")


@dataclass(frozen=True, kw_only=True)
class Watch(Settings):
    """One alarm on the rollouts of the candidate, while it is deployed and after its promotion.

    Attributes:
        name: error_rate, parse_error_rate, tool_error_rate, refusal_rate, score, human_rating, criterion:NAME,
            judge:NAME, latency_s, cost_usd, tokens (their medians), input_drift (how far task types and lengths of
            inputs are from those before, in [0, 1]), or judge_drift (how far a judge's verdicts on its anchors are from
            the frozen ones, as a share of its scale: root mean square, less the judge's own noise).
        above, below: the limit; exactly one of them.
        action: alarm tells the hooks, pause also stops a running deployment, rollback takes the candidate back.
        judge, anchors, model, api_base, every_s: of judge_drift only.
    """

    name: str = setting(help="What is watched.")
    above: float | None = setting(None, "The alarm is given once the value is shown to be above.", ge=0)
    below: float | None = setting(None, "The alarm is given once the value is shown to be below.", ge=0)
    action: str = setting("alarm", "What follows.", choices=("alarm", "pause", "rollback"))
    judge: str | None = setting(None, "Folder of a compiled judge, or a YAML file; its anchors are replayed.")
    anchors: str | None = setting(None, "File of the frozen anchors; by default the compiled judge's own.")
    model: str | None = setting(None, "Model of the judge; by default that of the compiled judge.")
    api_base: str | None = setting(None, "Address of the model.")
    every_s: float = setting(86400.0, "Seconds between two replays.", gt=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_metric(self.name, INPUT_DRIFT, JUDGE_DRIFT)
        if (self.above is None) == (self.below is None):
            raise ConfigError(f"the watch of {self.name} needs one limit: above or below")
        limit = self.above if self.above is not None else self.below
        if self.name not in AMOUNTS and limit is not None and limit > 1:
            raise ConfigError(f"the limit {limit!r} of the watch of {self.name} must be between 0 and 1")
        self._check_judge()

    def _check_judge(self) -> None:
        of_judge = [name for name in ("judge", "anchors", "model", "api_base") if getattr(self, name) is not None]
        if self.name != JUDGE_DRIFT:
            if of_judge or self.every_s != 86400.0:
                raise ConfigError(
                    f"{', '.join(of_judge) or 'every_s'} would have no effect on the watch of {self.name}"
                )
        elif self.judge is None or self.above is None:
            raise ConfigError(f"the watch of {JUDGE_DRIFT} needs judge (the folder of a compiled judge) and above")
        elif ":" in Path(self.judge).name:  # plans are stored in the database, so they must name no code
            raise ConfigError(f"judge={self.judge!r} of a watch must be the folder of a compiled judge or a YAML file")

    @property
    def key(self) -> str:
        """Identifies it in the history: a watch gives its alarm once."""
        name = self.name if self.judge is None else f"{self.name} of {self.judge}"
        return f"{name} above {self.above:g}" if self.above is not None else f"{name} below {self.below:g}"
