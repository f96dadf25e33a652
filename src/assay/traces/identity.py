"""Ids of rollouts that a replay gives again, so that a resumed run overwrites what it wrote and adds nothing.

Imports, the gateway and `assay.record` keep ids of their own (`new_id`): what they record happens once.
"""

import hashlib
import json
import threading
from collections import Counter
from typing import Any

import dspy

from assay.datasets.tasks import content_hash
from assay.models.scope import current_sample
from assay.traces.records import Rollout

__all__ = ["RolloutIds", "outside_id"]


class RolloutIds:
    """Hands out the ids of one run's rollouts.

    An id is a hash of the run, its phase and scope (a trial of a study), the task with its inputs, the sample, and the version, parameters and
    model settings of the program that runs. Rollouts that are alike in all of these are numbered: they are interchangeable, so their order does
    not matter. Thread-safe.
    """

    def __init__(self) -> None:
        self._given: Counter[str] = Counter()
        self._lock = threading.Lock()

    def of(self, rollout: Rollout, *, scope: str = "", content: str | None = None) -> str:
        """32 hexadecimal digits. `run_id` and `phase` of the rollout must be set; `content` is the hash of its inputs, where it is known."""
        lm = dspy.settings.lm
        what = [
            rollout.run_id, scope, rollout.phase, rollout.source, rollout.program, rollout.program_version, rollout.task_id,
            content or content_hash(rollout.inputs), rollout.sample, rollout.parameters, current_sample.get(),
            None if lm is None else [lm.model, {key: value for key, value in lm.kwargs.items() if not key.startswith("api_")}],
        ]  # fmt: skip
        digest = _digest(what)
        with self._lock:
            number = self._given[digest]
            self._given[digest] += 1
        return digest if number == 0 else _digest([digest, number])


def outside_id(run_id: str, phase: str, scope: str = "") -> str:
    """Of the one rollout that holds a phase's LM calls outside any rollout."""
    return _digest([run_id, scope, phase, "outside"])


def _digest(what: Any) -> str:
    text = json.dumps(what, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
