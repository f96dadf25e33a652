"""Training with the embedded model: rollouts by llama.cpp, updates, serving, exports, DSPy's finetuning, judges."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import numpy as np
import pytest

import assay
from assay.commands.train import check_comparison, train
from assay.errors import ConfigError, DataError
from assay.jobs.checks import independent
from assay.models import get_lm
from assay.models.embedded import LlamaBackend
from assay.models.lora import find_adapter, write_merged
from assay.models.registry import find_model, spec
from assay.optimizers.finetuning import TRLProvider
from assay.optimizers.finetuning.base import load_policy, tokenizer_sha, unpacked_weights
from assay.optimizers.finetuning.rows import trained_tokens
from assay.optimizers.finetuning.settings import PolicySettings
from assay.optimizers.finetuning.sources import Recorded
from assay.traces import Store
from assay.traces.export.settings import Gates
from assay.traces.messages.dialects import chat_messages
from assay.traces.store.listing import list_runs
from assay.web.runs import run_page

DATA = "arithmetic:terms=2-2&digits=1-1&size=60"
SMALL: dict[str, Any] = {
    "steps": 2,
    "prompts_per_step": 2,
    "num_generations": 2,
    "per_device_batch_size": 2,
    "lora_r": 2,
    "max_completion": 24,
    "evaluate_every": 0,
    "prompt_format": "lean",
}
RUBRIC = """name: digits
criteria:
  - {name: digits, weight: 1, check: "rewarding.py:digits"}
"""


CHECK = '''
def digits(task, prediction, rollout):
    """Something that answers differ in, whatever they are worth."""
    text = "".join(call.output for call in rollout.transitions)
    return sum(map(ord, text)) % 101 / 100
'''


@pytest.fixture(scope="module")
def trained(small_embedded: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a store and an adapter that two steps made."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("rewarding.py").write_text(CHECK)
        Path("digits.yaml").write_text(RUBRIC)
        sizes = {"sizes": {"test": 2, "val": 2}, "parameters": {"max_steps": 2}}
        report = train(
            "math_qa", rubric="digits.yaml", data=DATA, name="two-steps", model=small_embedded, **sizes, **SMALL
        )
    return folder, report


@pytest.mark.slow
def test_training_tokens_equal_the_sampled_tokens(trained: tuple[Path, Any], small_embedded: str) -> None:
    import torch

    folder, report = trained
    assert report.name == f"{small_embedded}+two-steps"
    assert report.steps == 2
    assert report.row_stats.calls > 4
    assert not [why for why in report.row_stats.left_out if "tokenised" in why]
    with Store(folder / ".assay" / "assay.db") as store:
        rollouts = [store.rollout(r.id) for r in store.rollouts(limit=None) if r.phase == "train"]
        (run,) = list_runs(store, kind="train")
        page = run_page(store, run["id"], {}, where=folder / ".assay" / "assay.db", store_flag=None)
    training = page.values["trained"]
    assert [chart.heading for chart in training.page.charts][:1] == ["Reward"]
    assert training.page.samples == []  # their texts stay in the store, where they can be erased
    assert {sample.rollout_id for sample in training.samples} <= {rollout.id for rollout in rollouts}
    calls = [call for rollout in rollouts for call in rollout.transitions]
    assert len(rollouts) == 8
    assert not any(call.cached for call in calls)
    adapters = {call.adapters for call in calls}
    assert len(adapters) == 2  # one a step
    policy = load_policy(small_embedded)  # the first step was made with LoRA's zeros, so by the base
    calls = [call for call in calls if call.token_ids]  # llama.cpp returned all of them
    decided = [call for call in calls if "action: " in call.output]
    assert decided
    for call in decided:  # the words that the grammar offered are trained, those it forced are not
        pieces = [policy.tokenizer.decode([token]) for token in call.token_ids]
        mine = trained_tokens(call, pieces)
        before = len(call.output.rpartition("action: ")[0] + "action:")
        at = next(at for at in range(len(pieces)) if len("".join(pieces[: at + 1]).rstrip()) > before)
        assert mine[at] == (call.logprobs[at] > np.log(1e-4))
        forced = [is_trained for is_trained, piece in zip(mine, pieces, strict=True) if piece in ("action", "thought")]
        assert not any(forced)
    first = [call for call in calls if call.adapters == min(calls, key=lambda call: call.started_at).adapters]
    gaps = []
    for call in first:
        prompt = policy.tokenizer.apply_chat_template(
            chat_messages(call.request), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        ids = torch.tensor([[*prompt, *call.token_ids]])
        with torch.no_grad():
            odds = policy.model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        mine = [odds[at, token].item() for at, token in enumerate(call.token_ids)]
        gaps += [abs(a - b) for a, b in zip(mine, call.logprobs, strict=True) if b > -8]
    # llama.cpp rounds activations to 8 bits; tokens out of place would be whole nats apart
    assert np.median(gaps) < 0.15
    assert set(report.validation) in ({"MathQA"}, {"math_qa"})


def rewritten(folder: Path, out: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Path:
    """An export with its rows changed, and a manifest that says so."""
    rows = [change(json.loads(line)) for line in (folder / "data.jsonl").read_text().splitlines()]
    return copied(folder, out, "".join(json.dumps(row) + "\n" for row in rows if row is not None))


def without_temperature(text: Any) -> Any:
    request = json.loads(text) if isinstance(text, str) else text
    request["config"].pop("temperature", None)
    return json.dumps(request) if isinstance(text, str) else request


def copied(folder: Path, out: Path, text: str) -> Path:
    shutil.copytree(folder, out)
    (out / "data.jsonl").write_text(text)
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["files"]["data.jsonl"]["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (out / "manifest.json").write_text(json.dumps(manifest))
    return out


OFFLINE = {name: SMALL[name] for name in ("prompts_per_step", "num_generations", "per_device_batch_size", "lora_r")}


@pytest.fixture
def rows(trained: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An export of what the training recorded."""
    monkeypatch.chdir(trained[0])
    assay.export("transitions", tmp_path / "rows", gates=Gates(min_clean=0), privacy="off")
    return tmp_path / "rows"


@pytest.mark.slow
def test_offline_training_uses_the_importance_ratio_to_the_sampling_policy(
    rows: Path, small_embedded: str, tmp_path: Path
) -> None:
    manifest = json.loads((rows / "manifest.json").read_text())
    assert list(manifest["tokenizers"]) == [spec(small_embedded).tokenizer_sha256]
    small: dict[str, Any] = {"model": small_embedded, "steps": 1, **OFFLINE}
    report = train(rows, name="offline", **small)
    assert report.name == f"{small_embedded}+offline"
    assert report.row_stats.calls > 0
    off = next(note for note in report.notes if note.startswith("off policy by"))
    assert abs(float(off.split()[3])) < 0.2
    assert not any("far off policy" in note or "likeliest tokens" in note for note in report.notes)

    def other(row: dict[str, Any]) -> dict[str, Any]:
        """As if sampled by weights that gave each token a fifth of the odds, among llama.cpp's most likely ones."""
        config = {name: value for name, value in row["input"]["config"].items() if name != "top_p"}
        logprobs = row["logprobs"] and [value - 1.6 for value in row["logprobs"]]
        return {**row, "logprobs": logprobs, "input": {**row["input"], "config": config}}

    far = train(rewritten(rows, tmp_path / "far", other), name="far", **small)
    assert any("far off policy" in note for note in far.notes)
    assert any("calls were sampled from llama.cpp's likeliest tokens" in note for note in far.notes)
    assert far.curves["clip_ratio/region_mean"][1] > 0.2 > report.curves["clip_ratio/region_mean"][1]
    manifest["tokenizers"] = {"0" * 64: 3}
    (rows / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="tokens of another tokenizer"):
        train(rows, name="other", **small)
    turned = rewritten(
        tmp_path / "far", tmp_path / "odd", lambda row: {**row, "token_ids": (row["token_ids"] or [])[::-1]}
    )
    with pytest.raises(DataError, match="do not decode to their text"):
        train(turned, name="odd", **small)


@pytest.mark.slow
def test_exports_without_learning_signal_are_refused(rows: Path, small_embedded: str, tmp_path: Path) -> None:
    small: dict[str, Any] = {"name": "x", "model": small_embedded, "steps": 2, **OFFLINE}
    task = json.loads((rows / "data.jsonl").read_text().splitlines()[0])["task"]
    settings = PolicySettings(prompts_per_step=2, num_generations=2, per_device_batch_size=2)

    def changed(name: str, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Path:
        return rewritten(rows, tmp_path / name, change)

    flat = changed("flat", lambda row: {**row, "return": 1.0 if row["t"] == 0 else 0.0, "reward": 0.0})
    broken = changed("broken", lambda row: {**row, "return": "much", "reward": None})
    for folder, message in ((flat, "none has rewards that differ"), (broken, "not a finite number")):
        with pytest.raises(DataError, match=message):
            Recorded(folder, settings)
    alone = changed("alone", lambda row: row if row["task"] == task else None)
    unsaid = changed("unsaid", lambda row: {**row, "input": without_temperature(row["input"])})
    refusals: list[tuple[Path, dict[str, Any], type[Exception], str]] = [
        (alone, {"prompts_per_step": 9}, DataError, "groups with nonzero variance to train on, and a step takes 9"),
        (rows, {"max_length": 16}, DataError, "calls of more than 16 tokens"),
        (unsaid, {}, ConfigError, "have no recorded sampling temperature"),
        (tmp_path / "nowhere", {}, ConfigError, "data: is missing"),
        (rows, {"temperature": 0.5}, ConfigError, r"was sampled at temperature 1, not at 0\.5"),
        (rows, {"step_weight": 0.0, "max_score_drop": 0.5}, ConfigError, "step_weight: would have no effect"),
    ]
    for folder, more, error, message in refusals:
        with pytest.raises(error, match=message):
            train(folder, **{**small, **more})


@pytest.mark.slow
def test_merged_weights_equal_base_plus_adapter(
    trained: tuple[Path, Any], small_embedded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf

    monkeypatch.chdir(trained[0])
    adapter = find_adapter("two-steps")
    write_merged(find_model(small_embedded), [adapter.gguf, adapter.gguf], tmp_path / "m.gguf")
    base, merged, lora = (
        gguf.GGUFReader(str(path)) for path in (find_model(small_embedded), tmp_path / "m.gguf", adapter.gguf)
    )
    name = "blk.1.attn_q.weight"
    before, after = ({t.name: t for t in reader.tensors}[name] for reader in (base, merged))
    parts = {t.name: t.data for t in lora.tensors}
    delta = 2 * (2 * 2 / 2) * parts[f"{name}.lora_b"] @ parts[f"{name}.lora_a"]  # two adapters, alpha 4 of rank 2
    want = gguf.quants.dequantize(before.data, before.tensor_type) + delta
    have = gguf.quants.dequantize(after.data, after.tensor_type)
    assert np.abs(want - have).max() <= np.abs(want).max() / 127
    assert [t.name for t in base.tensors] == [t.name for t in merged.tensors]
    assert get_lm(f"{small_embedded}+two-steps", temperature=0.0, max_tokens=8)("Say hi.")


@pytest.mark.slow
def test_dspy_finetuning_returns_a_model_with_the_adapter(small_embedded: str) -> None:
    from dspy_internals import training_internals

    observed: list[Any] = []
    lm = get_lm(small_embedded, temperature=0.0, max_tokens=8, observers=[observed.append])
    lm.provider = TRLProvider()
    turns = [{"role": "user", "content": "What do you say?"}, {"role": "assistant", "content": "Fish."}]
    text, chat = [{"messages": turns}] * 8, training_internals().data_format.CHAT
    settings = {"name": "fish", "epochs": 15, "batch": 4, "lora_r": 8, "learning_rate": 2e-2}
    tuned = lm.finetune(text, chat, settings).result(timeout=300)
    assert not isinstance(tuned, Exception), tuned
    assert tuned.model == f"{small_embedded}+fish"
    assert (tuned.kwargs["max_tokens"], tuned.provider.finetunable) == (8, True)
    assert "Fish" in tuned("What do you say?")[0]
    assert [call.adapters for call in observed] == [(find_adapter("fish").sha256,)]

    refused = lm.finetune(text, chat, {"epoch": 1}).result(timeout=60)
    assert "SFTSettings has no setting 'epoch'" in str(refused)


# -- judges, tokenizers, wrong settings


TEXTS = ("+  2", "  2", "a\n\n2", "a \n2", "a  \n 2", "12  3", "\t\t2", "é   5", "a  'll", "x 10 <|im_end|>\n ½")


@pytest.mark.model
def test_the_tokenizer_is_the_configured_one_and_that_of_the_engine(embedded: str) -> None:
    from transformers import AutoTokenizer

    tokenizer, engine = AutoTokenizer.from_pretrained(str(unpacked_weights("smollm2-135m"))), LlamaBackend(embedded)
    assert tokenizer_sha(tokenizer) == spec(embedded).tokenizer_sha256
    for text in TEXTS:
        asked = {"content": text, "parse_special": True, "add_special": False}
        assert tokenizer(text)["input_ids"] == engine.post("/tokenize", asked)["tokens"], text


class Saying(dspy.Module):
    """One answer, in free words."""

    def __init__(self) -> None:
        super().__init__()
        self.say = dspy.Predict("question -> answer")

    def forward(self, question: str) -> dspy.Prediction:
        return self.say(question=question)


@pytest.mark.tutorial
@pytest.mark.slow
@pytest.mark.model
def test_rewarded_output_becomes_more_likely(embedded: str) -> None:
    questions = [{"question": f"What is the number {number} known for?"} for number in range(160)]
    tasks = [json.dumps({"inputs": inputs, "expected": {}}) for inputs in questions]
    Path("numbers.jsonl").write_text("\n".join(tasks))
    Path("brief.py").write_text(
        'def brief(task, prediction, rollout):\n    return max(0.0, 1 - len(str(prediction["answer"])) / 40)\n'
    )
    Path("brief.yaml").write_text("name: brief\ncriteria:\n  - {name: brief, weight: 1, check: 'brief.py:brief'}\n")
    report = train(
        Saying(), rubric="brief.yaml", data="numbers.jsonl", name="brief", model=embedded, prompt_format="lean",
        steps=4, prompts_per_step=3, num_generations=4,
        learning_rate=5e-4, beta=0.0, max_completion=14, evaluate_every=0, sizes={"test": 40, "val": 2},
    )  # fmt: skip
    sampled = next(iter(report.validation.values()))["sampled"]
    assert sampled["gain"]["low"] > 0
    assert report.curves["score"][4] > report.curves["score"][1] + 0.1


def test_model_in_training_cannot_be_its_own_judge(model_name: str, tmp_path: Path) -> None:
    Path("nice.yaml").write_text("name: nice\ncriteria:\n  - {name: nice, weight: 1, judge: 'Is it nice?'}\n")
    job = {"data": DATA, "name": "x", "model": model_name, **SMALL}
    for judge in ({}, {"judge_model": model_name}):
        for options in ({"rubric": "nice.yaml"}, {"rubric": "math_qa", "monitor": "nice.yaml"}):
            with pytest.raises(ConfigError, match="would learn to satisfy itself"):
                train("math_qa", **job, **options, **judge)
        with pytest.raises(ConfigError, match="would learn to satisfy itself"):
            train("math_qa", **job, rubric="math_qa", retention=["math_qa,nice.yaml,arithmetic:size=60"], **judge)
        with pytest.raises(ConfigError, match="would learn to satisfy itself"):
            check_comparison("math_qa", {"rubric": "nice.yaml", "data": DATA, "model": model_name, **judge})
        with pytest.raises(ConfigError, match="would learn to satisfy itself"):
            assay.improve("math_qa", rubric="nice.yaml", data=DATA, name="x", model=model_name, **judge)


def test_judge_uses_the_model_its_file_names(model_name: str) -> None:
    Path("nice.yaml").write_text("name: nice\ncriteria:\n  - {name: nice, weight: 1, judge: {use: who.yaml}}\n")
    judge = "name: who\ntext: Is it nice?\nmodel: {}\n"
    Path("who.yaml").write_text(judge.format(model_name))
    with pytest.raises(ConfigError, match="would learn to satisfy itself"):
        independent("nice.yaml", "openai/gpt-x", model_name)
    Path("who.yaml").write_text(judge.format("openai/gpt-x"))
    assert independent("nice.yaml", None, model_name).name == "nice"
    Path("who.yaml").write_text("name: who\njury: {members: [one.yaml, two.yaml]}\n")
    Path("one.yaml").write_text(judge.format("openai/gpt-x"))
    Path("two.yaml").write_text("name: two\ntext: Is it nice?\n")
    with pytest.raises(ConfigError, match="would learn to satisfy itself"):
        independent("nice.yaml", None, model_name)
    assert independent("nice.yaml", "openai/gpt-y", model_name)
    Path("who.yaml").write_text("name: who\ntext: Which is nicer?\ncompare: pairs\n")
    with pytest.raises(ConfigError, match="has a judge that compares outputs"):
        independent("nice.yaml", "openai/gpt-y", model_name)


def test_a_retention_task_that_is_named_twice_and_a_temperature_of_the_program_are_refused(model_name: str) -> None:
    job = {"rubric": "math_qa", "data": DATA, "name": "x", "model": model_name, **SMALL}
    with pytest.raises(ConfigError, match=f"math_qa on {re.escape(DATA)} is named twice"):
        train("math_qa", retention=[f"math_qa,math_qa,{DATA}"] * 2, **job)
    with pytest.raises(ConfigError, match="temperature would have no effect: temperature is that of rollouts"):
        train("math_qa", parameters={"temperature": 0.3}, **job)


@pytest.mark.tutorial
@pytest.mark.slow
@pytest.mark.model
def test_dspy_grpo_trains_the_model_in_place(embedded: str) -> None:
    from dspy_internals import training_internals

    lm = get_lm(embedded, max_tokens=4, seed=3)
    lm.provider = TRLProvider()
    job = lm.reinforce(
        {"name": "fish", "num_generations": 2, "prompts_per_step": 2, "learning_rate": 3e-4, "beta": 0.0, "lora_r": 4}
    )
    assert "seed" not in lm.kwargs
    prompt, texts = [{"role": "user", "content": "What do you say?"}], ("Fish.", "Hello!")
    group = [
        {"messages": prompt, "completion": {"role": "assistant", "content": text}, "reward": float(text == "Fish.")}
        for text in texts
    ]
    rows = [job.row_of(call) for call in group]
    apart, adapters = [], lm.recording.backend.adapters
    for _ in range(3):
        fish, hello = map(sum, job.trainer.logprobs_of(rows))
        apart.append(fish - hello)
        pending = job.get_status()["pending_batch_ids"]
        assert len(pending) == 2
        job.step([{"batch_id": at, "group": group} for at in pending], training_internals().data_format.GRPO_CHAT)
        assert lm.recording.backend.adapters != adapters  # it answers with the new weights
        adapters = lm.recording.backend.adapters
    assert apart == sorted(apart)
    assert apart[-1] > apart[0] + 0.1
    job.save_checkpoint("third")
    assert (Path(job.checkpoints["third"]) / "adapter_model.safetensors").exists()
    with pytest.raises(DataError, match="has the reward nan"):
        job.step([{"batch_id": 10, "group": [{**call, "reward": float("nan")} for call in group]}], "grpo_chat")
    job.step(
        [{"batch_id": at, "group": group} for at in job.get_status()["pending_batch_ids"]], "grpo_chat"
    )  # training continues
    folder = Path(job.checkpoints["third"]).parents[1]
    job.cancel()
    assert not folder.exists()
    assert lm.kwargs["seed"] == 3
    assert (lm.model, lm.recording.backend.adapters) == (embedded, ())
    assert lm("What do you say?")
    for settings, message in (
        ({"steps": 3}, "'steps'. would have no effect"),
        ({"algorithm": "ppo"}, "use assay.train"),
        ({"lora_r": 0}, "lora_r: must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            lm.reinforce({"name": "x", **settings})
    with pytest.raises(ConfigError, match="temperature 0"):
        lm.copy(temperature=0.0).reinforce({})
