"""The time limit on code of others: what it returns and raises, what is left behind, and what it costs."""

import contextvars
import threading
import time

import pytest

from assay.models.limits import OverTime, asking_model, limited, within_limit


def test_a_call_gives_what_it_returns_and_raises_what_it_raises() -> None:
    place = contextvars.ContextVar("place", default="nowhere")
    place.set("here")
    assert within_limit(place.get, "it") == "here"
    with pytest.raises(SystemExit, match="3"):
        within_limit(lambda: (_ for _ in ()).throw(SystemExit(3)), "it")
    with limited(None):
        assert within_limit(threading.current_thread, "it") is threading.current_thread()


@pytest.mark.parametrize("asks", [False, True])
def test_what_takes_too_long_is_left_and_says_whether_a_model_was_asked(asks: bool) -> None:
    began = time.monotonic()

    def waits() -> None:
        if asks:
            with asking_model(), limited(5):
                within_limit(lambda: time.sleep(3), "inner")
        time.sleep(3)

    with limited(0.2), pytest.raises(OverTime, match=r"the run took longer than the limit of 0\.2 s") as late:
        within_limit(waits, "the run")
    assert late.value.asking == asks
    assert time.monotonic() - began < 1


def test_a_model_that_is_asked_inside_of_an_inner_call_counts_for_the_outer() -> None:
    def asks() -> None:
        with asking_model():
            time.sleep(3)

    def outer() -> None:
        with limited(5):
            within_limit(asks, "inner")

    with limited(0.2), pytest.raises(OverTime) as late:
        within_limit(outer, "outer")
    assert late.value.asking


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
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    counted = turns[0]
    time.sleep(0.1)
    assert turns[0] == counted


def test_threads_are_used_again() -> None:
    names = {within_limit(lambda: threading.current_thread().ident, "it") for _ in range(200)}
    assert len(names) <= 2
    began = time.perf_counter()
    for _ in range(1000):
        within_limit(int, "it")
    assert (time.perf_counter() - began) / 1000 < 0.002
