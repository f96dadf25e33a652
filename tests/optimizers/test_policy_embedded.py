"""Training with the embedded model: rollouts by llama.cpp, updates, serving, offline export, DSPy's finetuning."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import dspy
import numpy as np
import pytest
from embedded_training import DATA, SMALL

import assay
from assay.commands.train import train
from assay.commands.train_sft import compare_models
from assay.errors import ConfigError, DataError
from assay.models import get_lm
from assay.models.lora.adapters import find_adapter, write_merged
from assay.models.registry import find_model, spec
from assay.optimizers.finetuning import TRLProvider
from assay.optimizers.finetuning.base import load_policy
from assay.optimizers.finetuning.rows import trained_tokens
from assay.optimizers.finetuning.settings import PolicySettings
from assay.optimizers.finetuning.sources import Recorded
from assay.testing import scripted_lm
from assay.traces import Store
from assay.traces.export.settings import Gates
from assay.traces.store.listing import list_runs
from assay.web.runs import run_page

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
        report = train(
            "math_qa",
            rubric="digits.yaml",
            data=DATA,
            name="two-steps",
            model=small_embedded,
            sizes={"test": 2, "val": 2},
            parameters={"max_steps": 2},
            **SMALL,
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
        training = run_page(store, run["id"], {}, where=folder / ".assay" / "assay.db", store_flag=None).values[
            "trained"
        ]
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
        assert not any(
            is_trained for is_trained, piece in zip(mine, pieces, strict=True) if piece in ("action", "thought")
        )
    first = [call for call in calls if call.adapters == min(calls, key=lambda call: call.started_at).adapters]
    gaps = []
    for call in first:
        from assay.traces.messages.dialects import chat_messages

        prompt = policy.tokenizer.apply_chat_template(
            chat_messages(call.request), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        ids = torch.tensor([[*prompt, *call.token_ids]])
        with torch.no_grad():
            odds = policy.model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        mine = [odds[at, token].item() for at, token in enumerate(call.token_ids)]
        gaps += [abs(a - b) for a, b in zip(mine, call.logprobs, strict=True) if b > -8]
    assert (
        np.median(gaps) < 0.15
    )  # llama.cpp rounds activations to 8 bits; tokens out of place would be whole nats apart
    assert set(report.validation) == {"MathQA"} or set(report.validation) == {"math_qa"}


class Turning(dspy.Module):
    """One choice, by words that a grammar offers."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = dspy.Predict(
            dspy.Signature(
                {"place": (str, dspy.InputField()), "turn": (Literal["no", "yes"], dspy.OutputField())},
                "Say yes or no.",
            )
        )

    def forward(self, place: str) -> dspy.Prediction:
        return self.turn(place=place)


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


@pytest.mark.slow
def test_offline_training_uses_the_importance_ratio_to_the_sampling_policy(
    trained: tuple[Path, Any], small_embedded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained[0])
    rows = tmp_path / "rows"
    assay.export("transitions", rows, gates=Gates(min_clean=0), privacy="off")
    manifest = json.loads((rows / "manifest.json").read_text())
    assert list(manifest["tokenizers"]) == [spec(small_embedded).tokenizer_sha256]
    small = {
        key: value for key, value in SMALL.items() if key not in ("prompt_format", "evaluate_every", "max_completion")
    }
    small["steps"] = 1
    report = train(rows, name="offline", model=small_embedded, **small)
    assert report.name == f"{small_embedded}+offline"
    assert report.row_stats.calls > 0
    off = next(note for note in report.notes if note.startswith("off policy by"))
    assert abs(float(off.split()[3])) < 0.2
    assert not any("far off policy" in note or "likeliest tokens" in note for note in report.notes)

    def other(row: dict[str, Any]) -> dict[str, Any]:
        """As if sampled by weights that gave each token a fifth of the odds, among llama.cpp's most likely ones."""
        request = {
            **row["input"],
            "config": {name: value for name, value in row["input"]["config"].items() if name != "top_p"},
        }
        return {**row, "logprobs": row["logprobs"] and [value - 1.6 for value in row["logprobs"]], "input": request}

    far = train(rewritten(rows, tmp_path / "far", other), name="far", model=small_embedded, **small)
    assert any("far off policy" in note for note in far.notes)
    assert any("calls were sampled from llama.cpp's likeliest tokens" in note for note in far.notes)
    assert far.curves["clip_ratio/region_mean"][1] > 0.2 > report.curves["clip_ratio/region_mean"][1]
    manifest["tokenizers"] = {"0" * 64: 3}
    (rows / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="tokens of another tokenizer"):
        train(rows, name="other", model=small_embedded, **small)
    turned = rewritten(
        tmp_path / "far", tmp_path / "odd", lambda row: {**row, "token_ids": (row["token_ids"] or [])[::-1]}
    )
    with pytest.raises(DataError, match="do not decode to their text"):
        train(turned, name="odd", model=small_embedded, **small)


@pytest.mark.tutorial
@pytest.mark.slow
def test_old_and_new_weights_are_compared_with_the_program(
    trained: tuple[Path, Any], small_embedded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained[0])
    settings = {
        "rubric": "math_qa",
        "data": DATA,
        "sizes": {"test": 2},
        "parameters": {"max_steps": 2},
        "store": "c.db",
    }
    comparison = compare_models("math_qa", (small_embedded, f"{small_embedded}+two-steps"), settings)
    assert set(comparison) == {"greedy", "sampled"}
    for result in comparison.values():
        assert (result["before"]["n"], result["after"]["n"]) == (2, 2)
        assert 0 <= result["after"]["parsed"] <= 1
        assert result["after"]["valid_calls"] is None or 0 <= result["after"]["valid_calls"] <= 1
        assert result["gain"]["low"] <= result["gain"]["high"]


@pytest.mark.slow
def test_exports_without_learning_signal_are_refused(
    trained: tuple[Path, Any], small_embedded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained[0])
    assay.export("transitions", tmp_path / "rows", gates=Gates(min_clean=0), privacy="off")
    small = {
        key: value for key, value in SMALL.items() if key not in ("prompt_format", "evaluate_every", "max_completion")
    }
    flat = rewritten(
        tmp_path / "rows",
        tmp_path / "flat",
        lambda row: {**row, "return": 1.0 if row["t"] == 0 else 0.0, "reward": 0.0},
    )
    with pytest.raises(DataError, match="none has rewards that differ"):
        Recorded(flat, PolicySettings(prompts_per_step=2, num_generations=2, per_device_batch_size=2))
    task = json.loads((tmp_path / "rows" / "data.jsonl").read_text().splitlines()[0])["task"]
    alone = rewritten(tmp_path / "rows", tmp_path / "alone", lambda row: row if row["task"] == task else None)
    with pytest.raises(DataError, match="groups with nonzero variance to train on, and a step takes 9"):
        train(alone, name="alone", model=small_embedded, **{**small, "prompts_per_step": 9})
    with pytest.raises(DataError, match="calls of more than 16 tokens"):
        train(tmp_path / "rows", name="long", model=small_embedded, max_length=16, **small)
    text = (tmp_path / "rows" / "data.jsonl").read_text()
    stored = [
        copied(tmp_path / "rows", tmp_path / name, data) for name, data in (("once", text), ("twice", text + text))
    ]
    turns = [
        {
            rollout.id: len(rollout.transitions)
            for rollout in Recorded(folder, PolicySettings(prompts_per_step=1, num_generations=2)).rollouts.values()
        }
        for folder in stored
    ]
    assert turns[0] == turns[1]  # balancing copies rows
    unsaid = rewritten(
        tmp_path / "rows", tmp_path / "unsaid", lambda row: {**row, "input": without_temperature(row["input"])}
    )
    with pytest.raises(ConfigError, match="have no recorded sampling temperature"):
        train(unsaid, name="unsaid", model=small_embedded, **small)
    with pytest.raises(ConfigError, match="data: is missing"):
        train(tmp_path / "nowhere", name="other", model=small_embedded, **small)
    with pytest.raises(ConfigError, match=r"was sampled at temperature 1, not at 0\.5"):
        train(tmp_path / "rows", name="other", model=small_embedded, temperature=0.5, **small)
    with pytest.raises(ConfigError, match="step_weight: would have no effect"):
        train(tmp_path / "rows", name="x", model=small_embedded, step_weight=0.0, max_score_drop=0.5)
    broken = rewritten(tmp_path / "rows", tmp_path / "broken", lambda row: {**row, "return": "much", "reward": None})
    with pytest.raises(DataError, match="not a finite number"):
        Recorded(broken, PolicySettings(prompts_per_step=2, num_generations=2, per_device_batch_size=2))


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


@pytest.mark.tutorial
@pytest.mark.slow
def test_monitor_rubric_may_use_another_judge_model(
    trained: tuple[Path, Any], small_embedded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained[0])
    Path("nice.yaml").write_text("name: nice\ncriteria:\n  - {name: nice, weight: 1, judge: 'Is it nice?'}\n")
    report = train(
        "math_qa", rubric="digits.yaml", monitor="nice.yaml", judge_model=f"{small_embedded}+two-steps", data=DATA,
        name="watched", model=small_embedded,
        store="watched.db", sizes={"test": 1, "val": 1}, parameters={"max_steps": 1}, **SMALL,
    )  # fmt: skip
    assert set(report.curves["monitor"]) == {1, 2}
    assert all(0 <= value <= 1 for value in report.curves["monitor"].values())
    with Store("watched.db") as store:
        judged = [rollout for rollout in store.rollouts(limit=None) if rollout.source == "judge"]
    assert len(judged) >= 8
    assert {rollout.phase for rollout in judged} == {"preflight", "train"}


def examples(count: int) -> list[dspy.Example]:
    return [dspy.Example(place=f"{at} Main Street", turn="yes").with_inputs("place") for at in range(count)]


@pytest.mark.tutorial
@pytest.mark.model
@pytest.mark.slow
def test_dspy_grpo_returns_an_adapter(embedded: str) -> None:
    from dspy_internals import training_internals

    lm = get_lm(embedded, max_tokens=24)
    lm.provider = TRLProvider()
    student = Turning()
    student.set_lm(lm)
    optimizer = training_internals().grpo(
        metric=lambda gold, result, trace=None: float(result.turn == gold.turn), adapter=dspy.ChatAdapter(),
        exclude_demos=True, num_threads=1,
        num_train_steps=2, num_dspy_examples_per_grpo_step=2, num_rollouts_per_grpo_step=2,
        train_kwargs={"name": "grpo", "prompts_per_step": 2, "lora_r": 2},
    )  # fmt: skip
    with dspy.context(adapter=dspy.ChatAdapter()):
        trained = optimizer.compile(student, trainset=examples(4))
    assert trained.turn.lm.model == f"{embedded}+grpo"
    assert find_adapter("grpo").sha256 in get_lm(f"{embedded}+grpo").recording.backend.adapters
    assert lm("Say hi.")


@pytest.mark.slow
def test_dspy_finetuning_returns_a_model_with_the_adapter(small_embedded: str) -> None:
    from dspy_internals import training_internals

    observed: list[Any] = []
    lm = get_lm(small_embedded, temperature=0.0, max_tokens=8, observers=[observed.append])
    lm.provider = TRLProvider()
    text = [
        {"messages": [{"role": "user", "content": "What do you say?"}, {"role": "assistant", "content": "Fish."}]}
    ] * 8
    job = lm.finetune(
        text,
        training_internals().data_format.CHAT,
        {"name": "fish", "epochs": 15, "batch": 4, "lora_r": 8, "learning_rate": 2e-2},
    )
    tuned = job.result(timeout=300)
    assert not isinstance(tuned, Exception), tuned
    assert tuned.model == f"{small_embedded}+fish"
    assert (tuned.kwargs["max_tokens"], tuned.provider.finetunable) == (8, True)
    assert "Fish" in tuned("What do you say?")[0]
    assert [call.adapters for call in observed] == [(find_adapter("fish").sha256,)]

    refused = lm.finetune(text, training_internals().data_format.CHAT, {"epoch": 1}).result(timeout=60)
    assert "SFTSettings has no setting 'epoch'" in str(refused)


@pytest.mark.tutorial
@pytest.mark.model
@pytest.mark.slow
def test_dspy_better_together_returns_a_program_with_the_adapter(embedded: str) -> None:
    lm = get_lm(embedded, temperature=0.0, max_tokens=8)
    lm.provider = TRLProvider()
    student, teacher = Turning(), Turning()
    student.set_lm(lm)
    teacher.set_lm(scripted_lm(lambda _: "[[ ## turn ## ]]\nyes\n\n[[ ## completed ## ]]"))
    metric, kwargs = (
        lambda gold, result, trace=None: result.turn == "yes",
        {"name": "turn", "epochs": 3, "batch": 2, "learning_rate": 1e-3, "eval_fraction": 0.0},
    )
    weights = dspy.BootstrapFinetune(metric=metric, adapter=dspy.ChatAdapter(), train_kwargs=kwargs, num_threads=1)
    with dspy.context(adapter=dspy.ChatAdapter()):
        trained = dspy.BetterTogether(metric=metric, w=weights).compile(
            student, trainset=examples(5), valset=examples(2), teacher=teacher, strategy="w"
        )
    assert trained.turn.lm.model == f"{embedded}+turn"
    with dspy.context(adapter=dspy.ChatAdapter()):
        assert trained(place="77 Main Street").turn == "yes"
