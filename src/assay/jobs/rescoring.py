"""Scores rollouts of the store by a rubric, for `assay traces score`, deployments and loops.

Judges run on several threads. Scores are written and counted in the order of the rollouts. Means of judge criteria are
corrected by human labels (prediction-powered inference).
"""

import contextvars
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait as wait_for
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np

from assay.datasets import Task
from assay.evaluation import Progress, default_progress
from assay.evaluation.progress import Advance
from assay.evaluation.stored import Graded, grade_rollout, task_of
from assay.jobs.ending import cancelled_by_signals
from assay.jobs.groups import ScoringSettings
from assay.jobs.loading import JUDGE_TEMPERATURE, load_judge, load_rubric
from assay.jobs.opening import LEASE_S, budgeted
from assay.jobs.preflight import preflight_scoring, require_expected
from assay.judges import Judge, PointwiseJudge
from assay.judges.loading import AnyJudge
from assay.judges.quality.drift import FEWEST_PEOPLE, corrected_mean
from assay.judges.questions import item_to_label, key_of, remember
from assay.models import Call, LanguageModel, Meter, get_lm
from assay.models.limits import LAST_CALLS_S, limited
from assay.models.roles import Endpoint
from assay.rubrics import Rubric, ScoreResult
from assay.rubrics.loading import RubricSource
from assay.rubrics.scoring import coverage_report
from assay.traces import Recorder, Rollout, Store
from assay.traces.records import NOT_AGENTS
from assay.traces.store.leases import acquire, held_by, patiently
from assay.traces.store.listing import check_run

_AHEAD = 4  # rollouts in progress per thread: how far others may run ahead of a slow one
_PAUSE_S = 0.5  # between two looks at whether another process has ended
_READ_S = 0.2  # for judges to read their last answers
_UNKNOWN = 4  # concurrent calls to a user's own client, which does not state its concurrency


def named_judge(
    settings: Any, meter: Meter, *, observers: Sequence[Callable[[Call], None]] = ()
) -> LanguageModel | None:
    """The model that settings, such as `StoredJudge`, name for a rubric's judges."""
    if (model := settings.judge_model) is None:
        return None
    endpoint = Endpoint(settings.judge_api_base, settings.judge_api_key_env)
    lm = get_lm(
        model, temperature=JUDGE_TEMPERATURE, meter=meter, observers=list(observers), price=settings.price,
        **endpoint.client(model),
    )  # fmt: skip
    return budgeted(lm, settings.judge_thinking, "judge_thinking")


def score_stored(
    store: Store,
    rubric: RubricSource,
    settings: ScoringSettings,
    *,
    runs: Sequence[str] = (),
    agent: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Scores stored rollouts by a rubric, with step rewards. Returns the fields of a `ScoringReport`.

    Args:
        runs: only rollouts of these runs.
        agent: only rollouts of this agent's versions.
    Raises:
        ConfigError: a criterion needs a judge and no model is named for it.
        DataError: there is no run of one of these names.
        ModelError: a judge did not answer.
    """
    meter, recorder = Meter(), Recorder(store)
    judge = named_judge(settings, meter, observers=[recorder.observe])
    measure, progress = load_rubric(rubric, judge_model=judge), default_progress(progress)
    measure.require_judges()
    at_once, name = settings.threads or threads_for(measure), f"{measure.name}@{measure.version}"
    with cancelled_by_signals(meter), limited(settings.task_timeout), _paid_once(store, measure, name, progress):
        for run_id in runs:
            check_run(store, run_id)
        states = _states(store, list(runs) or [None], agent)
        ended = {key: scored_by for key, (status, scored_by) in states.items() if status in ("done", "failed")}
        pending = [rollout_id for rollout_id, scored_by in ended.items() if settings.again or scored_by is None]
        if settings.preflight and measure.needs_judge:
            stored = map(store.rollout, pending)
            require_expected(measure, ((task_of(rollout), rollout) for rollout in stored))
        with progress.bar(f"score: {measure.name}", len(pending)) as advance:
            scoring = _Rescoring(measure, recorder, advance, meter)
            waiting = (store.rollout(rollout_id) for rollout_id in pending)
            with recorder.active():
                scoring.run(waiting, threads=at_once, preflight=settings.preflight)
    skipped = [] if settings.again else [scored_by for scored_by in ended.values() if scored_by is not None]
    known, usage = judge is not None or not measure.needs_judge, meter.usage  # judges with models of their own
    spent = {"calls": usage.calls, "tokens": usage.tokens, "cost_usd": usage.known_cost_usd}
    store.flush()  # it counts the calls that it refuses
    return {
        **scoring.report(),
        "rubric": name,
        "skipped": len(skipped),
        "skipped_of_other_rubrics": dict(Counter(rubric for rubric in skipped if rubric != name)),
        "running": sum(status == "running" for status, _ in states.values()),
        **(spent if known else dict.fromkeys(spent)),
        "unrecorded": recorder.unrecorded.count,
    }


@contextmanager
def _paid_once(store: Store, rubric: Rubric, name: str, progress: Progress) -> Iterator[None]:
    """Waits until no other process has judges score by this rubric: what it scores is not paid for again.

    Args:
        name: name and version of the rubric.
    """
    if not rubric.needs_judge:
        yield
        return
    lease_name, said = f"scoring:{name}", False
    while (lease := patiently(lambda: acquire(store.engine, lease_name, LEASE_S))) is None:
        if not said and (holder := held_by(store.engine, lease_name)):
            progress.say(f"waiting: {name} is scoring rollouts of this store already on {holder}")
            said = True
        time.sleep(_PAUSE_S)
    with lease:
        yield


def _states(opened: Store, runs: Sequence[str | None], agent: str | None) -> dict[str, tuple[str, str | None]]:
    """Status of each rollout, and the rubric that scored it."""
    stored = (r for run in runs for r in opened.rollouts(run_id=run) if r.source not in ("outside", *NOT_AGENTS))
    chosen = (r for r in stored if agent is None or (r.version or "").startswith(f"{agent}@"))
    return {r.id: (r.status, r.rubric if r.score is not None else None) for r in chosen}


def threads_for(rubric: Rubric) -> int:
    """How many rollouts are scored at the same time: the smallest concurrency of the judges' engines; 1 if no criterion
    has a judge."""
    lms = [lm for c in rubric.criteria if (lm := getattr(rubric.decider(c.name), "lm", None)) is not None]
    return min(
        (lm.recording.backend.concurrency if isinstance(lm, LanguageModel) else _UNKNOWN for lm in lms), default=1
    )


class _Rescoring:
    """Scores rollouts, writes the scores and counts them.

    Args:
        advance: called with 1 for each rollout whose score is written.
        meter: of the judges' model, if one is named; where it is interrupted, its calls in flight are waited for.
    """

    def __init__(self, rubric: Rubric, recorder: Recorder, advance: Advance, meter: Meter) -> None:
        self.rubric, self.advance, self._recorder, self._meter = rubric, advance, recorder, meter
        self._counts, self._values, self._results = Counter[str](), list[float](), list[ScoreResult]()

    def run(self, rollouts: Iterable[Rollout], *, threads: int, preflight: bool) -> None:
        """Scores all of them. Where it is interrupted, what has been scored is written.

        Args:
            preflight: the first are scored one by one, until each judge has given a verdict.
        Raises:
            ModelError: a judge scored none of the first three rollouts with an answer.
        """
        waiting = iter(rollouts)
        if preflight and self.rubric.needs_judge:
            preflight_scoring(self.rubric, self._serially(waiting))
        under_way = deque[tuple[Rollout, Future[Graded]]]()
        pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="assay-score")
        try:
            for rollout in waiting:
                under_way.append((rollout, pool.submit(contextvars.copy_context().run, self._graded, rollout)))
                if len(under_way) >= _AHEAD * threads:
                    self._keep_first(under_way)
            while under_way:
                self._keep_first(under_way)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            if self._meter.land(LAST_CALLS_S) == 0:  # answers are paid for
                wait_for([future for _, future in under_way if future.running()], _READ_S)
            for rollout, future in under_way:
                if future.done() and not future.cancelled() and future.exception() is None:
                    self._keep(rollout, future.result())
            raise
        pool.shutdown()

    def report(self) -> dict[str, Any]:
        """`scored`, `unscored`, `mean`, `coverage` and `undecided`."""
        mean = math.fsum(self._values) / len(self._values) if self._values else None
        return {name: self._counts[name] for name in ("scored", "unscored")} | {
            "mean": mean,
            **coverage_report(self._results),
        }

    def _graded(self, rollout: Rollout) -> Graded:
        return grade_rollout(self.rubric, task_of(rollout), rollout, complete=True)

    def _serially(self, rollouts: Iterator[Rollout]) -> Iterator[tuple[Task, ScoreResult | None, Rollout]]:
        for rollout in rollouts:
            graded = self._graded(rollout)
            self._keep(rollout, graded)
            yield task_of(rollout), graded.result, rollout

    def _keep_first(self, under_way: deque[tuple[Rollout, Future[Graded]]]) -> None:
        rollout, future = under_way[0]
        self._keep(rollout, future.result())
        under_way.popleft()  # last: where waiting for it is interrupted, it may still be done

    def _keep(self, rollout: Rollout, graded: Graded) -> None:
        if graded.rewards is not None:
            self._recorder.scored(rollout, graded.rewards)
        self._counts["unscored" if math.isnan(graded.value) else "scored"] += 1
        self._values += [] if math.isnan(graded.value) else [graded.value]
        self._results.append(_as_scored(rollout, graded.value))
        self.advance(1)


def _as_scored(rollout: Rollout, value: float) -> ScoreResult:
    """A scored rollout as the result that its verdicts came from."""
    failed = (
        None
        if rollout.status == "done" and rollout.prediction is not None
        else rollout.error or "the agent gave no answer"
    )
    return ScoreResult(value=value, verdicts=tuple(rollout.verdicts), failed=failed)


def corrected_means(rubric: Rubric, store: Store, run_id: str, *, file: str = "") -> dict[str, dict[str, Any]]:
    """Means of a run's judge criteria, corrected by labels that `assay judge label` collected for some of its outputs.

    The store gets the questions of these criteria, so that raters can be asked on the local page.

    Args:
        file: the rubric's YAML file, by which its judges are named in commands.
    Returns:
        By criterion, `assay.judges.quality.drift.CorrectedMean` as a mapping. Left out: criteria with fewer than
        20 labelled outputs or fewer than two unlabelled ones.
    """
    judges = _judges_of(rubric)
    for name, judge in judges.items():
        if isinstance(judge, Judge):
            remember(store, judge, f"{file}:{name}" if file else "")
    grades_by_item: dict[str, dict[str, list[float]]] = {}
    for name, judge in judges.items():
        labels: dict[str, list[float]] = defaultdict(list)
        for row in store.labels(key_of(judge)) if judge.spec.graded else ():
            labels[row["item_id"]].append(judge.spec.grade(row["label"]))
        if len(labels) >= FEWEST_PEOPLE:
            grades_by_item[name] = labels
    if not grades_by_item:
        return {}
    columns: dict[str, tuple[list[float], list[float], list[float]]] = {name: ([], [], []) for name in grades_by_item}
    latest: dict[str, Rollout] = {}
    for rollout in store.rollouts(run_id=run_id):  # newest first
        if rollout.source not in NOT_AGENTS and rollout.prediction:
            latest.setdefault(rollout.task_id, rollout)
    for rollout in latest.values():
        grades = {verdict.criterion: verdict.grade for verdict in rollout.verdicts if verdict.grade is not None}
        for name in columns.keys() & grades.keys():
            label_grades, graded, unlabelled = columns[name]
            entry = item_to_label(rollout, judges[name])
            if entry is not None and entry.item_id in grades_by_item[name]:
                label_grades.append(float(np.mean(grades_by_item[name][entry.item_id])))
                graded.append(grades[name])
            else:
                unlabelled.append(grades[name])
    return {
        name: asdict(corrected_mean(label_grades, graded, unlabelled))
        for name, (label_grades, graded, unlabelled) in columns.items()
        if len(label_grades) >= FEWEST_PEOPLE and len(unlabelled) > 1
    }


def _judges_of(rubric: Rubric) -> dict[str, AnyJudge]:
    """The judges of a rubric's final criteria, by criterion."""
    return {
        c.name: load_judge(c.judge.use, own_model=False) if c.judge.use else PointwiseJudge(c.judge)
        for c in rubric.finals
        if c.judge is not None
    }
