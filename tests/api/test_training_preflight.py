"""What `assay train` checks before it loads the weights that it trains."""

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner

import assay
from assay.cli.main import group, names_of
from assay.errors import ConfigError, ModelError, NoModelFile, RubricError
from assay.evaluation import SilentProgress
from assay.optimizers.finetuning import policy_gradient as policy
from assay.optimizers.finetuning.base import load_policy
from assay.traces import Store
from rigs.serving import served

PROGRAM = """import dspy


class Triage(dspy.Module):
    def __init__(self):
        super().__init__()
        self.read = dspy.Predict("text -> intent")

    def forward(self, text):
        found = self.read(text=text)
        {body}
"""
DEAD = {"judge_model": "openai/m", "judge_api_base": "http://127.0.0.1:9/v1"}
SMALL: dict[str, Any] = {
    "steps": 1,
    "prompts_per_step": 2,
    "num_generations": 2,
    "max_completion": 16,
    "prompt_format": "chat",
    "sizes": {"test": 2},
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setattr(policy, "load_policy", loaded)
    rows = [{"text": f"Page {n} crashes", "label": "bug"} for n in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "triage.py").write_text(PROGRAM.format(body="return found"))
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact, with: {field: intent}}\n")
    (tmp_path / "judged.yaml").write_text(
        "name: r\ncriteria:\n- {name: nice, judge: 'Is it nice?', scale: ['no', 'yes']}\n"
    )
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    return tmp_path


class WeightsLoadedError(Exception):
    pass


def loaded(name: str) -> None:
    raise WeightsLoadedError(name)


def trained(**options: Any) -> Any:
    return assay.train("triage.py:Triage", **{"data": "data.jsonl", "name": "x", "rename": {}, **SMALL, **options})


def test_check_without_grades_stops_training_before_weights_are_loaded(place: Path, small_embedded: str) -> None:
    with pytest.raises(RubricError, match="criterion 'right' could not be graded") as caught:
        trained(rubric="r.yaml", model=small_embedded)
    assert "--rename label=intent" in caught.value.text(names_of(["train", "grpo"]))
    with pytest.raises(WeightsLoadedError):
        trained(rubric="r.yaml", model=small_embedded, preflight=False)
    with pytest.raises(WeightsLoadedError):
        trained(rubric="r.yaml", model=small_embedded, rename={"label": "intent"})


@pytest.mark.parametrize(("name", "error"), [("server/has-it", ModelError), (".", NoModelFile)])
def test_a_model_without_weights_is_refused_before_a_model_is_called(
    place: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: type[Exception]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(error):
        trained(rubric="r.yaml", model=name, store="s.db")
    with Store("s.db") as store:
        assert store.stats()["transitions"] == 0


def test_a_folder_without_a_model_cannot_be_trained(tmp_path: Path) -> None:
    with pytest.raises(NoModelFile, match=r"has no config\.json, so it holds no model"):
        load_policy(str(tmp_path))


def test_settings_without_effect_on_a_training_are_noted(place: Path, model_name: str) -> None:
    lines: list[str] = []
    progress = SilentProgress()
    progress.say = lines.append  # type: ignore[method-assign]
    options = {"preflight": False, "sizes": {"train": 20, "gate": 5}, "progress": progress}
    judge = {"judge_model": "openai/x"}
    with pytest.raises(ConfigError, match="judge_model='openai/x' would have no effect"):
        trained(rubric="r.yaml", model=model_name, rename={"label": "intent"}, **options, **judge)
    for monitor, model in ((None, {}), ("judged.yaml", judge)):
        lines.clear()
        with pytest.raises(WeightsLoadedError):
            trained(rubric="r.yaml", monitor=monitor, model=model_name, rename={"label": "intent"}, **options, **model)
        notes = [line.split(" has no effect")[0] for line in lines if "no effect" in line]
        assert notes == ["note: `gate_size=5`"]


def test_unreachable_judge_stops_training_before_weights_are_loaded(place: Path, small_embedded: str) -> None:
    for watched in ({"rubric": "judged.yaml"}, {"rubric": "r.yaml", "monitor": "judged.yaml"}):
        with pytest.raises(ModelError, match="judge of 'nice' scored none"):
            trained(model=small_embedded, rename={"label": "intent"}, **watched, **DEAD)


@pytest.mark.slow
def test_judges_are_tried_even_if_the_model_gives_no_answer(place: Path) -> None:
    with pytest.raises(ModelError, match="judge of 'nice' scored none"):
        trained(rubric="judged.yaml", model="weights", **DEAD)
    with pytest.raises(ConfigError, match="no price is known for"):
        trained(rubric="judged.yaml", model="weights", max_cost_usd=1.0, **DEAD)
    with pytest.raises(WeightsLoadedError):
        trained(rubric="r.yaml", model="weights")


def test_warm_up_comparison_is_tried_before_the_warm_up(
    place: Path, small_embedded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assay.optimizers.finetuning.sft.load_policy", loaded)
    prompt = [{"role": "user", "content": "a"}]
    rows = [
        {"prompt": prompt, "completion": [{"role": "assistant", "content": "b"}], "task_id": str(n)} for n in range(8)
    ]
    (place / "triage.py").write_text(PROGRAM.format(body="return found").replace('intent"', 'intent", max_tokens=30'))
    (place / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        "train",
        "sft",
        "sft.jsonl",
        "--name",
        "x",
        "--model",
        small_embedded,
        "--program",
        "triage.py:Triage",
        "--data",
        "data.jsonl",
    ]
    ended = CliRunner().invoke(group, [*command, "--rubric", "r.yaml", "--prompt-format", "chat"])
    assert isinstance(ended.exception, RubricError)
    ended = CliRunner().invoke(group, [*command, "--rubric", "r.yaml", "--prompt-format", "chat", "--no-preflight"])
    assert isinstance(ended.exception, WeightsLoadedError)
    ended = CliRunner().invoke(
        group, ["train", "sft", "gone.jsonl", *command[3:], "--rubric", "judged.yaml", "--judge-model", "openai/m"]
    )
    assert "gone.jsonl" in str(ended.exception)


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce++", "reinforce++-turn", "ppo", "rloo"])
def test_training_judges_have_their_own_base_url_and_key(
    place: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    requests: list[tuple[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        requests.append(((await request.json())["model"], request.headers["Authorization"]))
        return web.json_response({"error": {"message": "out of order", "type": "invalid_request_error"}}, status=400)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    with served(app) as url:
        words = [
            "train",
            algorithm,
            "triage.py:Triage",
            "--name",
            "x",
            "--rubric",
            "judged.yaml",
            "--data",
            "data.jsonl",
            "--model",
            "weights",
        ]
        judge = ["--judge-model", "openai/m", "--judge-api-base", f"{url}/v1", "--judge-api-key-env", "JUDGE_KEY"]
        ended = CliRunner().invoke(group, [*words, *judge, "--prompts-per-step", "2", "--prompt-format", "chat"])
    assert isinstance(ended.exception, ModelError)
    assert set(requests) == {("m", "Bearer secret")}


@pytest.mark.slow
def test_warm_up_comparison_judges_have_their_own_base_url(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: dict[str, Any] = {}
    monkeypatch.setattr("assay.commands.train_sft.check_comparison", lambda _, settings, **__: passed.update(settings))
    monkeypatch.setattr("assay.optimizers.finetuning.sft.load_policy", loaded)
    prompt = [{"role": "user", "content": "a"}]
    rows = [
        {"prompt": prompt, "completion": [{"role": "assistant", "content": "b"}], "task_id": str(n)} for n in range(8)
    ]
    (place / "triage.py").write_text(PROGRAM.format(body="return found").replace('intent"', 'intent", max_tokens=30'))
    (place / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge = {"judge_model": "openai/m", "judge_api_base": "http://127.0.0.1:9/v1", "judge_api_key_env": "JUDGE_KEY"}
    words = [
        "train",
        "sft",
        "sft.jsonl",
        "--name",
        "x",
        "--program",
        "triage.py:Triage",
        "--rubric",
        "judged.yaml",
        "--data",
        "data.jsonl",
    ]
    CliRunner().invoke(
        group, [*words, *(word for name, value in judge.items() for word in (f"--{name.replace('_', '-')}", value))]
    )
    assert {name: passed.get(name) for name in judge} == judge
