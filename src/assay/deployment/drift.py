"""How tasks of production differ from the training data: shares of task types, lengths of inputs."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from assay.datasets.tasks import Task


@dataclass
class Profile:
    """Task types and lengths of a set of tasks.

    Attributes:
        types: number of tasks by task type.
        lengths: characters of the inputs, one number a task.
    """

    types: Counter[str] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)

    def add(self, task_type: str, inputs: Mapping[str, Any], count: int = 1) -> None:
        """Counts a task.

        Args:
            count: number of its rollouts.
        """
        self.types[task_type] += count
        self.lengths.append(sum(len(str(value)) for value in inputs.values()))

    @classmethod
    def of(cls, tasks: Iterable[Task]) -> "Profile":
        profile = cls()
        for task in tasks:
            profile.add(task.task_type, task.inputs)
        return profile


def drift(before: Profile, now: Profile) -> dict[str, Any] | None:
    """Difference of two profiles; None if one of them is empty.

    Returns:
        `task_types`: share before and now by type; `distance`: total variation distance of the shares, in [0, 1];
        `new_task_types`; `length`: medians before and now with the Kolmogorov-Smirnov statistic and its p value.
    """
    from scipy import stats

    if not before.lengths or not now.lengths:
        return None
    shares = {
        kind: [profile.types[kind] / profile.types.total() for profile in (before, now)]
        for kind in sorted(before.types.keys() | now.types.keys())
    }
    test = stats.ks_2samp(before.lengths, now.lengths)
    return {
        "task_types": shares,
        "distance": sum(abs(one - other) for one, other in shares.values()) / 2,
        "new_task_types": sorted(now.types.keys() - before.types.keys()),
        "length": {
            "before": statistics.median(before.lengths), "now": statistics.median(now.lengths),
            "ks": float(test.statistic), "p": float(test.pvalue),
        },
    }  # fmt: skip
