"""Rows of tool agents, trained on by TRL with a tiny model: the loss covers the recorded answers."""

import contextlib
import importlib
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.datasets.tasks import task_key
from assay.traces import Rollout, Store, Transition
from assay.traces.export.settings import Gates
from assay.traces.store.sealing import store_splits

LOOSE = Gates(min_transitions=0, min_clean=0.0, min_task_types=0)
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("add", "look")
]


def call_of(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}],
    }


def turn(t: int, messages: list[dict[str, Any]], answer: dict[str, Any]) -> Transition:
    request = {"dialect": "chat", "body": {"model": "m", "messages": messages, "tools": TOOLS}}
    return Transition(
        t=t,
        model="m",
        request=request,
        response={"body": {"choices": [{"message": answer}]}},
        output=answer.get("content") or "",
    )


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """Eight tasks, each with two rollouts: one calls the right tool, one another; the tools' argument types differ."""
    with Store(tmp_path / ".assay" / "assay.db") as opened:
        for at in range(8):
            prompt = [{"role": "user", "content": f"How much is {at} + 1?"}]
            for call, score in (
                (call_of("add", {"of": [at, 1]}), 1.0),
                (call_of("look", {"of": f"{at} + 1", "deep": True}), 0.0),
            ):
                answered = [*prompt, call, {"role": "tool", "tool_call_id": "c", "content": str(at + 1)}]
                turns = [
                    turn(0, prompt, call),
                    turn(1, answered, {"role": "assistant", "content": f"The answer is {at + 1}."}),
                ]
                fields = {
                    "run_id": "r",
                    "task_id": f"t{at}",
                    "group_id": f"t{at}",
                    "status": "done",
                    "model": "m",
                    "split": "train",
                    "score": score,
                }
                rollout = Rollout(
                    transitions=turns,
                    inputs={"question": f"How much is {at} + 1?"},
                    expected={"answer": str(at + 1)},
                    **fields,
                )
                store_splits(opened, {"train": [task_key(rollout.inputs)]})
                opened.put_rollout(rollout)
                for transition in turns:
                    opened.put_transition(rollout.id, transition)
        yield opened


def exported(store: Store, kind: str, **options: Any) -> Path:
    store.flush()
    return assay.export(kind, "out", store=store.url, gates=LOOSE, privacy="off", **options).path


def trained(folder: Path, command: str, model: Path) -> None:
    """Two training steps of TRL's script on an export with its config: what `trl sft` runs, in this process."""
    script = importlib.import_module(f"trl.scripts.{command}")
    arguments = ["--config", f"{command}.yaml", "--model_name_or_path", str(model), "--max_steps", "2", "--use_cpu"]
    arguments += ["--gradient_accumulation_steps", "1", "--use_peft", "false", "--per_device_train_batch_size", "4"]
    with contextlib.chdir(folder):
        script.main(*script.make_parser().parse_args_and_config(arguments))


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
def test_supervised_rows_train_only_on_the_assistants_tool_calls_and_text(store: Store, tiny_model: Path) -> None:
    labels = sft_labels(exported(store, "sft", model=str(tiny_model)), tiny_model)
    assert len(labels) == 16
    calls = [label for label in labels if label.lstrip().startswith("<tool_call>")]
    assert sorted(json.loads(label.split("\n")[1])["arguments"]["of"][0] for label in calls) == list(range(8))
    assert all("answer is" in label for label in labels if label not in calls)


@pytest.mark.slow
def test_fields_of_tool_calls_reach_the_template_unchanged(store: Store, tiny_model: Path, tmp_path: Path) -> None:
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
    labels = sft_labels(exported(store, "sft", model=str(model), min_quality=0.0), model)
    assert {label.strip().removesuffix("</s>") for label in labels if "{" in label} == {
        call for at in range(8) for call in (f'add{{"of": [{at}, 1]}}', f'look{{"of": "{at} + 1", "deep": true}}')
    }


@pytest.mark.slow
def test_whole_conversations_are_trained_only_on_the_assistants_turns(store: Store, tiny_model: Path) -> None:
    import yaml
    from transformers import AutoTokenizer

    from assay.optimizers.finetuning.base import Policy
    from assay.optimizers.finetuning.data import read_sft
    from assay.optimizers.finetuning.sft import fitting_rows

    folder = exported(store, "sft", model=str(tiny_model), whole=True)
    config = yaml.safe_load((folder / "sft.yaml").read_text())
    labels = sft_labels(
        folder,
        tiny_model,
        assistant_only_loss=config["assistant_only_loss"],
        chat_template_path=str(folder / config["chat_template_path"]),
    )
    assert len(labels) == 8
    for label in labels:
        assert label.count("<tool_call>") == 1
        assert "answer is" in label
        assert "How much" not in label
        assert "tool_response" not in label
    trained(folder, "sft", tiny_model)
    policy = Policy(str(tiny_model), None, AutoTokenizer.from_pretrained(tiny_model), None)
    rows = fitting_rows(read_sft(folder, min_quality=0.0, eval_fraction=0.0, seed=0).train, policy, 100_000, Counter())
    ours = [policy.tokenizer.decode([token for token in row["labels"] if token != -100]) for row in rows]
    assert sorted(ours) == sorted(labels)  # what `assay train sft` trains on


@pytest.mark.slow
def test_preferences_between_tool_calls_are_trained_on(store: Store, tiny_model: Path) -> None:
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    folder = exported(store, "preferences", model=str(tiny_model))
    rows = load_dataset(
        "json", data_files=str(folder / "data.jsonl"), split="train", cache_dir=str(folder.parent / "cache")
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    arguments = DPOConfig(
        output_dir=str(folder.parent / "dpo"),
        report_to="none",
        use_cpu=True,
        bf16=False,
        max_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
    )
    trainer = DPOTrainer(model=str(tiny_model), args=arguments, train_dataset=rows, processing_class=tokenizer)
    pairs = [
        tuple(tokenizer.decode(row[name]) for name in ("chosen_ids", "rejected_ids")) for row in trainer.train_dataset
    ]
    assert len(pairs) == 8
    assert all('"name": "add"' in chosen and '"name": "look"' in rejected for chosen, rejected in pairs)
    trainer.train()
    losses = [logged["loss"] for logged in trainer.state.log_history if "loss" in logged]
    assert losses[0] > losses[-1] > 0  # the preferred answer of each pair becomes likelier
    trained(folder, "dpo", tiny_model)


@pytest.mark.slow
def test_the_warm_up_writes_tool_calls_in_the_form_that_its_template_renders(store: Store, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    from assay.optimizers.finetuning.base import Policy
    from assay.optimizers.finetuning.data import read_sft
    from assay.optimizers.finetuning.sft import fitting_rows

    folder = exported(
        store, "sft", model="nobody/unknown", min_quality=0.0
    )  # for a model whose template was not at hand
    data = read_sft(folder, min_quality=0.0, eval_fraction=0.0, seed=0)
    assert all(row["completion"][0].get("tool_calls") or row["completion"][0]["content"] for row in data.train)
    policy = Policy(str(tiny_model), None, AutoTokenizer.from_pretrained(tiny_model), None)
    rows = fitting_rows(data.train, policy, 100_000, data.left_out)
    assert (len(rows), not data.left_out) == (32, True)
    assert all(row["completion"][0]["content"] for row in rows)
    functions = [
        row["completion"][0]["tool_calls"][0]["function"]
        for row in data.train
        if row["completion"][0].get("tool_calls")
    ]
    assert {"name": "look", "arguments": {"of": "0 + 1", "deep": True}} in functions
    assert {"name": "add", "arguments": {"of": [0, 1]}} in functions
