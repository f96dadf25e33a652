"""Which version of an agent a rollout gets: aliases, the active deployment, flags.

What the store says is read at most once in `refresh_s`, not for each rollout. A rollout keeps its version for its life.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from assay.deployment.assignment import CANDIDATE, arm_of, probability, unit_digest
from assay.deployment.deployments import Deployment, Deployments
from assay.deployment.flags import flags_of, matching
from assay.deployment.preference_settings import Preference
from assay.deployment.preferences import ROUTED, choice, preference_of, probabilities, qualities
from assay.deployment.registry import RETIRED, Version

_MEASURED_S = 30.0  # between two measurements of the qualities that a preference uses


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The version of one rollout. Without `deployment` it is no part of a comparison.

    With a routing preference `arm` is `routed`, and `propensity` the probability of the version.

    Attributes:
        fallback: version to use if this one cannot be loaded or answered by its model; None for the champion itself.
    """

    version: Version
    unit: str
    deployment: str | None = None
    stage: int | None = None
    arm: str | None = None
    propensity: float | None = None
    fallback: Version | None = None

    def fields(self) -> dict[str, Any]:
        """The fields of the rollout."""
        return {
            "deployment": self.deployment, "stage": self.stage, "arm": self.arm, "propensity": self.propensity,
            "unit": self.unit, "version": self.version.name,
        }  # fmt: skip


@dataclass(frozen=True)
class _Route:
    """What the store said last."""

    champion: Version
    deployment: Deployment | None
    candidate: Version | None
    flags: Mapping[str, Any]
    pinned: Mapping[int, Version]
    preferred: Mapping[int, Version]


class Router:
    """Assigns versions of one agent.

    Args:
        engine: of an open `Store`.
        agent: its name, or `AGENT@VERSION` for one version without a deployment.
        refresh_s: seconds for which the store is not asked again.
    Raises:
        DeploymentError: the agent has no champion.
    """

    def __init__(
        self, engine: sa.Engine, agent: str, *, refresh_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.deployments, self.refresh_s, self._clock = Deployments(engine), refresh_s, clock
        self.agent, _, which = agent.partition("@")
        self._fixed = self.deployments.registry.version(agent) if which else None
        self._lock, self._read_at = threading.Lock(), clock()
        self._shares: dict[str, dict[int, float]] = {}  # of the preference, by task type
        self._shares_at, self._shares_of = -math.inf, ""
        self._route = self._read()

    @property
    def champion(self) -> Version:
        """The version that units get without a deployment."""
        return self._current().champion

    @property
    def deployment(self) -> Deployment | None:
        """The deployment that runs or is paused."""
        return self._current().deployment

    def assign(self, unit: str, *, tenant: str | None = None, task_type: str = "default") -> Assignment:
        """The version of a new rollout.

        Args:
            unit: user or conversation; of any length.
            tenant: for flags.
            task_type: for preferences.
        """
        route, digest = self._current(), unit_digest(unit)
        if route.flags.get("kill"):
            return Assignment(version=route.champion, unit=digest)
        if (number := matching(route.flags, "pin", digest, tenant)) is not None:
            pinned = route.pinned.get(int(number), route.champion)
            fallback = None if pinned is route.champion else route.champion
            return Assignment(version=pinned, unit=digest, fallback=fallback)
        if matching(route.flags, "exclude", digest, tenant):
            return Assignment(version=route.champion, unit=digest)
        deployment = route.deployment
        if deployment is None or route.candidate is None:
            return self._preferred(route, digest, task_type)
        share = route.flags["percentage"] / 100 if "percentage" in route.flags else deployment.share
        arm = arm_of(digest, salt=deployment.id, share=share)
        return Assignment(
            version=route.candidate if arm == CANDIDATE else route.champion,
            unit=digest,
            deployment=deployment.id,
            stage=deployment.state.step,
            arm=arm,
            propensity=probability(arm, share),
            fallback=route.champion if arm == CANDIDATE else None,
        )

    def _preferred(self, route: _Route, digest: str, task_type: str) -> Assignment:
        """The version that the preference chooses; the champion without one."""
        if not route.preferred:
            return Assignment(version=route.champion, unit=digest)
        shares = self._shares.get(task_type) or dict.fromkeys(route.preferred, 1 / len(route.preferred))
        number = choice(digest, task_type, shares, salt=self.agent)
        version = route.preferred[number]
        fallback = None if version.number == route.champion.number else route.champion
        return Assignment(version=version, unit=digest, arm=ROUTED, propensity=shares[number], fallback=fallback)

    def shares(self) -> dict[str, dict[int, float]]:
        """Probabilities of the preference by task type and version; others have equal ones. Empty without one."""
        return dict(self._shares) if self._current().preferred else {}

    def _current(self) -> _Route:
        now = self._clock()
        if now - self._read_at >= self.refresh_s and self._lock.acquire(blocking=False):
            try:  # one rollout asks the store; others that start meanwhile use the last answer
                self._route = self._read()
            except sa.exc.SQLAlchemyError:
                pass  # the store is away: the last answer holds
            finally:
                self._read_at = now
                self._lock.release()
        return self._route

    def _read(self) -> _Route:
        registry = self.deployments.registry
        if self._fixed is not None:
            return _Route(self._fixed, None, None, {}, {}, {})
        champion = registry.version(self.agent)
        deployment = self.deployments.active(self.agent)
        candidate = None if deployment is None else registry.version(f"{self.agent}@{deployment.candidate}")
        flags = flags_of(self.deployments.engine, self.agent)
        retired = {int(name.removeprefix(RETIRED)) for name in flags if name.startswith(RETIRED)}
        numbers = {int(value) for name, value in flags.items() if name.startswith("pin:")} - retired
        pinned = {number: registry.version(f"{self.agent}@{number}") for number in numbers}
        preference = preference_of(flags)
        preferred: dict[int, Version] = {}
        if preference is not None:
            preferred = {
                number: registry.version(f"{self.agent}@{number}")
                for number in preference.versions
                if number not in retired
            }
            self._measure(preference)
        return _Route(champion, deployment, candidate, flags, pinned, preferred)

    def _measure(self, preference: Preference) -> None:
        """Computes the probabilities, at most once in `_MEASURED_S` for one preference."""
        now, text = self._clock(), repr(preference)
        if text == self._shares_of and now - self._shares_at < _MEASURED_S:
            return
        measured = qualities(self.deployments.engine, self.agent, preference)
        self._shares = {kind: probabilities(preference, versions) for kind, versions in measured.items()}
        self._shares_at, self._shares_of = now, text
