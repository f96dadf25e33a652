"""What `assay train` checks before it loads the weights that it trains, and a fine-tuning as a run of the store."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from aiohttp import web

import assay
from assay.cli import names_of
from assay.errors import AssayError, ConfigError, ModelError, NoModelFile, RubricError
from assay.evaluation import SilentProgress
from assay.optimizers.finetuning import policy_gradient as policy, sft
from assay.optimizers.finetuning.base import load_policy
from assay.reports.training import read_training_log
from assay.traces import Store
from assay.traces.store.listing import finished_report, list_runs
from assay.traces.store.tables import test_openings
from rigs.command_line import assay_command
from rigs.projects import Said, write_program, write_project, write_rows
from rigs.serving import ChatServer

DEAD = {"judge_model": "openai/m", "judge_api_base": "http://127.0.0.1:9/v1"}
SMALL: dict[str, Any] = {
    "steps": 1, "prompts_per_step": 2, "num_generations": 2, "max_completion": 16, "prompt_format": "chat",
    "sizes": {"test": 2}, "data": "data.jsonl", "name": "x",
}  # fmt: skip
FIELD = "name: r\ncriteria:\n- {name: right, check: exact, with: {field: answer}}\n"


class WeightsLoadedError(AssayError):
    pass


@pytest.fixture
def place(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project whose data has `label` in place of the field `answer` that its rubric reads."""

    def loaded(name: str) -> None:
        raise WeightsLoadedError(f"loads the weights of {name}")

    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setattr(policy, "load_policy", loaded)
    monkeypatch.setattr(sft, "load_policy", loaded)
    write_project()
    Path("weights").mkdir()
    Path("weights/config.json").write_text("{}")
    Path("r.yaml").write_text(FIELD)
    write_rows("data.jsonl", [{"question": f"Does page {n} crash?", "label": "bug"} for n in range(40)])
    write_rows("sft.jsonl", [supervised(f"a {n}", "b") for n in range(8)])


def supervised(question: str, answer: str) -> dict[str, Any]:
    prompt, completion = (
        [{"role": role, "content": text}] for role, text in (("user", question), ("assistant", answer))
    )
    return {"prompt": prompt, "completion": completion, "task": question}


def trained(rubric: str = "r.yaml", **options: Any) -> Any:
    return assay.train("mine.py:Mine", rubric=rubric, **{**SMALL, "rename": {"label": "answer"}, **options})


@pytest.mark.usefixtures("place")
def test_check_without_grades_stops_training_before_weights_are_loaded(small_embedded: str) -> None:
    with pytest.raises(RubricError, match="criterion 'right' could not be graded") as caught:
        trained(model=small_embedded, rename={})
    assert "--rename label=answer" in caught.value.text(names_of(["train", "grpo"]))
    for options in ({"rename": {}, "preflight": False}, {}):
        with pytest.raises(WeightsLoadedError):
            trained(model=small_embedded, **options)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("name", "error"), [("server/has-it", ModelError), (".", NoModelFile)])
def test_a_model_without_weights_is_refused_before_a_model_is_called(
    monkeypatch: pytest.MonkeyPatch, name: str, error: type[Exception]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(error):
        trained(model=name, store="s.db")
    with Store("s.db") as store:
        assert store.stats()["transitions"] == 0


def test_a_folder_without_a_model_cannot_be_trained(tmp_path: Path) -> None:
    with pytest.raises(NoModelFile, match=r"has no config\.json, so it holds no model"):
        load_policy(str(tmp_path))


@pytest.mark.usefixtures("place")
def test_settings_without_effect_on_a_training_are_noted(model_name: str) -> None:
    options: dict[str, Any] = {"preflight": False, "sizes": {"train": 20, "gate": 5}, "model": model_name}
    judge = {"judge_model": "openai/x"}
    with pytest.raises(ConfigError, match="judge_model='openai/x' would have no effect"):
        trained(**options, **judge)
    for more in ({}, {"monitor": "judged.yaml", **judge}):
        said = Said()
        with pytest.raises(WeightsLoadedError):
            trained(progress=said, **options, **more)
        notes = [line.split(" has no effect")[0] for line in said.lines if "no effect" in line]
        assert notes == ["note: `gate_size=5`"]


@pytest.mark.slow
@pytest.mark.usefixtures("place")
def test_judges_are_tried_before_weights_are_loaded_even_if_the_model_gives_no_answer(small_embedded: str) -> None:
    for judged in ({"rubric": "judged.yaml"}, {"monitor": "judged.yaml"}):
        with pytest.raises(ModelError, match="judge of 'nice' scored none"):
            trained(model=small_embedded, **judged, **DEAD)
    with pytest.raises(ModelError, match="judge of 'nice' scored none"):
        trained("judged.yaml", model="weights", **DEAD)
    with pytest.raises(ConfigError, match="no price is known for"):
        trained("judged.yaml", model="weights", max_cost_usd=1.0, **DEAD)
    with pytest.raises(WeightsLoadedError):
        trained(model="weights")


@pytest.fixture
def refusing_judge(place: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    error = {"error": {"message": "out of order", "type": "invalid_request_error"}}
    with ChatServer(lambda body: web.json_response(error, status=400)).serving() as server:
        yield server


def train_command(*words: str, judge: ChatServer | None = None) -> Any:
    """`assay train` with the data of the project, and with a judge at an address and with a key of its own."""
    flags = ["--name", "x", "--data", "data.jsonl", "--prompt-format", "chat"]
    if judge is not None:
        flags += ["--judge-model", "openai/m", "--judge-api-base", judge.url, "--judge-api-key-env", "JUDGE_KEY"]
    return assay_command("train", *words, *flags, "--rubric", "judged.yaml" if judge else "r.yaml")


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce++", "reinforce++-turn", "ppo", "rloo"])
def test_training_judges_have_their_own_base_url_and_key(refusing_judge: ChatServer, algorithm: str) -> None:
    words = [algorithm, "mine.py:Mine", "--model", "weights", "--prompts-per-step", "2"]
    assert train_command(*words, judge=refusing_judge).code == 1
    assert {*zip(refusing_judge.models, refusing_judge.keys, strict=True)} == {("m", "Bearer secret")}


def test_warm_up_comparison_is_tried_before_the_warm_up(refusing_judge: ChatServer, small_embedded: str) -> None:
    write_program(body="return dspy.Prediction(answer=found.answer)")
    words = ["sft", "sft.jsonl", "--program", "mine.py:Mine", "--model", small_embedded]
    checked, unchecked = train_command(*words).stderr, train_command(*words, "--no-preflight").stderr
    assert ("could not be graded" in checked, "loads the weights" in checked) == (True, False)
    assert "loads the weights" in unchecked
    assert "gone.jsonl" in train_command("sft", "gone.jsonl", *words[2:]).stderr
    assert train_command(*words, judge=refusing_judge).code == 1
    assert {*zip(refusing_judge.models, refusing_judge.keys, strict=True)} == {("m", "Bearer secret")}


# -- a fine-tuning as a run


@pytest.mark.slow
def test_a_fine_tuning_is_a_run_with_its_curves(tiny_model: Path, own_folder: Path) -> None:
    rows = write_rows("rows.jsonl", [supervised(f"How much is {at} + 1?", f"It is {at + 1}.") for at in range(8)])
    report = assay.train_sft(
        rows, name="tiny", store=own_folder / "s.db", progress=SilentProgress(), model=str(tiny_model), epochs=2,
        batch=2, lora_r=2, max_length=64, eval_fraction=0.25, evaluations=2,
    )  # fmt: skip
    with Store(own_folder / "s.db") as store:
        (run,) = list_runs(store)
        stored = finished_report(store, run["id"]) or {}
    assert (run["kind"], run["status"]) == ("train", "done")
    assert (run["config"]["algorithm"], run["config"]["adapter_name"]) == ("sft", "tiny")
    log = read_training_log(own_folder / "runs" / run["id"])
    assert log is not None
    assert log.curves == {"loss/training": report.loss, "loss/held_out": report.held_out_loss}
    assert log.steps == report.steps
    assert stored["best_step"] == report.best_step


@pytest.mark.slow
def test_a_fine_tuning_stopped_during_its_comparison_continues_with_it(
    small_embedded: str, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program()
    Path("r.yaml").write_text(FIELD)
    write_rows("data.jsonl", [{"question": f"Does page {n} crash?", "answer": "bug"} for n in range(40)])
    rows = write_rows("rows.jsonl", [supervised(f"How much is {at} + 1?", f"It is {at + 1}.") for at in range(8)])
    options: dict[str, Any] = {
        "name": "tiny", "store": own_folder / "s.db", "model": small_embedded, "epochs": 1, "batch": 4, "lora_r": 2,
        "program": "mine.py:Mine", "rubric": "r.yaml", "data": "data.jsonl", "test_size": 2,
        "evaluation": {"preflight": False},
    }  # fmt: skip

    stops = True

    def evaluated(program: str, *, model: str, **settings: Any) -> Any:
        if stops and model != small_embedded:
            raise KeyboardInterrupt
        return assay.evaluate(program, model=model, **{**settings, "preflight": False})  # it answers nothing useful

    monkeypatch.setattr("assay.commands.train.evaluate", evaluated)
    with pytest.raises(KeyboardInterrupt):
        assay.train_sft(rows, progress=SilentProgress(), **options)
    stops = False
    with pytest.raises(ConfigError, match="there is an adapter 'tiny'"):
        assay.train_sft(rows, progress=SilentProgress(), resume=True, **{**options, "lora_r": 4})
    adapter = own_folder / ".assay" / "adapters" / "tiny" / "adapter.gguf"
    written = adapter.stat().st_mtime_ns
    report = assay.train_sft(rows, progress=SilentProgress(), resume=True, **options)
    assert adapter.stat().st_mtime_ns == written, "trained again"
    assert (report.name, report.steps) == (f"{small_embedded}+tiny", max(report.loss))
    assert set(report.validation["mine.py:Mine"]) == {"greedy", "sampled"}
    with Store(own_folder / "s.db") as store:
        (run,) = list_runs(store, kind="train", status="done")
        with store.engine.connect() as connection:
            (opened,) = connection.execute(sa.select(test_openings.c.job)).scalars()
    assert opened == f"compare-{run['id']}"


def test_what_is_refused_leaves_no_run(own_folder: Path) -> None:
    rows = write_rows("rows.jsonl", [supervised("a", "b")])
    for options, message in (
        ({"program": "p.py:P"}, "belong together"),
        ({"evaluation": {"seed": 1}}, "would have no effect"),
        ({"min_quality": 2.0}, "min_quality"),
    ):
        with pytest.raises(ConfigError, match=message):
            assay.train_sft(rows, name="x", store=own_folder / "s.db", **options)
    assert not (own_folder / "s.db").exists()
