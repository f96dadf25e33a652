"""Time limits on calls: results and exceptions, abandoned threads, overhead."""

import asyncio
import signal
import threading
import time

import pytest

from assay.errors import FailureKind
from assay.models.calls import failure_of_program
from assay.models.limits import (
    OverTime,
    RaisedInside,
    ToolOverTime,
    asking_model,
    awaited_within_tool_limit,
    limited,
    within_limit,
    within_tool_limit,
)


def hangs_in_python() -> None:
    while True:
        time.sleep(0.01)


class Unreadable(Exception):
    def __init__(self, raised: BaseException) -> None:
        self.raised = raised

    def __str__(self) -> str:
        raise self.raised


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        Unreadable(SystemExit(5)),
        Unreadable(KeyboardInterrupt()),
        SystemExit(Unreadable(SystemExit(5))),
    ],
)
def test_an_exception_that_would_end_the_job_is_replaced(error: BaseException) -> None:
    with pytest.raises(RaisedInside, match=type(error).__name__) as caught:
        within_limit(lambda: (_ for _ in ()).throw(error), "it")
    assert failure_of_program(caught.value) is FailureKind.AGENT
    assert caught.traceback[-1].name in ("<genexpr>", "<lambda>"), "it says where it was raised"


@pytest.mark.timeout(120)
def test_ctrl_c_stops_the_thread_that_waits_for_a_call() -> None:
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist's workers ignore it
    try:
        timer.start()
        with limited(600), pytest.raises(KeyboardInterrupt):
            within_limit(hangs_in_python, "the run")
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.timeout(120)
def test_a_call_over_its_limit_is_abandoned_and_reports_whether_a_model_was_called(asks: bool) -> None:

    def waits() -> None:
        if asks:
            with asking_model(), limited(5):
                within_limit(lambda: time.sleep(300), "inner")
        time.sleep(300)

    with limited(0.2), pytest.raises(OverTime, match=r"the run took longer than the limit of 0\.2 s") as late:
        within_limit(waits, "the run")
    assert late.value.in_model_call == asks


def test_a_loop_that_never_ends_is_stopped() -> None:
    turns, swallowed = [0], [0]

    def loops() -> None:
        while True:
            try:
                turns[0] += 1
            except Exception:
                swallowed[0] += 1

    before = threading.active_count()
    with limited(0.2), pytest.raises(OverTime):
        within_limit(loops, "the run")
    deadline = time.monotonic() + 120
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    counted = turns[0]
    time.sleep(0.1)
    assert turns[0] == counted


def test_a_tool_has_a_quarter_of_its_runs_limit_and_no_limit_outside_a_run() -> None:
    def run() -> str:
        with pytest.raises(ToolOverTime, match=r"the tool 'search' gave no result after 0\.2 s"):
            within_tool_limit(hangs_in_python, "search")
        return "went on"

    with limited(0.8):
        assert within_limit(run, "the run") == "went on"
    assert within_tool_limit(threading.current_thread, "search") is threading.current_thread()
    with limited(None, tools_of=0.8):
        assert run() == "went on"


@pytest.mark.timeout(120)
def test_a_tool_that_hangs_in_c_code_is_abandoned_with_its_run() -> None:
    with limited(8), pytest.raises(ToolOverTime, match=r"the tool 'search' gave no result after 2 s"):
        within_limit(lambda: within_tool_limit(lambda: time.sleep(300), "search"), "the run")
    assert within_limit(lambda: "the next", "the run") == "the next"


@pytest.mark.slow
def test_no_stop_is_raised_after_a_tool_has_returned() -> None:
    """Calls that take about as long as their limit: each returns or raises, and nothing is raised later."""
    late = 0
    with limited(0.02):  # 5 ms per tool
        for at in range(200):
            end = time.monotonic() + 0.0025 * (at % 4)
            try:
                within_tool_limit(lambda end=end: [None for _ in iter(lambda: time.monotonic() < end, False)], "search")
            except ToolOverTime:
                late += 1
            sum(range(2000))
    assert late < 200


def test_a_tool_that_calls_a_model_has_the_limit_of_its_run() -> None:
    def asks() -> str:
        with asking_model():
            time.sleep(0.1)
        time.sleep(0.5)
        return "found"

    async def awaits() -> str:
        with asking_model():
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)
        return "found"

    with limited(0.8):
        assert within_tool_limit(asks, "agent") == "found"
        assert asyncio.run(awaited_within_tool_limit(awaits, "agent")) == "found"
    with limited(0.4), pytest.raises(OverTime, match="the run took longer"):
        within_limit(lambda: within_tool_limit(asks, "agent"), "the run")


def test_an_asynchronous_tool_is_cancelled_at_its_limit_and_the_loop_continues() -> None:
    ended: list[str] = []

    async def hangs() -> None:
        try:
            await asyncio.sleep(3)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def run() -> str:
        try:
            await awaited_within_tool_limit(hangs, "search")
        except ToolOverTime as late:
            await asyncio.sleep(0.01)
            return str(late)
        return "answered"

    with limited(0.4):
        assert asyncio.run(run()) == "the tool 'search' gave no result after 0.1 s"
    assert ended == ["cancelled"]
