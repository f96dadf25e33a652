"""Settings of a routing preference. Loads no heavy package; `assay.deployment.preferences` computes with them."""

from collections.abc import Sequence
from dataclasses import dataclass

from assay.errors import ConfigError
from assay.support.settings import Settings, setting


@dataclass(frozen=True, kw_only=True)
class PreferenceFields(Settings):
    """Fields of a preference; the command line has them too, but may leave out the versions.

    Attributes:
        cost_weight: 0 ignores the cost.
    """

    versions: Sequence[int] = setting(
        (), "Number of a version; give at least two.", flag="--version", metavar="NUMBER", many=True
    )
    floor: float = setting(0.05, "Minimum probability with which a version is chosen.", ge=0, le=0.5)
    cost_weight: float = setting(0.0, "Score that one dollar of a rollout's cost is worth.", ge=0)
    window_days: float = setting(30.0, "Number of most recent days whose rollouts count.", gt=0)


@dataclass(frozen=True, kw_only=True)
class Preference(PreferenceFields):
    """Between which versions of an agent is chosen, and how. The versions are stored sorted, each once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "versions", tuple(sorted(set(self.versions))))
        if len(self.versions) < 2:
            raise ConfigError("a preference needs at least two versions")
        if self.floor * len(self.versions) > 1:
            raise ConfigError(f"floor={self.floor!r} of {len(self.versions)} versions is more than 1 in all")
