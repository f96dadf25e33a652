"""What a deployment does: recorded rollouts that the candidate runs, replays of judges' anchors, and evaluations."""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.commands.deployed import LoadedVersion
from assay.commands.judge_audit import replay_anchors
from assay.deployment.decisions import PROMOTED, RUNNING, Decision, advance
from assay.deployment.deployments import Deployment, Deployments
from assay.deployment.evidence import CANDIDATE
from assay.deployment.plan import JUDGE_DRIFT, Hook, Watch
from assay.deployment.readings import SCORED_BY
from assay.deployment.registry import Version
from assay.deployment.rollout_values import SHADOW
from assay.deployment.watching import BEGUN, DONE, FAILED, due_replays, notify, watched, watches_now, write_replay
from assay.errors import AssayError, BudgetExceeded, ConfigError, DeploymentError, FailureKind
from assay.evaluation.progress import Progress, default_progress
from assay.evaluation.statistics import Gain, paired_gain
from assay.jobs.loading import load_rubric
from assay.jobs.recording import opened_store
from assay.models.calls import failure_of_program
from assay.models.limits import OverTime
from assay.rubrics import Rubric
from assay.rubrics.loading import RubricSource
from assay.support.scrubbing import error_text
from assay.traces import Rollout, Store
from assay.traces.store import tables as schema
from assay.traces.store.leases import present

_LOG = logging.getLogger("assay.deployed")
_HUNG = 3  # rollouts over the time limit, after which a call of `replay` ends


def replay(
    deployments: Deployments,
    deployment: Deployment,
    *,
    rubric: RubricSource | None,
    store: str | Path | None,
    most: int | None = None,
    progress: Progress | None = None,
) -> int:
    """Runs as many of the champion's newest rollouts on the candidate as the shadow step asks for.

    Rollouts that were replayed before are not run again, so that it continues after a stop. Two processes that replay
    the same rollout at the same time write one row. A rollout on which the candidate fails counts as its failure.

    Tools with side effects (`assay.side_effects`) are answered from the recorded rollout. Where the candidate calls one
    in another way, the result is unknown: the pair is missing.

    Args:
        rubric: scores the replayed rollouts; without one they are unscored until `assay traces score`.
        most: rollouts that are replayed now; None for all.
    Returns:
        The number of rollouts that were replayed now.
    Raises:
        DeploymentError: there are fewer recorded rollouts of the champion than the step needs.
    """
    needed = deployment.plan.steps[0].requests - deployments.requests(deployment.id, 0, 0.0).get(CANDIDATE, 0)
    if needed <= 0:
        return 0
    opened, _ = opened_store(store)
    champion = f"{deployment.agent}@{deployment.champion}"
    recorded = _recorded(deployments.engine, champion, deployment.id, needed, scored=True)
    if len(recorded) < needed:
        unscored = len(_recorded(deployments.engine, champion, deployment.id, None, scored=False))
        raise DeploymentError(
            f"the shadow step replays {deployment.plan.steps[0].requests} scored rollouts of {champion}; {needed} more "
            f"are needed, and {len(recorded)} scored and {unscored} unscored ones are recorded. "
            f"{f'The unscored: {SCORED_BY}. ' if unscored else ''}Serve the agent longer, or leave the shadow step out "
            "of the plan"
        )
    version = deployments.registry.version(f"{deployment.agent}@{deployment.candidate}")
    loaded = LoadedVersion(deployments.registry.folder_of(version))
    recorded = recorded[:most]
    with default_progress(progress).bar(f"replay on {version.name}", len(recorded)) as advance:
        hung = done = 0
        for name in recorded:
            hung += not _run(loaded, opened.rollout(name), rubric, opened.url, version.name, deployment.id)
            advance(1)
            done += 1
            if hung >= _HUNG:  # decided on what is known before more time passes
                break
    opened.flush()
    return done


def _run(loaded: LoadedVersion, original: Rollout, rubric: Any, store: str, version: str, deployment: str) -> bool:
    """Replays one rollout. False if it exceeded the time limit."""
    # one row for a rollout, whoever replays it
    row = sha256(f"{deployment}\0{original.id}".encode()).hexdigest()[:32]
    fields = {"id": row, "deployment": deployment, "stage": 0, "arm": CANDIDATE, "unit": original.unit}
    try:
        loaded.replay(original, rubric=rubric, store=store, version=version, phase=SHADOW, **fields)
    except DeploymentError:
        pass  # a call without a recorded answer: the pair is missing
    except AssayError:
        raise
    except Exception as error:  # the candidate's failure is recorded with its kind, and scored
        return not isinstance(error, OverTime)
    return True


def _recorded(engine: sa.Engine, champion: str, deployment: str, most: int | None, *, scored: bool) -> list[str]:
    """Ids of the newest production rollouts of a version, scored or not, that this deployment has not replayed."""
    rollouts = schema.rollouts.c
    replayed = sa.select(rollouts.group_id).where(rollouts.deployment == deployment, rollouts.phase == SHADOW)
    query = (
        sa.select(rollouts.id)
        .where(
            rollouts.version == champion,
            rollouts.phase == "deployed",
            rollouts.score.is_not(None) if scored else rollouts.score.is_(None),
            rollouts.id.not_in(replayed),
        )
        .order_by(rollouts.started_at.desc())
        .limit(most)
    )
    with engine.connect() as connection:
        return list(connection.execute(query).scalars())


# -- A few recorded rollouts that a candidate runs before its deployment starts: are its outputs those of the champion?
#
# Decides nothing about a gain: the shadow step does (`replay`).


CHECK = "check"  # phase of these rollouts; they have no version, so that no figure of production counts them
_NEWEST = 1000  # recorded rollouts that the replayed ones are chosen from


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What the replays showed.

    Attributes:
        n: recorded rollouts that were replayed, of the number `wanted`.
        answered: replays that ended with an answer.
        missing: outputs of the recorded answers, with the number of replays that lack them.
        given: outputs of the recorded answers that were looked for, with their numbers.
        failures: reasons why replays have no answer, with their numbers.
        champion, candidate: mean recorded score and mean score of the replays, over the pairs with both.
        gain: their paired difference; None without a pair.
        problem: why nothing, or nothing more, could be replayed.
    """

    wanted: int
    n: int = 0
    answered: int = 0
    missing: dict[str, int]
    given: dict[str, int]
    failures: dict[str, int]
    champion: float | None = None
    candidate: float | None = None
    gain: Gain | None = None
    problem: str | None = None

    @property
    def breaks(self) -> list[str]:
        """That no replay has an answer, or outputs that no replay had, although its recorded answer had them.

        One failed replay alone, or a model that cannot be asked, shows no break.
        """
        if self.n > 1 and not self.answered and self.problem is None:
            return [f"answers: the candidate answers none of {self.n} recorded rollouts ({next(iter(self.failures))})"]
        return [
            f"outputs: the candidate gives no {name}, which {count} recorded rollout{'s' * (count > 1)} had"
            for name, count in sorted(self.missing.items())
            if count == self.given[name]
        ]

    @property
    def changes(self) -> list[str]:
        return [
            f"outputs: {name} is missing in {count} of {self.given[name]} replays of recorded rollouts"
            for name, count in sorted(self.missing.items())
            if count < self.given[name]
        ]

    @property
    def unchecked(self) -> list[str]:
        """Why outputs could not be compared, or not in all replays."""
        reasons = [f"{count} of {self.n} failed ({reason})" for reason, count in self.failures.items()]
        return [f"replays: {reason}" for reason in (*reasons, *([self.problem] if self.problem else ()))]


def replay_rubric(source: str | None) -> Rubric | None:
    """The rubric of the replays.

    Raises:
        ConfigError: it has a judge without a model.
    """
    if source is None:
        return None
    rubric = load_rubric(source, own_models=True)
    if unasked := [c.name for c in rubric.criteria if c.judge is not None and rubric.decider(c.name) is None]:
        raise ConfigError(
            f"{source!r} has a judge decide {', '.join(map(repr, unasked))}, and its file names no model",
            field="replay_rubric",
        )
    return rubric


def rehearse(
    deployments: Deployments, champion: Version, candidate: Version, *, count: int, rubric: Rubric | None,
    store: str | Path | None, progress: Progress | None = None,
) -> Rehearsal:  # fmt: skip
    """Runs up to `count` of the champion's newest recorded rollouts on the candidate, of all task types in turn.

    Tools with side effects are answered from the recording, as in the shadow step. It ends early if the candidate's
    model cannot be asked, or a replay exceeds its time limit.
    """
    found = _answered(deployments.engine, champion.name, count)
    if not found:
        problem = f"{champion.name} has no recorded answers" if count else None
        return Rehearsal(wanted=count, missing={}, given={}, failures={}, problem=problem)
    try:
        loaded = LoadedVersion(deployments.registry.folder_of(candidate))
    except AssayError as error:
        return Rehearsal(wanted=count, missing={}, given={}, failures={}, problem=error_text(error))
    opened, _ = opened_store(store)
    missing, given, failures = Counter[str](), Counter[str](), Counter[str]()
    pairs: list[tuple[Rollout, str]] = []  # recorded rollout, id of the replay
    problem = None
    with default_progress(progress).bar(f"replay on {candidate.name}", len(found)) as advance:
        for original in map(opened.rollout, found):
            try:
                prediction = loaded.replay(original, rubric=rubric, store=opened.url, phase=CHECK)
            except Exception as error:
                failures[error_text(error)[:200]] += 1
                if isinstance(error, OverTime) or failure_of_program(error) in (FailureKind.MODEL, FailureKind.TIMEOUT):
                    problem = "no more were replayed"
            else:
                names = set(original.prediction or {})
                given.update(names)
                missing.update(names - set(dict(prediction.items())))
                pairs.append((original, str(prediction.rollout)))
            advance(1)
            if problem is not None:
                break
    opened.flush()
    before = {original.id: _number(original.score) for original, _ in pairs}
    after = {original.id: _number(opened.rollout(replay).score) for original, replay in pairs}
    gain = paired_gain(before, after)
    both = [name for name in before if not math.isnan(before[name] + after[name])]
    means = [math.fsum(scores[name] for name in both) / len(both) if both else None for scores in (before, after)]
    return Rehearsal(
        wanted=count, n=len(pairs) + failures.total(), answered=len(pairs), missing=dict(missing), given=dict(given),
        failures=dict(failures), champion=means[0], candidate=means[1], gain=gain if gain.n else None, problem=problem,
    )  # fmt: skip


def _number(score: float | None) -> float:
    return math.nan if score is None else score


def _answered(engine: sa.Engine, champion: str, count: int) -> list[str]:
    """Ids of the newest answered production rollouts of a version: the newest of each task type, then the next ones."""
    rollouts = schema.rollouts.c
    query = (
        sa.select(rollouts.id, rollouts.task_type)
        .where(
            rollouts.version == champion, rollouts.phase == "deployed", rollouts.status == "done",
            rollouts.prediction_json.is_not(None),
        )
        .order_by(rollouts.started_at.desc())
        .limit(_NEWEST)
    )  # fmt: skip
    seen = Counter[str]()
    ranked = []
    with engine.connect() as connection:
        for position, (name, kind) in enumerate(connection.execute(query)):
            ranked.append((seen[kind], position, name))
            seen[kind] += 1
    return [name for _, _, name in sorted(ranked)[:count]]


# -- Replays the anchors of the judges that a deployment is watched by, when they are due.


def replay_judges(
    deployments: Deployments, deployment: Deployment, *, store: str | Path | None, now: float | None = None,
    progress: Progress | None = None,
) -> int:  # fmt: skip
    """Replays what is due, with each judge as it runs now, and stores the results. Decides nothing.

    A judge that cannot be called is a row with the reason. Of several processes one replays.

    Args:
        now: seconds since the epoch; by default the present.
    Returns:
        The number of judges that were replayed.
    """
    if not any(watch.name == JUDGE_DRIFT for watch in deployment.plan.watch):
        return 0
    moment = present(deployments.engine) if now is None else now
    if watches_now(deployments, deployment, moment) is None:
        return 0
    replayed = 0
    for watch in due_replays(deployment, deployments.history(deployment.id), moment):
        state = deployments.get(deployment.id).state
        if state.status != deployment.state.status:
            break
        if write_replay(deployments, deployment.id, watch, BEGUN, at=moment, before=state):
            _replay(deployments, deployment.id, watch, moment, store, progress)
            replayed += 1
    return replayed


def _replay(
    deployments: Deployments, name: str, watch: Watch, at: float, store: str | Path | None, progress: Progress | None
) -> None:
    options = {key: value for key in ("model", "api_base") if (value := getattr(watch, key)) is not None}
    try:
        report = replay_anchors(str(watch.judge), anchors=watch.anchors, store=store, progress=progress, **options)
    except (Exception, BudgetExceeded) as error:  # a folder that is gone, a model that is away
        _LOG.warning("the anchors of %s could not be replayed: %s", watch.judge, error_text(error))
        write_replay(deployments, name, watch, FAILED, at=at, error=error_text(error)[:1000])
    else:
        write_replay(deployments, name, watch, DONE, at=at, report=report.to_dict())


# -- One evaluation of a deployment, and the thread with which a gateway makes them.


_REST = 50  # an evaluation is followed by a pause of so many times its CPU time, so that it takes at most 2 % of a core
_LONGEST_S = 300.0  # of such a pause
_REPLAYED = 20  # rollouts per call


def advanced(
    opened: Store, deployment: Deployment, *, rubric: Any = None, hooks: Sequence[Hook] = (), now: float | None = None,
    most: int | None = None, progress: Progress | None = None,
) -> Decision:  # fmt: skip
    """Replays what a shadow step needs, decides, and tells the hooks. Safe to call by several processes at once.

    Watches come first, with the replays of judges that they need. Of a promoted deployment nothing else is evaluated.

    Args:
        rubric: scores replayed rollouts.
        most: rollouts that are replayed now; None for all that the step needs.
        now: seconds since the epoch; by default the present.
    """
    deployments = Deployments(opened.engine)
    if deployment.state.status == RUNNING and deployment.plan.steps[deployment.state.step].shadow:
        replay(deployments, deployment, rubric=rubric, store=opened.url, most=most, progress=progress)
    moment = present(opened.engine) if now is None else now
    if replay_judges(deployments, deployment, store=opened.url, now=moment, progress=progress):
        deployment = deployments.get(deployment.id)
    if (alarm := watched(deployments, deployment, moment)) is not None:
        notify(deployment, alarm, hooks)
        if alarm.action != "alarm":
            return alarm
    decision = advance(deployments, deployment.id, moment)
    notify(deployment, decision, hooks)
    return decision


class Advancer:
    """Advances the deployments of an agent in a thread, so that no call waits for it.

    Without an active deployment it makes one query in `every_s`. An error is logged, and the next evaluation tries
    again. Other callers of `advance` may run at the same time.

    Args:
        opened: the store; stays open while the thread runs.
        rubric: scores the rollouts that a shadow step replays.
        every_s: seconds between two evaluations, at least.
    """

    def __init__(self, opened: Store, agent: str, *, rubric: Any = None, every_s: float = 10.0) -> None:
        self.opened, self.agent, self.rubric, self.every_s = opened, agent, rubric, every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._running, name=f"advance-{agent}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the thread after the evaluation or replayed rollout that is running, or after `timeout_s`."""
        self._ended.set()
        self._thread.join(timeout_s)

    def _running(self) -> None:
        wait = self.every_s
        while not self._ended.wait(wait):
            try:
                wait = max(self.every_s, self.once())
            except Exception as error:  # a store that is away, a candidate that cannot be loaded
                level = logging.DEBUG if isinstance(error, DeploymentError) else logging.WARNING
                _LOG.log(level, "the deployment of %s could not be advanced: %s", self.agent, error_text(error))
                wait = self.every_s

    def once(self) -> float:
        """Advances the active deployment, if there is one. Returns for how many seconds to pause."""
        deployments = Deployments(self.opened.engine)
        deployment = next(iter(deployments.all(self.agent, limit=1)), None)
        if deployment is None or deployment.state.status not in (RUNNING, PROMOTED):
            return 0.0
        if (
            deployment.state.status == PROMOTED
            and watches_now(deployments, deployment, present(self.opened.engine)) is None
        ):
            return 0.0
        began = time.thread_time()  # a busy machine must not make the pauses longer
        decision = advanced(self.opened, deployment, rubric=self.rubric, most=_REPLAYED)
        if decision.action != "continue":
            _LOG.info("%s: %s (%s): %s", deployment.id, decision.action, decision.rule, decision.reason)
        if deployment.plan.steps[deployment.state.step].shadow:
            return 0.0
        return min(_LONGEST_S, _REST * (time.thread_time() - began))
