"""Caps on tokens and dollars reserve what a call may cost before it is sent."""

import asyncio
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st

from assay.errors import BudgetExceeded, ConfigError
from assay.models import Call, Caps, Meter
from assay.models.limits import OverTime, limited, within_limit
from assay.models.meter import Reservation
from assay.testing import scripted_lm

FOREVER_S = 60.0  # guards against a deadlock


def in_threads(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(FOREVER_S)
    assert not any(thread.is_alive() for thread in threads), "a call waits forever"


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    threads=st.sampled_from([1, 4, 16]),
    cap=st.integers(200, 2000),
    limit=st.sampled_from([10, 60, 150]),
    exact=st.booleans(),
    failing=st.booleans(),
)
def test_a_job_is_above_its_cap_by_what_calls_in_flight_cost_beyond_their_reservation_at_most(
    seed: int, threads: int, cap: int, limit: int, exact: bool, failing: bool
) -> None:
    rng, meter = random.Random(seed), Meter(Caps(tokens=cap, cost_usd=cap / 1000))
    lock, beyond = threading.Lock(), [0]
    costs = [rng.randint(1, limit + (0 if exact else 40)) for _ in range(300)]

    def work(number: int) -> None:
        for tokens in costs[number::threads]:
            try:
                with meter.sending("", Reservation(limit, limit / 1000, exact=exact)) as sent:
                    failed = failing and tokens % 5 == 0
                    try:
                        if tokens % 3 == 0:
                            time.sleep(0.0005)
                        if failed:
                            raise ValueError("the server failed")
                    finally:
                        spent = 0 if failed else tokens
                        meter.settle(
                            sent, prompt_tokens=spent, completion_tokens=0, cost_usd=spent / 1000, failed=failed
                        )
                        with lock:
                            beyond[0] += max(0, spent - limit)
            except ValueError:
                pass
            except BudgetExceeded:
                return

    in_threads(work, threads)
    alone = 0 if exact else limit + 40  # an estimate stops no call that is alone in flight
    assert meter.usage.tokens <= cap + beyond[0] + alone
    assert meter.usage.cost_usd <= (cap + beyond[0] + alone) / 1000 + 1e-9
    assert meter.in_flight == 0
    if sum(costs) > 3 * cap and not failing:
        assert meter.usage.tokens > cap - limit, "the cap is used up"


@pytest.mark.parametrize("threads", [1, 4, 16])
def test_calls_that_limit_their_answer_never_exceed_a_cap_and_wait_for_each_other_instead_of_stopping(
    threads: int,
) -> None:
    meter, stopped = Meter(Caps(tokens=1000)), list[BaseException]()
    lm = scripted_lm(lambda request: (time.sleep(0.002), "yes")[1], meter=meter)  # 15 tokens a call

    def work(number: int) -> None:
        for at in range(100):
            try:
                lm(f"question {number} {at}", max_tokens=400)
            except BudgetExceeded as error:
                stopped.append(error)
                return

    in_threads(work, threads)
    assert len(stopped) == threads
    assert 400 < meter.usage.tokens <= 1000
    assert meter.usage.calls == lm.scripted.calls == meter.usage.tokens // 15


def test_a_cap_smaller_than_one_call_is_refused_before_anything_is_spent() -> None:
    meter = Meter(Caps(tokens=300))
    lm = scripted_lm(lambda request: "yes", meter=meter)
    with pytest.raises(ConfigError, match="max_tokens=300 is less than one call may take"):
        lm("a", max_tokens=400)
    assert (meter.usage.calls, lm.scripted.calls, meter.in_flight) == (0, 0, 0)
    assert lm("a", max_tokens=100)


@pytest.mark.parametrize("caps", [Caps(tokens=20), Caps(cost_usd=0.001)])
def test_a_cap_smaller_than_the_prompt_of_one_call_without_max_tokens_is_refused(caps: Caps) -> None:
    meter = Meter(caps)
    lm = scripted_lm(lambda request: "yes", meter=meter, price_usd=0.002)
    with pytest.raises(ConfigError):
        lm("What is the sum of " + ", ".join(map(str, range(100))))
    assert (meter.usage.calls, lm.scripted.calls) == (0, 0)


def test_a_call_at_the_cap_is_refused_only_once_the_calls_in_flight_are_recorded() -> None:
    calls, go_on = list[Call](), threading.Event()
    meter = Meter(Caps(calls=3))
    lm = scripted_lm(lambda request: (go_on.wait(FOREVER_S), "yes")[1], meter=meter, observers=[calls.append])
    threads = [threading.Thread(target=lm, args=(f"{number}",), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    while meter.in_flight < 3:
        time.sleep(0.001)
    recorded = list[int]()

    def refused() -> None:
        with pytest.raises(BudgetExceeded):
            lm("one more")
        recorded.append(len(calls))

    last = threading.Thread(target=refused, daemon=True)
    last.start()
    time.sleep(0.05)
    assert recorded == []
    go_on.set()
    last.join(FOREVER_S)
    assert recorded == [3]


def test_a_reservation_is_released_by_a_cancelled_task_and_its_answer_is_recorded() -> None:
    calls, meter = list[Call](), Meter(Caps(tokens=10_000))
    lm = scripted_lm(lambda request: (time.sleep(0.2), "yes")[1], meter=meter, observers=[calls.append])

    async def main() -> None:
        task = asyncio.ensure_future(lm.acall("a", max_tokens=5000))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert meter.land(FOREVER_S) == 0
    assert [call.output for call in calls] == ["yes"]
    assert meter.usage.tokens == 15


def test_a_run_over_its_time_limit_ends_after_its_call_and_makes_no_further_one() -> None:
    calls, meter = list[Call](), Meter()
    lm = scripted_lm(lambda request: (time.sleep(0.3), "yes")[1], meter=meter, observers=[calls.append])

    def run() -> None:
        for number in range(100):
            lm(f"{number}")

    with limited(0.1), pytest.raises(OverTime):
        within_limit(run, "the run")
    assert meter.land(FOREVER_S) == 0, "nobody waits for a call whose run is over its limit"
    end = time.monotonic() + FOREVER_S
    while meter.in_flight and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.05)
    assert [call.error for call in calls] == [None]
    assert (meter.usage.calls, meter.in_flight) == (1, 0)


def test_ctrl_c_does_not_interrupt_a_call_of_the_main_thread() -> None:
    calls, meter = list[Call](), Meter()
    lm = scripted_lm(lambda request: (time.sleep(0.4), "yes")[1], meter=meter, observers=[calls.append])
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            lm("a")
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert meter.land(FOREVER_S) == 0
    assert [call.output for call in calls] == ["yes"]
