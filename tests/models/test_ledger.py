"""The ledger counts calls before they are sent, and none is lost by a kill; caps, counts and the response cache."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from assay.errors import BudgetExceeded, Cancelled
from assay.models import Caps, Meter, ResponseCache, get_lm, sample_scope, with_recording
from assay.models.ledger import Ledger
from assay.models.meter import spent_before
from assay.models.recording import bill_answered
from assay.testing import scripted_lm
from assay.traces import Store
from rigs.gateway import until

KEY, OTHER = "ab" * 32, "cd" * 32


@pytest.fixture(params=["file", pytest.param("server", marks=pytest.mark.postgres)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | sa.Engine]:
    """Where a ledger is."""
    if request.param == "file":
        yield tmp_path / "calls.db"
        return
    with Store(request.getfixturevalue("empty_postgres_url")) as store:
        yield store.engine


def meter(place: Path | sa.Engine, owner: str = "r1", **caps: Any) -> Meter:
    """The meter of a process that opens the run."""
    ledger = Ledger(place, "run-1", owner=lambda: owner)
    return Meter(Caps(**caps), spent_before(ledger), ledger=ledger)


def answered(by: Meter, key: str, cost: float = 0.5) -> None:
    by.settle(by.reserve(key), prompt_tokens=10, completion_tokens=2, cost_usd=cost, failed=False)


def test_a_call_is_counted_before_it_is_sent(place: Path | sa.Engine) -> None:
    first = meter(place, calls=1)
    first.reserve(KEY)
    assert first.usage.calls == 1
    with pytest.raises(BudgetExceeded):
        first.reserve(OTHER)
    assert meter(place).usage.calls == 1  # the process was killed before it settled the call
    other = Ledger(place, "run-2" if isinstance(place, sa.Engine) else "run-1")
    assert len(other.unsettled()) == (0 if isinstance(place, sa.Engine) else 1)


def test_a_process_that_lost_its_job_settles_its_last_call_beside_the_one_that_took_it_over(
    place: Path | sa.Engine,
) -> None:
    first = meter(place)
    late = first.reserve(KEY)
    second = meter(place)
    again = second.reserve(KEY)
    first.settle(late, prompt_tokens=10, completion_tokens=2, cost_usd=0.5, failed=False)
    second.settle(again, prompt_tokens=10, completion_tokens=2, cost_usd=0.5, failed=False)
    usage = meter(place).usage
    assert (usage.calls, usage.repeated, usage.tokens) == (1, 1, 12)
    assert usage.cost_usd >= 1.0


def test_calls_sent_again_count_against_a_cap_that_several_meters_share(place: Path | sa.Engine) -> None:
    for _ in range(2):  # each process is killed before the answer
        meter(place).reserve(KEY)
    one, two = meter(place, calls=4), Meter(Caps(calls=4))
    one.share_caps_with(two)
    two.share_caps_with(one)
    two.unrecorded = lambda: 1
    two.reserve(OTHER)
    for each in (one, two):
        with pytest.raises(BudgetExceeded, match="the cap of 4 calls is reached: 1 call"):
            each.reserve("ef" * 32)


@contextmanager
def away(engine: sa.Engine) -> Iterator[None]:
    """Inside, the server takes no calls."""
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE calls RENAME TO away")
    yield
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE away RENAME TO calls")


@pytest.mark.postgres
@pytest.mark.parametrize("killed", [False, True])
def test_calls_that_a_server_does_not_take_are_written_once_it_is_back(
    empty_postgres_url: str, tmp_path: Path, killed: bool
) -> None:
    folder = tmp_path / "run-1"
    with Store(empty_postgres_url) as store:
        ledger = Ledger(store.engine, "run-1", aside=folder / "waiting")
        first = Meter(ledger=ledger)
        waiting = first.reserve(KEY)
        with away(store.engine):
            first.settle(waiting, prompt_tokens=10, completion_tokens=2, cost_usd=0.5, failed=False)
            answered(first, OTHER)
            assert first.usage.calls == 2
        if killed:
            folder = shutil.copytree(folder, tmp_path / "left")  # without the lock of the process
        else:
            ledger.close()
        second = Ledger(store.engine, "run-1", aside=folder / "waiting")
        assert vars(spent_before(second)["search"]) == vars(first.usage)
        assert list(folder.iterdir()) == []


@pytest.mark.postgres
def test_calls_that_wait_in_a_process_that_runs_are_left_to_it(empty_postgres_url: str, tmp_path: Path) -> None:
    with Store(empty_postgres_url) as store:
        old = Ledger(store.engine, "run-1", aside=tmp_path / "waiting")
        with away(store.engine):
            old.send(KEY, "search")
        new = Ledger(store.engine, "run-1", aside=tmp_path / "waiting")
        assert new.totals() == []
        with away(store.engine):
            new.send(OTHER, "search")
        for ledger, files in ((new, 1), (old, 0)):
            ledger.close()
            assert len(list(tmp_path.iterdir())) == files
        assert meter(store.engine).usage.calls == 2


@pytest.mark.postgres
def test_a_locked_table_holds_up_no_call(empty_postgres_url: str) -> None:
    with Store(empty_postgres_url) as store:
        ledger = Ledger(store.engine, "run-1")
        with store.engine.connect() as connection:
            connection.exec_driver_sql("LOCK TABLE calls IN EXCLUSIVE MODE")
            for number in range(50):
                ledger.send(f"{number:064x}", "search")  # would wait until the lock is released
            assert not ledger.is_complete()
        until(ledger.is_complete)
        assert meter(store.engine).usage.calls == 50
        ledger.close()


def test_a_call_that_waited_until_its_job_was_lost_is_not_sent() -> None:
    by, lost = Meter(Caps(calls=5)), iter([False, True])
    by.is_counting = lambda: not by.in_flight
    by.obstacle = lambda: "taken over" if by.in_flight and next(lost) else None
    with pytest.raises(BudgetExceeded, match="taken over"), by.sending(KEY):
        pytest.fail("sent")
    assert by.in_flight == 0


@pytest.mark.postgres
def test_with_a_cap_a_call_waits_until_the_server_has_counted_it(
    empty_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(empty_postgres_url) as store, ThreadPoolExecutor(2) as threads:
        by = meter(store.engine, calls=5)
        assert by.ledger is not None
        by.is_counting = by.ledger.is_complete

        def call(key: str) -> int:
            with by.sending(key):
                return meter(store.engine).usage.calls  # as another machine sees it

        with store.engine.connect() as connection:
            connection.exec_driver_sql("LOCK TABLE calls IN EXCLUSIVE MODE")  # others can read
            calls = [threads.submit(call, key) for key in (KEY, OTHER)]
            assert wait(calls, timeout=1.0).not_done == set(calls)
            connection.rollback()
        assert sorted(made.result(60) for made in calls) in ([1, 2], [2, 2])
        with store.engine.connect() as connection:
            connection.exec_driver_sql("LOCK TABLE calls IN EXCLUSIVE MODE")
            monkeypatch.setattr("assay.models.meter.UNCOUNTED_S", 0.5)
            with pytest.raises(BudgetExceeded, match="once it is back"), by.sending("ef" * 32):
                pass
            assert by.in_flight == 0
            connection.rollback()
        by.ledger.close()
        again = meter(store.engine, calls=4)  # three calls were counted, of which one was not sent
        assert (again.usage.calls, again.usage.errors) == (3, 1)
        with again.sending("ef" * 32):
            assert again.usage.repeated == 1
        with store.engine.connect() as connection:
            connection.exec_driver_sql("LOCK TABLE calls IN EXCLUSIVE MODE")
            meter(store.engine).reserve("0a" * 32)  # without a cap it is sent


def test_a_call_sent_again_after_a_kill_is_repeated_and_paid_for(place: Path | sa.Engine) -> None:
    meter(place).reserve(KEY)  # killed
    meter(place).reserve(KEY)  # killed again
    with pytest.raises(BudgetExceeded, match="sent again"):
        meter(place, calls=2).reserve(KEY)  # a cap limits what is sent
    third = meter(place, calls=3)
    answered(third, KEY)
    for result in (third.usage, meter(place).usage):
        assert (result.calls, result.repeated, result.cost_usd, result.tokens) == (1, 2, 1.5, 12)


def test_failed_calls_that_a_replay_repeats_are_not_counted_again(place: Path | sa.Engine) -> None:
    for _ in range(2):
        by = meter(place)
        for _ in range(3):
            by.settle(by.reserve(KEY), prompt_tokens=None, completion_tokens=None, cost_usd=None, failed=True)
        assert (by.usage.calls, by.usage.errors) == (3, 3)
    assert by.usage.repeated == 3


def test_an_answer_from_the_cache_is_a_replay_only_in_the_rollout_that_paid_for_it(place: Path | sa.Engine) -> None:
    answered(meter(place), KEY)
    other = meter(place, owner="r2")
    assert other.replayed(KEY) is None
    assert other.usage.cached == 1
    repeated = meter(place)
    assert repeated.replayed(KEY) is not None
    assert repeated.replayed(KEY) is None  # the second time it is an answer from the cache
    assert (repeated.usage.calls, repeated.usage.cached, repeated.usage.cost_usd) == (1, 2, 0.5)
    once_more = meter(place, owner="r2")
    assert once_more.replayed(KEY) is None
    assert once_more.usage.cached == 2  # already counted


def test_cached_answers_that_were_never_settled_are_billed_on_resume(tmp_path: Path) -> None:
    path, cache = tmp_path / "calls.db", ResponseCache(tmp_path / "responses.db")
    first = meter(path)
    with_recording(scripted_lm(lambda request: "yes"), cache=cache, meter=first)("hello")
    usage = first.usage
    with sqlite3.connect(path) as db:  # as if it was killed before it settled the call
        db.execute("UPDATE calls SET settled = 0, prompt_tokens = 0, completion_tokens = 0, cost_usd = 0")
    ledger = Ledger(path, "run-1")
    assert bill_answered(ledger, cache) == 1
    assert sum(u.tokens for u in spent_before(ledger).values()) == usage.tokens > 0
    assert bill_answered(ledger, cache) == 0


def test_identical_concurrent_requests_are_sent_once() -> None:
    requests, begun = [], threading.Barrier(2)

    def slow(request: Any) -> str:
        requests.append(1)
        time.sleep(0.2)
        return "yes"

    by = Meter()
    lm = with_recording(scripted_lm(slow), cache=ResponseCache(), meter=by)

    def ask() -> None:
        begun.wait()
        lm("hello")

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(requests), by.usage.calls, by.usage.cached) == (1, 1, 1)


def test_a_killed_process_loses_no_row(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom assay.models.ledger import Ledger\n"
        "ledger = Ledger(Path('calls.db'), 'run-1')\n"
        "for at in range(10**6):\n    ledger.send(f'{at:064x}', 'search')\n    print(at, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(200):
        process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    text = 200 + len(process.stdout.read().splitlines())
    process.wait()
    assert meter(tmp_path / "calls.db").usage.calls in (text, text + 1)


@pytest.mark.parametrize("spoilt", [b"", b"no database at all" * 100])
def test_a_damaged_ledger_does_not_stop_a_run(tmp_path: Path, spoilt: bytes) -> None:
    (tmp_path / "calls.db").write_bytes(spoilt)
    by = meter(tmp_path / "calls.db")
    answered(by, KEY)
    assert by.usage.calls == 1


@pytest.mark.skipif(sys.platform == "win32", reason="files have no limit of size")
def test_calls_that_a_full_disk_does_not_take_are_written_once_there_is_room(tmp_path: Path) -> None:
    import resource

    path = tmp_path / "calls.db"
    first = meter(path)
    answered(first, KEY)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        answered(first, OTHER)
        waiting = first.reserve("ef" * 32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    first.settle(waiting, prompt_tokens=10, completion_tokens=2, cost_usd=0.5, failed=False)
    assert first.ledger is not None
    first.ledger.close()
    assert vars(meter(path).usage) == vars(first.usage)
    assert first.usage.calls == 3


@pytest.mark.parametrize(("price", "calls", "reason"), [(0.4, 3, "cap of 1 dollar is"), (None, 1, "no known price")])
def test_a_cap_on_dollars_stops_the_run(price: float | None, calls: int, reason: str) -> None:
    lm = scripted_lm(lambda request: "yes", price_usd=price, meter=Meter(Caps(cost_usd=1.0)))
    for number in range(calls):
        lm(f"{number}")
    with pytest.raises(BudgetExceeded, match=reason):
        lm("one more")


def test_models_that_refuse_a_temperature_get_none() -> None:
    reasons, plain = (
        get_lm(name, temperature=0.3, max_tokens=100, api_key="none") for name in ("openai/o3", "openai/gpt-4o")
    )
    assert (reasons.kwargs["temperature"], reasons.copy(temperature=0.5).kwargs["temperature"]) == (None, None)
    assert (plain.kwargs["temperature"], plain.copy(temperature=0.5).kwargs["temperature"]) == (0.3, 0.5)


def test_search_calls_counts_only_the_search_phase() -> None:
    meter = Meter(Caps(search_calls=1))
    lm = scripted_lm(lambda request: "yes", meter=meter)
    with meter.during("test"):
        lm("a"), lm("b")
    lm("c")
    with pytest.raises(BudgetExceeded, match="search call"):
        lm("d")
    assert (meter.of("search").calls, meter.of("test").calls) == (1, 2)


def test_cancel_stops_the_next_call() -> None:
    meter = Meter()
    lm = scripted_lm(lambda request: "yes", meter=meter)
    meter.cancel()
    with pytest.raises(Cancelled):
        lm("a")
    assert lm.scripted.calls == 0


def test_another_rollout_or_other_weights_do_not_get_the_cached_text() -> None:
    texts = iter(range(100))
    cache = ResponseCache()
    lm = scripted_lm(lambda request: str(next(texts)), cache=cache)
    assert lm("a") == ["0"]
    with sample_scope(1):
        assert lm("a") == ["1"]
    assert lm("a", rollout_id=7) == ["2"]
    assert lm("a") == ["0"]
    lm.recording.backend.weights = "another"
    assert lm("a") == ["3"]


def test_the_model_is_called_again_for_a_damaged_cache_entry(tmp_path: Path) -> None:
    cache = ResponseCache(tmp_path / "c.db")
    lm = scripted_lm(lambda request: "yes", cache=cache)
    lm("a")
    with sqlite3.connect(tmp_path / "c.db") as db:
        db.execute("UPDATE answers SET answer = x'0102'")
    assert lm("a") == ["yes"]
    assert lm.scripted.calls == 2
