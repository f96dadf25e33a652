"""Each public method of a model gives the same seed, sample, completions, budget, caps, prices and errors."""

import asyncio
import warnings
from collections.abc import Callable
from typing import Any

import dspy
import pytest
from dspy import lm15

from assay.errors import BudgetExceeded, ConfigError, LoopStopped
from assay.models import Call, LanguageModel, Meter, ResponseCache, with_recording
from assay.models.meter import Caps
from assay.models.scope import repeats_numbered, sample_scope
from assay.testing import ScriptedEngine


def request_of(lm: Any, text: str, **config: Any) -> lm15.Request:
    return lm15.Request(model=lm.model, messages=(lm15.Message.user(text),), config=lm15.Config(**config))


def by_messages(lm: Any, text: str, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return lm(messages=[{"role": "user", "content": text}], **options)


ENTRIES: dict[str, Callable[..., Any]] = {
    "text": lambda lm, text, **options: lm(text, **options),
    "request": lambda lm, text, **options: lm(request_of(lm, text, temperature=1.0), **options),
    "messages": by_messages,
    "acall": lambda lm, text, **options: asyncio.run(lm.acall(text, **options)),
    "acall with a request": lambda lm, text, **options: asyncio.run(
        lm.acall(request_of(lm, text, temperature=1.0), **options)
    ),
}
if hasattr(dspy.BaseLM, "generate"):
    del ENTRIES["messages"]
    ENTRIES["generate"] = lambda lm, text, **options: lm.generate(request_of(lm, text, temperature=1.0), **options)
    ENTRIES["agenerate"] = lambda lm, text, **options: asyncio.run(
        lm.agenerate(request_of(lm, text, temperature=1.0), **options)
    )
every_entry = pytest.mark.parametrize("entry", ENTRIES)
COMPLETIONS = [name for name in ENTRIES if "request" not in name]


def model(
    answer: Callable[[Any], Any] = lambda request: "fine", *, supports_reasoning: bool = False, **options: Any
) -> tuple[LanguageModel, list[Any], list[Call]]:
    """A model, the requests that reach its engine, and the calls that its observer gets."""
    requests: list[Any] = []
    calls: list[Call] = []

    def script(request: Any) -> Any:
        requests.append(request)
        return answer(request)

    engine = ScriptedEngine(script, price_usd=0.25)
    engine.supports_reasoning = supports_reasoning
    settings = {key: options.pop(key) for key in ("seed", "num_retries") if key in options}
    plain = dspy.LM("scripted/m", engine=engine, temperature=1.0, cache=False, **{"num_retries": 0, **settings})
    return with_recording(plain, observers=[calls.append], **options), requests, calls


def seed_of(call: Call) -> int:
    """Seed of a recorded call, which differs between samples."""
    return int(call.request["config"]["seed"])


@every_entry
def test_seeds_are_of_the_prompt_and_the_sample_and_the_same_for_each_entry(entry: str) -> None:
    lm, requests, _ = model(seed=7)
    by_text, expected, _ = model(seed=7)
    for sample, text in ((None, "one"), (None, "two"), (1, "one")):
        with sample_scope(sample):
            ENTRIES[entry](lm, text)
            by_text(text)
    seeds = [request.config.seed for request in requests]
    assert len(set(seeds)) == 3
    assert 7 not in seeds
    assert seeds == [request.config.seed for request in expected]


@every_entry
def test_a_repeated_call_of_a_rollout_is_a_sample_of_its_own(entry: str) -> None:
    lm, requests, calls = model(cache=ResponseCache(), seed=7)
    with repeats_numbered():
        for _ in range(2):
            ENTRIES[entry](lm, "one")
    with repeats_numbered():
        ENTRIES[entry](lm, "one")  # another rollout: the first call, from the cache
    assert len({request.config.seed for request in requests}) == len(requests) == 2
    assert [call.cached for call in calls] == [False, False, True]
    assert len({seed_of(call) for call in calls}) == 2


@every_entry
def test_a_rollout_id_is_a_sample(entry: str) -> None:
    lm, requests, calls = model(cache=ResponseCache(), seed=7)
    for rollout_id in (1, 2, 1):
        ENTRIES[entry](lm, "one", rollout_id=rollout_id)
    ENTRIES[entry](lm.copy(rollout_id=2), "one")
    seeds = list(map(seed_of, calls))
    assert seeds[0] == seeds[2] != seeds[1] == seeds[3]
    assert [call.cached for call in calls] == [False, False, True, True]
    assert len({request.config.seed for request in requests}) == 2


@pytest.mark.parametrize("entry", COMPLETIONS)
def test_each_of_n_completions_is_a_sample_of_its_own(entry: str) -> None:
    number = iter(range(100))
    lm, requests, calls = model(lambda request: f"answer {next(number)}", cache=ResponseCache(), seed=7)
    for _ in range(2):
        completions = ENTRIES[entry](lm, "one", n=3)
        assert len(completions) == 3
    assert len(requests) == len({request.config.seed for request in requests}) == 3
    assert [call.cached for call in calls] == [False] * 3 + [True] * 3


@pytest.mark.parametrize("entry", COMPLETIONS)
def test_a_completion_that_is_sent_again_is_the_same_sample(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([False, True, False, False])
    lm, _, calls = model(
        lambda request: lm15.ServerError("busy", status=503, retry_after=0.001) if next(failures) else "fine",
        num_retries=2,
        seed=7,
    )
    with repeats_numbered():
        ENTRIES[entry](lm, "one", n=2)
    assert [call.error is None for call in calls] == [True, False, True]
    assert seed_of(calls[1]) == seed_of(calls[2]) != seed_of(calls[0])


@every_entry
def test_a_thinking_budget_reaches_the_request(entry: str) -> None:
    lm, requests, _ = model(supports_reasoning=True)
    ENTRIES[entry](lm.copy(thinking=300), "one")
    ENTRIES[entry](lm, "one", thinking=400)
    ENTRIES[entry](lm, "one")
    budgets = [request.config.reasoning and request.config.reasoning.thinking_budget for request in requests]
    assert budgets == [300, 400, None]


@every_entry
def test_a_cap_holds_and_calls_are_priced(entry: str) -> None:
    meter = Meter(Caps(calls=2))
    lm, requests, calls = model(meter=meter)
    for text in ("one", "two"):
        ENTRIES[entry](lm, text)
    with pytest.raises(BudgetExceeded):
        ENTRIES[entry](lm, "three")
    assert (len(requests), meter.usage.calls, meter.usage.cost_usd) == (2, 2, 0.5)
    assert [call.cost_usd for call in calls] == [0.25, 0.25]


@every_entry
@pytest.mark.parametrize("error", [LoopStopped("it repeats itself"), ConfigError("wrong")], ids=["loop", "config"])
def test_errors_of_assay_are_raised_as_they_are(entry: str, error: Exception) -> None:
    lm, _, _ = model(lambda request: error)
    with pytest.raises(type(error)) as raised:
        ENTRIES[entry](lm, "one")
    assert raised.value is error


@every_entry
def test_errors_of_the_engine_are_dspys(entry: str) -> None:
    lm, _, calls = model(lambda request: lm15.RateLimitError("slow down", status=429))
    with pytest.raises(dspy.LMError):
        ENTRIES[entry](lm, "one")
    assert [call.failure for call in calls] == ["model"]


@every_entry
def test_a_call_that_failed_keeps_its_number(entry: str) -> None:
    failures = iter([True, False, False])
    lm, requests, _ = model(lambda request: ValueError("broken") if next(failures) else "fine", seed=7)
    with repeats_numbered():
        with pytest.raises(dspy.LMError):
            ENTRIES[entry](lm, "one")
        ENTRIES[entry](lm, "one")
        ENTRIES[entry](lm, "one")
    assert requests[0].config.seed == requests[1].config.seed != requests[2].config.seed
