"""Scores rollouts of the store by a rubric, for `assay.score_rollouts`.

Judges run on several threads. Scores are written and counted in the order of the rollouts.
"""

import contextvars
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

from assay.datasets import Task
from assay.errors import ConfigError
from assay.evaluation.progress import Advance
from assay.evaluation.stored import Graded, grade_rollout, task_of
from assay.models import LanguageModel, Meter
from assay.models.limits import LAST_CALLS_S
from assay.rubrics import Rubric, ScoreResult
from assay.rubrics.scoring import coverage_report
from assay.runs.preflight import preflight_scoring
from assay.traces import Recorder, Rollout, Store

_AHEAD = 4  # rollouts in progress per thread: how far others may run ahead of a slow one
_READ_S = 0.2  # for judges to read their last answers
_UNKNOWN = 4  # concurrent calls to a user's own client, which does not state its concurrency


def threads_for(rubric: Rubric, threads: int | None = None) -> int:
    """Number of rollouts that are scored at the same time.

    Args:
        threads: the number to use. None: the smallest concurrency of the judges' engines; 1 if no criterion has a
            judge.
    Raises:
        ConfigError: `threads` is below 1.
    """
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"threads={threads!r} must be at least 1", flag="--threads")
        return threads
    lms = [lm for c in rubric.criteria if (lm := getattr(rubric.decider(c.name), "lm", None)) is not None]
    return min(
        (lm.recording.backend.concurrency if isinstance(lm, LanguageModel) else _UNKNOWN for lm in lms), default=1
    )


class Rescoring:
    """Scores rollouts, writes the scores and counts them.

    Args:
        advance: called with 1 for each rollout whose score is written.
        meter: of the judges' model, if one is named; where it is interrupted, its calls in flight are waited for.
    """

    def __init__(self, rubric: Rubric, store: Store, advance: Advance, meter: Meter | None = None) -> None:
        self.rubric, self.advance, self._meter = rubric, advance, meter or Meter()
        self._recorder = Recorder(store)
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
