"""Which version of an agent a rollout gets: aliases, the active deployment, flags.

What the store says is read at most once in `refresh_s`, not for each rollout. A rollout keeps its version for its life.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from assay.deployment.deployments import Deployment, Deployments
from assay.deployment.evidence import CANDIDATE, arm_of, position, probability, unit_digest
from assay.deployment.registry import RETIRED, Registry, Version, flags_of, matching, write_flag
from assay.deployment.settings import Preference
from assay.errors import DeploymentError
from assay.traces.store import tables as schema
from assay.traces.store.leases import present

# -- Routing preferences: of several versions that passed their gates, the measured quality per task type decides.
#
# Thompson sampling by its probabilities (Thompson 1933; Agrawal and Goyal 2012): a version gets the probability that it
# is the best one, and at least a floor. The probabilities are computed from the store, and units are assigned by their
# hash, so that the propensity of a rollout is known exactly. An active deployment overrides it.


ROUTED = "routed"  # arm of a rollout that a preference assigned
_FLAG = "route"
_DRAWS = 4000


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Measured scores of a version on a task type: their number, sum, and the mean cost of a rollout."""

    count: int = 0
    total: float = 0.0
    cost_usd: float = 0.0


def set_preference(engine: sa.Engine, agent: str, preference: Preference | None, *, why: str = "") -> None:
    """Sets the preference of an agent; None removes it.

    Raises:
        DeploymentError: there is no such version, or one of them was never the champion: it has passed no gate.
    """
    registry = Registry(engine)
    registry.version(f"{agent}@1")
    passed = {change.number for change in registry.alias_history(agent) if change.alias == "champion"}
    for number in () if preference is None else preference.versions:
        version = registry.version(f"{agent}@{number}")
        if number not in passed:
            raise DeploymentError(f"{version.name} was never the champion: deploy it first (assay deploy start)")
    write_flag(engine, agent, _FLAG, None if preference is None else asdict(preference), why=why)


def preference_of(flags: Mapping[str, Any]) -> Preference | None:
    """The preference in the flags of an agent."""
    return None if (stored := flags.get(_FLAG)) is None else Preference(**stored)


def qualities(engine: sa.Engine, agent: str, preference: Preference) -> dict[str, dict[int, Quality]]:
    """Measured quality in production by task type and version."""
    rollouts, calls = schema.rollouts.c, schema.transitions.c
    cost: Any = sa.literal(0.0)
    if preference.cost_weight:
        cost = sa.select(sa.func.sum(calls.cost_usd)).where(calls.rollout_id == rollouts.id).scalar_subquery()
    since = present(engine) - 86400 * preference.window_days
    names = {f"{agent}@{number}": number for number in preference.versions}
    each = (
        sa.select(rollouts.version, rollouts.task_type, rollouts.score, cost.label("cost"))
        .where(
            rollouts.started_at >= since, rollouts.version.in_(names), rollouts.phase == "deployed",
            rollouts.score.is_not(None),
        )
        .subquery()
    )  # fmt: skip
    columns = each.c
    query = sa.select(
        columns.version, columns.task_type, sa.func.count(), sa.func.sum(columns.score),
        sa.func.avg(sa.func.coalesce(columns.cost, 0.0)),
    ).group_by(columns.version, columns.task_type)  # fmt: skip
    qualities: dict[str, dict[int, Quality]] = {}
    with engine.connect() as connection:
        for version, kind, count, total, spent in connection.execute(query):
            quality = Quality(count=int(count), total=float(total), cost_usd=float(spent))
            qualities.setdefault(str(kind), {})[names[version]] = quality
    return qualities


def probabilities(preference: Preference, measured: Mapping[int, Quality]) -> dict[int, float]:
    """Probability of each version on one task type; they add up to 1.

    Scores in [0, 1] count as that share of a success (Agrawal and Goyal 2012, section 3, without the coin). The draws
    have a fixed seed: the same numbers give the same probabilities on every machine.
    """
    import numpy as np

    random, draws = np.random.default_rng(0), []
    for number in preference.versions:
        seen = measured.get(number, Quality())
        values = random.beta(1 + seen.total, 1 + max(0.0, seen.count - seen.total), _DRAWS)
        draws.append(values - preference.cost_weight * seen.cost_usd)
    best = np.bincount(np.argmax(draws, axis=0), minlength=len(draws)) / _DRAWS
    free = 1 - preference.floor * len(draws)
    return {n: preference.floor + free * float(p) for n, p in zip(preference.versions, best, strict=True)}


def choice(unit: str, task_type: str, shares: Mapping[int, float], *, salt: str) -> int:
    """The version of a unit. It changes only if the probabilities do, and then for as few units as possible.

    Args:
        unit: digest, see `assay.deployment.evidence.unit_digest`.
        salt: of the agent.
    """
    place, number = position(unit, f"{salt}\0{task_type}"), 0
    for number, share in shares.items():  # noqa: B007 - the last one where rounding leaves a rest
        place -= share
        if place < 0:
            break
    return number


# -- Routing.


_MEASURED_S = 30.0  # between two measurements of the qualities that a preference uses


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The version of one rollout. Without `deployment` it is not part of a comparison.

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
