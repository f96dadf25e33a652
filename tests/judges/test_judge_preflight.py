"""What `assay judge compile` checks before it spends anything."""

import json
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.cli import names_of
from assay.errors import ConfigError, ModelError
from assay.testing import scripted_lm

JUDGE = "Is the text friendly?"


@pytest.fixture
def labels(tmp_path: Path) -> str:
    rows = [
        {"output": f"{'lovely' if n % 2 else 'awful'} thing {n}", "rater": r, "label": "yes" if n % 2 else "no"}
        for n in range(80)
        for r in "ab"
    ]
    path = tmp_path / "labels.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def compiled(labels: str, script: Any, **options: Any) -> Any:
    model = scripted_lm(script, logprobs=True, price_usd=options.pop("price_usd", 0.0))
    return model, lambda: assay.compile_judge(
        options.pop("judge", JUDGE), labels=labels, lm=model, optimizer="calibrate", **options
    )


def friendly(request: Any) -> Any:
    return {"yes": 0.9, "no": 0.1} if "lovely" in str(request.messages[-1]) else {"yes": 0.2, "no": 0.8}


@pytest.mark.timeout(60)
def test_the_reflection_model_is_tried(labels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    model, run = compiled(labels, friendly, reflection_model="openai/m", reflection_api_base="http://127.0.0.1:9/v1")
    with pytest.raises(
        ModelError,
        match=r"the reflection model openai/m did not answer: .*127\.0\.0\.1:9.*: no server listens there\. .*"
        r"\(reflection_api_base\)",
    ):
        run()
    assert model.scripted.calls == 1


def test_a_missing_key_error_names_the_library_argument(labels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    run = compiled(labels, friendly, reflection_model="openai/m")[1]
    with pytest.raises(
        ModelError, match=r"set OPENAI_API_KEY, or name the variable .*\(reflection_api_key_env\)"
    ) as raised:
        run()
    assert "(--reflection-api-key-env)" in raised.value.text(names_of(["judge", "compile"]))


def test_a_cap_on_dollars_needs_a_price(labels: str) -> None:
    with pytest.raises(ConfigError, match="max_cost_usd=1 cannot be kept: no price is known for openai/m"):
        assay.compile_judge(
            JUDGE,
            labels=labels,
            model="openai/m",
            api_base="http://127.0.0.1:9/v1",
            max_cost_usd=1.0,
            optimizer="calibrate",
        )
    model, run = compiled(labels, friendly, price_usd=None, max_cost_usd=1.0)
    with pytest.raises(ConfigError, match="no price is known for scripted/model"):
        run()
    assert model.scripted.calls == 1
