"""What a named optimizer receives: program, tasks, metric, and sizes that fit the remaining calls."""

import inspect
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dspy

from assay.datasets import Task
from assay.errors import BudgetExceeded
from assay.evaluation.session import RecordedProgram, Session
from assay.optimizers.budget import run_calls
from assay.optimizers.prompts.demonstrations import Exploration, explore


@dataclass
class Proposal:
    """The inputs of an optimizer.

    Attributes:
        threshold: score in (0, 1] from which a run is a success.
        demos: most bootstrapped demonstrations of a predictor.
        labels: most demonstrations of a predictor that come from the data.
        settings: the user's arguments of the optimizer; they override assay's.
        cut: the cap that interrupted the optimizer, if any.
        notes: what the report says about the optimizer.
    """

    student: RecordedProgram
    train: list[Task]
    val: list[Task]
    session: Session
    threshold: float = 0.8
    demos: int = 4
    labels: int = 16
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the optimizer, before our own
    cut: BudgetExceeded | None = None  # the cap that ended the optimizer before it was done
    notes: list[str] = field(default_factory=list)

    def build(self, optimizer_class: Any, **defaults: Any) -> Any:
        """The optimizer, with the user's settings before ours."""
        if self.settings.get("auto"):  # it sets these two by itself
            defaults = {
                name: value for name, value in defaults.items() if name not in ("num_candidates", "max_metric_calls")
            }
        return optimizer_class(**{**defaults, **self._for(optimizer_class)})

    def compiled(self, optimizer: Any, **defaults: Any) -> Any:
        """What the optimizer makes of the student, with the user's settings before ours."""
        if self.settings.get("auto"):
            defaults.pop("num_trials", None)
        return optimizer.compile(self.student, **{**defaults, **self._for(optimizer.compile)})

    def _for(self, function: Any) -> dict[str, Any]:
        accepted = inspect.signature(function).parameters
        return {name: value for name, value in self.settings.items() if name in accepted}

    def runs(self, otherwise: int) -> int:
        """Runs of the program that the remaining calls allow, less a tenth for proposals; `otherwise` without a cap."""
        calls_left = self.session.meter.search_calls_left()
        if not math.isfinite(calls_left):
            return otherwise
        return max(1, int(0.9 * calls_left / max(1.0, sum(run_calls(self.student.program, self.session)))))

    def passes(self, otherwise: int, *, most: int) -> int:
        """Evaluations on all of val that the calls left allow, from 1 to `most`."""
        return (
            otherwise
            if not math.isfinite(self.session.meter.search_calls_left())
            else min(most, max(1, self.runs(0) // max(1, len(self.val))))
        )

    def metric(self, *, feedback: bool = False) -> Any:
        return self.session.rubric.metric(threshold=self.threshold, feedback=feedback, tasks=self.session.tasks)

    def examples(self) -> list[dspy.Example]:
        return to_examples(_shuffled(self.train, self.session.seed))

    def explored(self) -> Exploration:
        """Successes of the program's variants on train, within a third of the calls that are left."""
        session = self.session
        prompt_formats = [self.student.settings["adapter"]]
        calls_left = session.meter.search_calls_left()
        return explore(
            self.student,
            self.train,
            session,
            prompt_formats=prompt_formats,
            max_calls=calls_left / 3,
            threshold=self.threshold,
        )

    def teacher(self) -> RecordedProgram:
        """The variant that succeeds most: with a plain program that never does, there is nothing else to learn from."""
        return self.explored().teacher or self.student

    @property
    def prompt_lm(self) -> Any:
        return self.session.prompt_lm or self.session.lm


def _shuffled(tasks: Sequence[Task], seed: int) -> list[Task]:
    order = list(tasks)
    random.Random(seed).shuffle(order)  # DSPy draws its demonstrations with a fixed seed of its own
    return order


def to_examples(tasks: Sequence[Task]) -> list[dspy.Example]:
    """Tasks as DSPy examples."""
    return [dspy.Example(**task.inputs, **task.expected).with_inputs(*task.inputs) for task in tasks]
