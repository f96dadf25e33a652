"""Reproducible rollout ids, with which a resumed run overwrites its earlier rows instead of adding new ones.

Imports, the gateway and `assay.record` use random ids (`new_id`), because their rollouts are not replayed.
"""

import hashlib
import threading
from collections import Counter
from typing import Any

import dspy

from assay.datasets.tasks import task_key
from assay.models.scope import current_sample
from assay.support.values import json_text
from assay.traces.records import Rollout


class RolloutIds:
    """Generates the rollout ids of one run. Thread-safe.

    An id is a hash of the run, its phase and scope (such as a trial of a study), the task with its inputs, the sample,
    and the version, parameters and model settings of the program. Rollouts that agree in all of these are numbered;
    they are interchangeable, so their order does not matter.
    """

    def __init__(self) -> None:
        self._repetitions: Counter[str] = Counter()
        self._lock = threading.Lock()

    def of(self, rollout: Rollout, *, scope: str = "", key: str | None = None) -> str:
        """Id of a rollout: 32 hexadecimal digits.

        Args:
            rollout: Its `run_id` and `phase` must be set.
            scope: Scope inside the phase.
            key: Key of its task, if already computed.
        """
        lm = dspy.settings.lm
        identity = [
            rollout.run_id,
            scope,
            rollout.phase,
            rollout.source,
            rollout.program,
            rollout.program_version,
            rollout.task_id,
            key or task_key(rollout.inputs),
            rollout.sample,
            rollout.parameters,
            current_sample.get(),
            None
            if lm is None
            else [lm.model, {key: value for key, value in lm.kwargs.items() if not key.startswith("api_")}],
        ]
        digest = _digest(identity)
        with self._lock:
            number = self._repetitions[digest]
            self._repetitions[digest] += 1
        return digest if number == 0 else _digest([digest, number])


def outside_id(run_id: str, phase: str, scope: str = "") -> str:
    """Id of the rollout that contains the LM calls of a phase outside any other rollout."""
    return _digest([run_id, scope, phase, "outside"])


def _digest(value: Any) -> str:
    text = json_text(value, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
