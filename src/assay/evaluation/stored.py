"""Scores stored and recorded rollouts by a rubric.

A rollout without a prediction first gets the final answer of its LM calls. Does not run a program:
`assay.evaluation.session` scores the rollouts of one.
"""

import logging
import math
import queue
import threading
import time
from dataclasses import dataclass

from assay.datasets import Task
from assay.datasets.tasks import task_key
from assay.errors import FailureKind
from assay.models.calls import unanswered
from assay.rubrics import Rubric, ScoreResult
from assay.rubrics.criteria import Failed
from assay.rubrics.rubric import score_rollout
from assay.support.scrubbing import error_text
from assay.traces import Recorder, Rollout
from assay.traces.messages.chaining import is_on_record
from assay.traces.messages.final_answer import NO_ANSWER, NOT_RECORDED, final_answer, prediction_of
from assay.traces.recorder import checking
from assay.traces.records import Verdict

NOT_ON_RECORD = "a call continues a conversation that is not on record"


def write_score(rubric: Rubric, task: Task, rollout: Rollout, recorder: Recorder, *, complete: bool = False) -> float:
    """Scores a rollout by a rubric, writes score, verdicts and step rewards, and returns the score (NaN: unscored).

    A rollout without a prediction gets the final answer of its LM calls (`assay.traces.messages.final_answer`). Without
    a final answer it failed: its score is 0. It stays unscored if its last call failed, or if the record does not
    contain the answer or what a call continues.

    Args:
        complete: if a final criterion that applies is unscored, writes nothing and returns NaN.
    """
    graded = grade_rollout(rubric, task, rollout, complete=complete)
    if graded.rewards is not None:
        recorder.scored(rollout, graded.rewards)
    return graded.value


@dataclass(frozen=True)
class Graded:
    """A rubric's score of a rollout.

    Attributes:
        value: score in [0, 1]; NaN means unscored.
        result: None if the rubric was not applied.
        rewards: step rewards of each transition, to be written with the score; None if nothing is to be written.
    """

    value: float
    result: ScoreResult | None = None
    rewards: list[dict[str, float]] | None = None


def grade_rollout(rubric: Rubric, task: Task, rollout: Rollout, *, complete: bool = False) -> Graded:
    """As `write_score`, without writing. Threads use it, because scores are written in the order of the rollouts."""
    if not is_on_record(rollout.transitions):
        rollout.failure, rollout.error = FailureKind.RECORD, rollout.error or NOT_ON_RECORD
        return Graded(math.nan)
    if rollout.prediction is None and rollout.status == "done" and not _ended(rollout):
        return Graded(math.nan)
    failed = Failed(rollout.error or "the agent gave no answer", kind=rollout.failure or FailureKind.AGENT)
    answered = rollout.status == "done" and rollout.prediction is not None
    with checking(rollout, name=rubric.name):
        result = score_rollout(rubric, task, rollout.prediction if answered else failed, rollout)
        if complete and (
            math.isnan(result.value)
            or (result.failed is None and any(_undecided(verdict) for verdict in result.verdicts))
        ):
            return Graded(math.nan, result)
        return Graded(result.value, result, rubric.step_rewards(task, rollout))


def _ended(rollout: Rollout) -> bool:
    """Sets the prediction of a rollout without one from its LM calls. False if their final answer is unknown."""
    if (broken := unanswered(rollout.transitions)) is not None:
        rollout.failure = broken
        return False
    if rollout.transitions and rollout.transitions[-1].error is None:
        ending = final_answer(rollout.transitions)
        if not ending.known:
            rollout.error = rollout.error or NOT_RECORDED
            return False
        rollout.prediction = prediction_of(ending.value)
        rollout.error = rollout.error or (NO_ANSWER if ending.value is None else None)
    return True


def _undecided(verdict: Verdict) -> bool:
    return verdict.scope == "final" and verdict.applies and verdict.grade is None


def task_of(rollout: Rollout) -> Task:
    """The task of a stored rollout, from the fields that the store has."""
    # Rollouts of `assay run` have no task id.
    name = rollout.task_id or task_key(rollout.inputs)
    return Task(
        id=name,
        task_type=rollout.task_type,
        inputs=rollout.inputs,
        expected=rollout.expected,
        metadata=rollout.metadata,
    )


# -- Scores rollouts of production in threads of its own, so that no caller waits for a judge.
#
# A rollout that a judge could not decide stays unscored, with a reason in the log: `assay traces score` scores it
# later.


_LOG = logging.getLogger("assay.deployed")
_MOST = 1000  # rollouts that wait; further ones stay unscored
_QUIET_S = 60.0  # between two lines of the log


class BackgroundScoring:
    """Threads that score rollouts after their end.

    Args:
        threads: rollouts that are scored at the same time.
    Attributes:
        unscored: rollouts that a judge could not decide, or that were more than may wait.
    """

    def __init__(self, rubric: Rubric, recorder: Recorder, *, threads: int) -> None:
        self.rubric, self.recorder, self.unscored = rubric, recorder, 0
        self._waiting: queue.Queue[tuple[Task, Rollout]] = queue.Queue(_MOST)
        self._lock, self._warned_at, self._most_threads = threading.Lock(), -math.inf, threads
        self._threads: list[threading.Thread] = []

    def add(self, task: Task, rollout: Rollout) -> None:
        """Scores an ended rollout, later. Does not wait."""
        if rollout.score is not None or rollout.status not in ("done", "failed"):
            return
        try:
            self._waiting.put_nowait((task, rollout))
        except queue.Full:
            self._count(f"{_MOST} rollouts wait for their score already")
            return
        with self._lock:
            if len(self._threads) < self._most_threads:
                thread = threading.Thread(target=self._running, name="assay-score", daemon=True)
                self._threads.append(thread)
                thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Waits until all rollouts are scored. False if `timeout_s` is over before."""
        end = time.monotonic() + timeout_s
        while self._waiting.unfinished_tasks:
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)
        return True

    def _running(self) -> None:
        while True:
            task, rollout = self._waiting.get()
            try:
                self._score(task, rollout)
            except Exception as error:  # the thread must not end
                self._count(error_text(error))
            finally:
                self._waiting.task_done()

    def _score(self, task: Task, rollout: Rollout) -> None:
        with self.recorder.active():
            value = write_score(self.rubric, task, rollout, self.recorder, complete=True)
        if math.isnan(value):
            reasons = [verdict.reason for verdict in rollout.verdicts if verdict.grade is None and verdict.reason]
            self._count(reasons[0] if reasons else "no verdict")

    def _count(self, reason: str) -> None:
        with self._lock:
            self.unscored += 1
            tells = time.monotonic() - self._warned_at >= _QUIET_S
            if tells:
                self._warned_at = time.monotonic()
        if tells:
            _LOG.warning("rollouts stay unscored (assay traces score scores them): %s", reason)
