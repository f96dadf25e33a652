"""What a deployment is watched for, besides its comparison: settings. Evaluated by `assay.deployment.watching`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.errors import ConfigError
from assay.support.settings import Settings, nearest, setting

__all__ = ["INPUT_DRIFT", "Watch", "watches_of"]

INPUT_DRIFT = "input_drift"
_RATES = ("error_rate", "parse_error_rate", "tool_error_rate", "refusal_rate")
_SCORES = ("score", "human_rating")


@dataclass(frozen=True, kw_only=True)
class Watch(Settings):
    """One alarm on the rollouts of the candidate, while it is deployed and after its promotion.

    Attributes:
        name: error_rate, parse_error_rate, tool_error_rate, refusal_rate, score, human_rating, criterion:NAME,
            judge:NAME, or input_drift (how far task types and lengths of inputs are from those before, in [0, 1]).
        above, below: the limit; exactly one of them.
        action: alarm tells the hooks, pause also stops a running deployment, rollback takes the candidate back.
    """

    name: str = setting(help="What is watched.")
    above: float | None = setting(None, "The alarm is given once the value is shown to be above.", ge=0, le=1)
    below: float | None = setting(None, "The alarm is given once the value is shown to be below.", ge=0, le=1)
    action: str = setting("alarm", "What follows.", choices=("alarm", "pause", "rollback"))

    def __post_init__(self) -> None:
        super().__post_init__()
        known = (*_RATES, *_SCORES, INPUT_DRIFT)
        if self.name not in known and not self.name.startswith(("criterion:", "judge:")):
            hint = f". Did you mean {near!r}?" if (near := nearest(self.name, known)) else ""
            listed = ", ".join(known)
            raise ConfigError(f"nothing to watch is called {self.name!r}: there are {listed}, criterion:NAME{hint}")
        if (self.above is None) == (self.below is None):
            raise ConfigError(f"the watch of {self.name} needs one limit: above or below")

    @property
    def key(self) -> str:
        """Identifies it in the history: a watch gives its alarm once."""
        return f"{self.name} above {self.above:g}" if self.above is not None else f"{self.name} below {self.below:g}"


def watches_of(entries: Sequence[Any]) -> tuple[Watch, ...]:
    """Watches from the entries of a file."""
    watches = []
    for entry in entries:
        if not isinstance(entry, Watch | Mapping):
            raise ConfigError(f"a watch must be a mapping of its settings, not {entry!r}")
        try:
            watches.append(entry if isinstance(entry, Watch) else Watch(**{str(k): v for k, v in entry.items()}))
        except TypeError as error:
            raise ConfigError(f"watch: {error}") from None
    return tuple(watches)
