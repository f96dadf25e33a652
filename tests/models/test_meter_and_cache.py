"""Caps, counts and the response cache."""

import sqlite3
import threading
from pathlib import Path

import pytest

from assay.errors import BudgetExceeded, Cancelled, ConfigError
from assay.models import Caps, Meter, ResponseCache, get_lm, sample_scope
from assay.testing import scripted_lm


def test_a_cap_on_calls_is_never_exceeded_by_parallel_calls() -> None:
    meter = Meter(Caps(calls=5))
    lm = scripted_lm(lambda request: "yes", meter=meter)
    stopped = []

    def work() -> None:
        for i in range(10):
            try:
                lm(f"question {i} {threading.get_ident()}")
            except BudgetExceeded:
                stopped.append(i)
                return

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.usage.calls == lm.scripted.calls == 5
    assert len(stopped) == 4


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


@pytest.mark.parametrize("bad", [-1, float("nan")])
def test_an_invalid_cap_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match="must be >= 0"):
        Caps(cost_usd=bad)


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
