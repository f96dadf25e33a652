"""Servers that report no tokens, and prices of the user's own: counted, capped and shown, never 0 where unknown."""

import copy
import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dspy
import litellm
import pytest
from aiohttp import web
from click.testing import CliRunner

import assay
from assay.cli.main import group
from assay.commands.scoring import score_rollouts
from assay.commands.serve import serve
from assay.errors import ConfigError
from assay.evaluation.progress import SilentProgress
from assay.models import Call, Meter, get_lm, with_recording
from assay.models.meter import Caps
from assay.rubrics import Criterion, Rubric
from assay.rubrics.checks import exact
from assay.traces import Store
from rigs.serving import served

QUESTION = "What is the capital of France?"
MODEL = "openai/a-model-of-ones-own"
USAGES: dict[str, dict[str, Any]] = {
    "none": {},
    "null": {"usage": None},
    "zero": {"usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}},
}


@contextmanager
def server(usage: dict[str, Any], content: Any = "[[ ## answer ## ]]\nParis\n\n[[ ## completed ## ]]") -> Iterator[str]:
    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        message = {"role": "assistant", **(content if isinstance(content, dict) else {"content": content})}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice], **usage}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    with served(app) as url:
        yield f"{url}/v1"


def call_of(url: str, name: str = MODEL, **options: Any) -> Call:
    calls: list[Call] = []
    get_lm(name, api_base=url, observers=[calls.append], **options)(QUESTION)
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
    with server(USAGES[usage]) as url:
        call = call_of(url)
    assert 5 < (call.prompt_tokens or 0) < 60
    assert 5 < (call.completion_tokens or 0) < 30
    assert call.cost_usd is None


def test_tokens_of_tool_calls_are_counted() -> None:
    arguments = json.dumps({"city": "Paris", "words": ["one", "two", "three"]})
    called = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    with server({}, {"content": None, "tool_calls": [called]}) as url:
        assert (call_of(url).completion_tokens or 0) > 5


def test_reported_tokens_stay_as_they_are() -> None:
    usage = {"usage": {"prompt_tokens": 1234, "completion_tokens": 7, "total_tokens": 1241}}
    with server(usage) as url:
        call = call_of(url)
    assert (call.prompt_tokens, call.completion_tokens) == (1234, 7)


@pytest.mark.parametrize("usage", USAGES)
def test_a_cap_on_tokens_holds_at_a_server_without_usage(usage: str, tmp_path: Path) -> None:
    rows = [{"question": f"What is the capital of country {n}?", "answer": "Paris"} for n in range(40)]
    with server(USAGES[usage]) as url:
        report = assay.compile(
            dspy.Predict("question -> answer"),
            rubric=Rubric("r", [Criterion(name="right", check=exact)]),
            data=rows,
            optimizer="labeled",
            model=MODEL,
            api_base=url,
            max_tokens=9000,
            store=tmp_path / "s.db",
            out=tmp_path / "artifact",
        )
    assert 500 < report.to_dict()["tokens"] <= 9000


def test_a_price_of_ones_own_is_that_of_each_call_and_of_the_cap() -> None:
    usage = {"usage": {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}}
    with server(usage) as url:
        assert call_of(url, price="2,10").cost_usd == pytest.approx(0.003)
        assert call_of(url, price=(2, 10)).cost_usd == pytest.approx(0.003)
        assert call_of(url, "openai/gpt-4o-mini", price="2,10").cost_usd == pytest.approx(0.003)
        meter = Meter(Caps(cost_usd=0.004))
        lm = get_lm(MODEL, api_base=url, meter=meter, price="2,10", max_tokens=100)
        lm(QUESTION)
        assert meter.usage.cost_usd == pytest.approx(0.003)
        with pytest.raises(assay.errors.BudgetExceeded):
            [lm(f"{QUESTION} {n}") for n in range(3)]
        calls: list[Call] = []
        plain = dspy.LM(MODEL, api_base=url, api_key="k", cache=False)
        with_recording(plain, observers=[calls.append], price="2,10")(QUESTION)
        assert calls[0].cost_usd == pytest.approx(0.003)


@pytest.mark.parametrize("usage", ["none", "some"])
@pytest.mark.parametrize("name", [MODEL, "openai/gpt-4o-mini"])
def test_a_registered_price_is_that_of_each_call(usage: str, name: str, registered: None) -> None:
    reported = {"usage": {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}}
    with server(reported if usage == "some" else {}) as url:
        call = call_of(url, name)
    expected = 0.001 * (call.prompt_tokens or 0) + 0.002 * (call.completion_tokens or 0)
    assert call.cost_usd == pytest.approx(expected)


def test_a_registered_model_without_a_price_has_an_unknown_cost(registered: None) -> None:
    litellm.register_model({"openai/unpriced": {"max_tokens": 100, "litellm_provider": "openai", "mode": "chat"}})
    with server({}) as url:
        assert call_of(url, "openai/unpriced").cost_usd is None


@pytest.mark.parametrize("price", ["", "1", "1,2,3", "a,b", "-1,2", "1,nan", "inf,1", (1,), "0.15;0.6"])
def test_a_malformed_price_is_refused(price: Any) -> None:
    with pytest.raises(ConfigError):
        get_lm(MODEL, api_key="k", price=price)


def test_a_price_of_an_embedded_model_is_refused() -> None:
    with pytest.raises(ConfigError):
        get_lm("embedded/smollm2-135m", price="1,2")


@pytest.mark.parametrize("price", [[], ["--price", "2,10"]])
def test_the_command_line_takes_a_price_and_shows_no_zero_for_an_unknown_cost(price: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import dspy\nclass P(dspy.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.p = dspy.Predict('question -> answer')\n"
        "    def forward(self, question):\n        return self.p(question=question)\n")  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(
        "".join(
            json.dumps({"question": f"Capital of {n}?", "answer": "Paris", "split": "val"}) + "\n" for n in range(3)
        )
    )
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n  - name: right\n    check: exact\n")
    usage = {"usage": {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}}
    with server(usage) as url:
        command = ["evaluate", f"{tmp_path}/program.py:P", "--data", f"{tmp_path}/rows.jsonl", "--rubric",
                   f"{tmp_path}/r.yaml", "--split", "val", "--model", MODEL, "--api-base", url, "--store",
                   f"{tmp_path}/s.db", "--no-cache", *price]  # fmt: skip
        shown = CliRunner().invoke(group, command)
        told = CliRunner().invoke(group, [*command, "--json"])
    data = json.loads(told.stdout)
    assert data["cost_usd"] == (pytest.approx(0.003 * data["calls"]) if price else None)
    assert "$0.0000" not in shown.stdout
    assert ("$" in shown.stdout) == bool(price)


PROGRAM = (
    "import dspy\nclass P(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.p = dspy.Predict('question -> answer')\n"
    "    def forward(self, question):\n        return self.p(question=question)\n"
)
USAGE = {"usage": {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}}


def costs_in(store: Path, source: str) -> set[float | None]:
    """Costs of the stored calls of the rollouts of one source."""
    with Store(store) as opened:
        calls = [t for r in opened.rollouts() if r.source == source for t in opened.rollout(r.id).transitions]
    return {None if call.cost_usd is None else round(call.cost_usd, 6) for call in calls}


def test_a_prediction_and_its_later_judges_have_the_price(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n  - name: good\n    judge: Is the answer good?\n")
    with server(USAGE) as url:
        run = ["run", f"{tmp_path}/program.py:P", "question=Where?", "--model", MODEL, "--api-base", url]
        assert CliRunner().invoke(group, [*run, "--price", "2,10", "--store", f"{tmp_path}/s.db"]).exit_code == 0
        score = ["traces", "score", "--rubric", f"{tmp_path}/r.yaml", "--judge-model", MODEL, "--judge-api-base", url]
        score += ["--price", "4,20", "--no-preflight", "--json", "--store", f"{tmp_path}/s.db"]
        told = CliRunner().invoke(group, score)
    assert costs_in(tmp_path / "s.db", "program") == {0.003}
    data = json.loads(told.stdout)
    assert (data["calls"] > 0, data["cost_usd"]) == (True, pytest.approx(0.006 * data["calls"]))


@pytest.mark.parametrize(("price", "cost"), [(None, None), ("2,10", 0.003)])
def test_a_gateway_has_the_price_of_its_upstream(price: str | None, cost: float | None, tmp_path: Path) -> None:
    def asks(serving: Any) -> None:
        def ask() -> None:
            try:
                body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Where?"}]}).encode()
                request = urllib.request.Request(
                    f"{serving.url}/v1/chat/completions", body, {"content-type": "application/json"}
                )
                urllib.request.urlopen(request, timeout=20).read()
            finally:
                serving.stop()

        threading.Thread(target=ask).start()

    with server(USAGE) as url:
        serve(upstream=url, price=price, port=0, store=tmp_path / "s.db", on_start=asks, progress=SilentProgress())
    assert costs_in(tmp_path / "s.db", "gateway") == {cost}


@pytest.mark.parametrize("settings", [{"price": "1,2"}, {"price": "a", "judge_model": MODEL}])
def test_a_price_without_effect_is_refused_where_judges_score(settings: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n  - name: good\n    judge: Is the answer good?\n")
    Store(tmp_path / "s.db").close()
    with pytest.raises(ConfigError, match="price"):
        score_rollouts(store=tmp_path / "s.db", rubric=f"{tmp_path}/r.yaml", **settings)
