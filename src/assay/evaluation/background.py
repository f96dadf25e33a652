"""Scores rollouts of production in threads of its own, so that no caller waits for a judge.

A rollout that a judge could not decide stays unscored, with a reason in the log: `assay traces score` scores it later.
"""

import logging
import math
import queue
import threading
import time

from assay.datasets import Task
from assay.evaluation.stored import write_score
from assay.rubrics import Rubric
from assay.support.scrubbing import error_text
from assay.traces import Recorder, Rollout

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
