"""Servers that report no tokens, and prices of the user's own: counted, capped and shown, never 0 where unknown."""

import copy
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import dspy
import litellm
import pytest

import assay
from assay.commands.scoring import score_rollouts
from assay.commands.serve import serve
from assay.errors import BudgetExceeded, ConfigError
from assay.evaluation.progress import SilentProgress
from assay.models import Call, Meter, get_lm
from assay.models.meter import Caps
from assay.traces import Store
from rigs.command_line import assay_command
from rigs.serving import answering, post

USAGE = {"usage": {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}}
PROGRAM = "import dspy\n\np = dspy.Predict('question -> answer')\n"
QUESTION = "What is the capital of France?"
MODEL = "openai/a-model-of-ones-own"
USAGES: dict[str, dict[str, Any]] = {
    "none": {},
    "null": {"usage": None},
    "zero": {"usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}},
}


def server(usage: dict[str, Any], **message: Any) -> AbstractContextManager[tuple[str, list[Any]]]:
    """A server that answers Paris, or with this message."""
    message = message or {"content": "[[ ## answer ## ]]\nParis\n\n[[ ## completed ## ]]"}
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}
    reply = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], **usage}
    return answering(lambda path, body: (200, reply))


def call_of(url: str, name: str = MODEL, **options: Any) -> Call:
    calls: list[Call] = []
    get_lm(name, api_base=f"{url}/v1", observers=[calls.append], **options)(QUESTION)
    return calls[0]


@pytest.fixture
def registered() -> Iterator[None]:
    prices = litellm.model_cost
    litellm.model_cost = copy.deepcopy(prices)
    price = {"input_cost_per_token": 0.001, "output_cost_per_token": 0.002, "litellm_provider": "openai"}
    litellm.register_model({MODEL: {**price, "mode": "chat"}, "openai/gpt-4o-mini": {**price, "mode": "chat"}})
    yield
    litellm.model_cost = prices
    litellm.register_model({})  # clears what litellm has looked up


@pytest.mark.parametrize("usage", USAGES)
def test_tokens_are_counted_where_the_server_reports_none(usage: str) -> None:
    with server(USAGES[usage]) as (url, _):
        call = call_of(url)
    assert 5 < (call.prompt_tokens or 0) < 60
    assert 5 < (call.completion_tokens or 0) < 30
    assert call.cost_usd is None


def test_reported_tokens_stay_as_they_are() -> None:
    usage = {"usage": {"prompt_tokens": 1234, "completion_tokens": 7, "total_tokens": 1241}}
    with server(usage) as (url, _):
        call = call_of(url)
    assert (call.prompt_tokens, call.completion_tokens) == (1234, 7)


def test_a_cap_on_tokens_holds_at_a_server_without_usage() -> None:
    rows = [{"question": f"What is the capital of country {n}?", "answer": "Paris"} for n in range(40)]
    with server({}) as (url, _):
        report = assay.compile(
            dspy.Predict("question -> answer"), rubric="exact", data=rows, optimizer="labeled", model=MODEL,
            api_base=f"{url}/v1", max_tokens=9000, store="s.db", out="artifact",
        )  # fmt: skip
    assert 500 < report.to_dict()["tokens"] <= 9000


def test_a_price_of_ones_own_is_that_of_each_call_and_of_the_cap() -> None:
    with server(USAGE) as (url, _):
        for name, price in ((MODEL, "2,10"), (MODEL, (2, 10)), ("openai/gpt-4o-mini", "2,10")):
            assert call_of(url, name, price=price).cost_usd == pytest.approx(0.003)
        meter = Meter(Caps(cost_usd=0.004))
        lm = get_lm(MODEL, api_base=f"{url}/v1", meter=meter, price="2,10", max_tokens=100)
        lm(QUESTION)
        assert meter.usage.cost_usd == pytest.approx(0.003)
        with pytest.raises(BudgetExceeded):
            [lm(f"{QUESTION} {n}") for n in range(3)]


@pytest.mark.parametrize("usage", ["none", "some"])
@pytest.mark.parametrize("name", [MODEL, "openai/gpt-4o-mini"])
def test_a_registered_price_is_that_of_each_call(usage: str, name: str, registered: None) -> None:
    with server(USAGE if usage == "some" else {}) as (url, _):
        call = call_of(url, name)
    expected = 0.001 * (call.prompt_tokens or 0) + 0.002 * (call.completion_tokens or 0)
    assert call.cost_usd == pytest.approx(expected)


def test_a_registered_model_without_a_price_has_an_unknown_cost(registered: None) -> None:
    litellm.register_model({"openai/unpriced": {"max_tokens": 100, "litellm_provider": "openai", "mode": "chat"}})
    with server({}) as (url, _):
        assert call_of(url, "openai/unpriced").cost_usd is None


@pytest.mark.parametrize("price", ["", "1", "1,2,3", "a,b", "-1,2", "1,nan", "inf,1", (1,), "0.15;0.6"])
def test_a_malformed_price_or_one_of_an_embedded_model_is_refused(price: Any) -> None:
    with pytest.raises(ConfigError):
        get_lm(MODEL, api_key="k", price=price)
    with pytest.raises(ConfigError):
        get_lm("embedded/smollm2-135m", price="1,2")


@pytest.mark.parametrize("price", [[], ["--price", "2,10"]])
def test_the_command_line_takes_a_price_and_shows_no_zero_for_an_unknown_cost(price: list[str]) -> None:
    Path("program.py").write_text(PROGRAM)
    Path("rows.jsonl").write_text('{"question": "Capital of France?", "answer": "Paris", "split": "val"}\n')
    with server(USAGE) as (url, _):
        flags = ["--rubric", "exact", "--data", "rows.jsonl", "--split", "val", "--no-cache", "--api-base"]
        command = ["evaluate", "program.py:p", "--model", MODEL, *flags, f"{url}/v1", *price]
        shown, told = assay_command(*command).stdout, assay_command(*command, "--json").report
    assert told["cost_usd"] == (pytest.approx(0.003 * told["calls"]) if price else None)
    assert "$0.0000" not in shown
    assert ("$" in shown) == bool(price)


def costs_in(store: str, source: str) -> set[float | None]:
    """Costs of the stored calls of the rollouts of one source."""
    with Store(store) as opened:
        calls = [t for r in opened.rollouts() if r.source == source for t in opened.rollout(r.id).transitions]
    return {None if call.cost_usd is None else round(call.cost_usd, 6) for call in calls}


JUDGED = "name: r\ncriteria:\n  - name: good\n    judge: Is the answer good?\n"


def test_a_prediction_and_its_later_judges_have_the_price() -> None:
    Path("program.py").write_text(PROGRAM)
    Path("r.yaml").write_text(JUDGED)
    with server(USAGE) as (url, _):
        run = ["run", "program.py:p", "question=Where?", "--model", MODEL, "--api-base", f"{url}/v1"]
        assert assay_command(*run, "--price", "2,10", "--store", "s.db").code == 0
        judged = ["--judge-model", MODEL, "--judge-api-base", f"{url}/v1"]
        score = [
            "traces",
            "score",
            "--rubric",
            "r.yaml",
            "--price",
            "4,20",
            "--no-preflight",
            "--json",
            "--store",
            "s.db",
        ]
        told = assay_command(*score, *judged).report
    assert costs_in("s.db", "program") == {0.003}
    assert (told["calls"] > 0, told["cost_usd"]) == (True, pytest.approx(0.006 * told["calls"]))


def test_a_gateway_has_the_price_of_its_upstream() -> None:
    def asks(serving: Any) -> None:
        def ask() -> None:
            post(f"{serving.url}/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "?"}]})
            serving.stop()

        threading.Thread(target=ask).start()

    with server(USAGE) as (url, _):
        serve(upstream=f"{url}/v1", price="2,10", port=0, store="s.db", on_start=asks, progress=SilentProgress())
    assert costs_in("s.db", "gateway") == {0.003}


@pytest.mark.parametrize("settings", [{"price": "1,2"}, {"price": "a", "judge_model": MODEL}])
def test_a_price_without_effect_is_refused_where_judges_score(settings: dict[str, str]) -> None:
    Path("r.yaml").write_text(JUDGED)
    Store("s.db").close()
    with pytest.raises(ConfigError, match="price"):
        score_rollouts(store="s.db", rubric="r.yaml", **settings)
