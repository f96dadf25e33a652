"""Rows of tool agents, trained on by TRL with a tiny model: the loss covers the recorded answers."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from export_rows import LOOSE, add_rollout, store as store, tool_call, tool_turn

import assay
from assay.optimizers.finetuning.base import Policy
from assay.optimizers.finetuning.data import read_sft
from assay.optimizers.finetuning.sft import fitting_rows
from assay.traces import Store

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
    for name in ("add", "look")
]


@pytest.fixture
def filled(store: Store) -> Store:
    """Eight tasks, each with two rollouts: one calls the right tool, one another; the tools' argument types differ."""
    for at in range(8):
        question = f"How much is {at} + 1?"
        prompt = [{"role": "user", "content": question}]
        for call, score in (
            (tool_call("add", {"of": [at, 1]}), 1.0),
            (tool_call("look", {"of": f"{at} + 1", "deep": True}), 0.0),
        ):
            answered = [*prompt, call, {"role": "tool", "tool_call_id": "c", "content": str(at + 1)}]
            answer = {"role": "assistant", "content": f"The answer is {at + 1}."}
            turns = [tool_turn(0, prompt, call, TOOLS), tool_turn(1, answered, answer, TOOLS)]
            add_rollout(store, *turns, task=f"t{at}", score=score, inputs={"question": question})
    store.flush()
    return store


def exported(store: Store, kind: str, **options: Any) -> Path:
    return assay.export(kind, "out", store=store.url, gates=LOOSE, privacy="off", **options).path


def policy_of(model: Path) -> Policy:
    from transformers import AutoTokenizer

    return Policy(str(model), None, AutoTokenizer.from_pretrained(model), None)


def sft_labels(folder: Path, model: Path, **config: Any) -> list[str]:
    """The text that TRL's trainer computes a loss on, by row."""
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = load_dataset(
        "json", data_files=str(folder / "data.jsonl"), split="train", cache_dir=str(folder.parent / "cache")
    )
    arguments = SFTConfig(
        output_dir=str(folder.parent / "trained"), report_to="none", use_cpu=True, bf16=False, max_length=None, **config
    )
    trainer = SFTTrainer(model=str(model), args=arguments, train_dataset=rows, processing_class=tokenizer)
    return [tokenizer.decode([token for token in row["labels"] if token != -100]) for row in trainer.train_dataset]


@pytest.mark.slow
def test_supervised_rows_train_only_on_the_assistants_tool_calls_and_text(filled: Store, tiny_model: Path) -> None:
    labels = sft_labels(exported(filled, "sft", model=str(tiny_model)), tiny_model)
    assert len(labels) == 16
    calls = [label for label in labels if label.lstrip().startswith("<tool_call>")]
    assert sorted(json.loads(label.split("\n")[1])["arguments"]["of"][0] for label in calls) == list(range(8))
    assert all("answer is" in label for label in labels if label not in calls)


@pytest.mark.slow
def test_fields_of_tool_calls_reach_the_template_unchanged(filled: Store, tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}</s>{% "
        "endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    model = tmp_path / "with-tools"
    shutil.copytree(tiny_model, model)
    tokenizer.save_pretrained(model)
    labels = sft_labels(exported(filled, "sft", model=str(model), min_quality=0.0), model)
    assert {label.strip().removesuffix("</s>") for label in labels if "{" in label} == {
        call for at in range(8) for call in (f'add{{"of": [{at}, 1]}}', f'look{{"of": "{at} + 1", "deep": true}}')
    }


@pytest.mark.slow
def test_whole_conversations_are_trained_only_on_the_assistants_turns(filled: Store, tiny_model: Path) -> None:
    folder = exported(filled, "sft", model=str(tiny_model), whole=True)
    config = yaml.safe_load((folder / "sft.yaml").read_text())
    template = str(folder / config["chat_template_path"])
    loss = config["assistant_only_loss"]
    labels = sft_labels(folder, tiny_model, assistant_only_loss=loss, chat_template_path=template)
    assert len(labels) == 8
    for label in labels:
        assert label.count("<tool_call>") == 1
        assert "answer is" in label
        assert "How much" not in label
        assert "tool_response" not in label
    policy = policy_of(tiny_model)
    rows = fitting_rows(read_sft(folder, min_quality=0.0, eval_fraction=0.0, seed=0).train, policy, 100_000, Counter())
    ours = [policy.tokenizer.decode([token for token in row["labels"] if token != -100]) for row in rows]
    assert sorted(ours) == sorted(labels)  # what `assay train sft` trains on


@pytest.mark.slow
def test_preferences_between_tool_calls_are_trained_on(filled: Store, tiny_model: Path) -> None:
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    folder = exported(filled, "preferences", model=str(tiny_model))
    rows = load_dataset(
        "json", data_files=str(folder / "data.jsonl"), split="train", cache_dir=str(folder.parent / "cache")
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    steps = {"max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1}
    arguments = DPOConfig(output_dir=str(folder.parent / "dpo"), report_to="none", use_cpu=True, bf16=False, **steps)
    trainer = DPOTrainer(model=str(tiny_model), args=arguments, train_dataset=rows, processing_class=tokenizer)
    pairs = [
        tuple(tokenizer.decode(row[name]) for name in ("chosen_ids", "rejected_ids")) for row in trainer.train_dataset
    ]
    assert len(pairs) == 8
    assert all('"name": "add"' in chosen and '"name": "look"' in rejected for chosen, rejected in pairs)
    trainer.train()
    losses = [logged["loss"] for logged in trainer.state.log_history if "loss" in logged]
    assert losses[0] > losses[-1] > 0  # the preferred answer of each pair becomes likelier


@pytest.mark.slow
def test_the_warm_up_writes_tool_calls_in_the_form_that_its_template_renders(filled: Store, tiny_model: Path) -> None:
    # for a model whose template was not at hand
    folder = exported(filled, "sft", model="nobody/unknown", min_quality=0.0)
    data = read_sft(folder, min_quality=0.0, eval_fraction=0.0, seed=0)
    assert all(row["completion"][0].get("tool_calls") or row["completion"][0]["content"] for row in data.train)
    policy = policy_of(tiny_model)
    rows = fitting_rows(data.train, policy, 100_000, data.left_out)
    assert (len(rows), not data.left_out) == (32, True)
    assert all(row["completion"][0]["content"] for row in rows)
    messages = [row["completion"][0] for row in data.train]
    functions = [message["tool_calls"][0]["function"] for message in messages if message.get("tool_calls")]
    assert {"name": "look", "arguments": {"of": "0 + 1", "deep": True}} in functions
    assert {"name": "add", "arguments": {"of": [0, 1]}} in functions
