"""An evaluation's runs in threads: each result is yielded when complete, also those before a failure."""

import threading
import time

import pytest

from assay.errors import BudgetExceeded, Cancelled
from assay.evaluation.executors import in_background, in_order


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (Cancelled("by the user"), False),
        (KeyboardInterrupt(), False),
        (BudgetExceeded("the cap is reached", what="calls"), True),
    ],
)
def test_a_stop_by_the_user_does_not_wait_for_jobs_in_progress_and_a_cap_does(
    error: BaseException, waits: bool
) -> None:
    ended, go_on = list[int](), threading.Event()

    def job(index: int) -> None:
        if index == 1:
            raise error
        go_on.wait(120)
        ended.append(index)

    release = threading.Timer(1.0, go_on.set)
    release.start()
    with pytest.raises(type(error)):
        in_order(job, 2, threads=2)
    assert bool(ended) == waits
    release.cancel()
    go_on.set()


def test_results_are_in_the_order_of_the_jobs_and_a_job_in_the_background_keeps_its_exception() -> None:
    assert in_order(lambda index: (time.sleep(0.1 if index == 0 else 0), index)[1], 4, threads=4) == [0, 1, 2, 3]
    assert in_order(lambda index: index, 0, threads=4) == []
    assert in_background(lambda: 7)() == 7
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 // 0)()
