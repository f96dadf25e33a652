"""An evaluation's runs in threads: each is given as it is done, also those before a failure."""

import threading
import time
from typing import Any

import pytest

from assay.datasets import Task
from assay.errors import BudgetExceeded
from assay.evaluation import Session
from assay.evaluation.executors import pairs_in_threads
from assay.models import Meter
from assay.rubrics import Criterion, Rubric
from assay.testing import scripted_lm
from assay.traces import Recorder


@pytest.mark.parametrize("threads", [1, 3])
def test_runs_finished_before_a_failure_are_yielded(threads: int) -> None:
    session = Session(
        scripted_lm(lambda _: ""),
        Rubric("r", [Criterion(name="ok", check=lambda *_: True)]),
        Recorder(),
        Meter(),
        threads=threads,
    )

    class Runner:
        def run(self, inputs: dict[str, Any], digest: str) -> str:
            if inputs["q"] == 5:
                time.sleep(0.3)
                raise BudgetExceeded("the cap is reached", what="calls")
            return digest

    tasks = [Task(id=str(at), inputs={"q": at}) for at in range(6)]
    runs = pairs_in_threads([(Runner(), task) for task in tasks], session)  # type: ignore[misc]
    options = [next(runs) for _ in range(5)]
    assert sorted(options) == [(at, tasks[at].content_hash) for at in range(5)]
    with pytest.raises(BudgetExceeded):
        next(runs)


def test_runs_are_yielded_while_others_are_in_progress() -> None:
    session = Session(
        scripted_lm(lambda _: ""),
        Rubric("r", [Criterion(name="ok", check=lambda *_: True)]),
        Recorder(),
        Meter(),
        threads=2,
    )
    go_on = threading.Event()

    class Runner:
        def run(self, inputs: dict[str, Any], digest: str) -> bool:
            return inputs["q"] == 0 or go_on.wait(20)

    pairs = [(Runner(), Task(id=str(at), inputs={"q": at})) for at in range(2)]
    runs = pairs_in_threads(pairs, session)  # type: ignore[arg-type]
    assert next(runs) == (0, True)
    go_on.set()
    assert list(runs) == [(1, True)]
