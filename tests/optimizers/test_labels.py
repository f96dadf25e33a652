"""Where the loss of the warm-up is: on completions, and in conversations on all that the assistant said. Its curves."""

import json
import math
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from assay.errors import DataError
from assay.optimizers.finetuning import SFTSettings, read_sft
from assay.optimizers.finetuning.base import Policy
from assay.optimizers.finetuning.data import completion_row, conversation_rows
from assay.optimizers.finetuning.sft import LossMonitor, fitting_rows, make_trainer, to_dataset
from assay.reports.training import TrainingLog, read_training_log

pytest.importorskip("transformers")
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "How much is 1 + 2?"},
    {"role": "assistant", "content": "The answer is 3."},
    {"role": "user", "content": "Is it 3?"},
    {"role": "assistant", "content": "It is."},
]
THINKING = (  # as Qwen3 does: of all turns but the last the thoughts are left out
    "{% for m in messages %}{{ m.role }}: {% if loop.last %}{{ m.content }}{% else %}{{ "
    "m.content.split('</think>')[-1] }}{% endif %}</s>"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


def trained(row: dict[str, Any], tokenizer: Any) -> list[str]:
    """The texts that a row has a loss on, each that is in one piece."""
    pieces: list[list[int]] = [[]]
    for token, label in zip(row["input_ids"], row["labels"], strict=True):
        assert label in (token, -100)
        pieces += [] if label != -100 else [[]] if pieces[-1] else []
        if label != -100:
            pieces[-1].append(label)
    return [tokenizer.decode(piece) for piece in pieces if piece]


@pytest.mark.slow
def test_loss_covers_exactly_the_assistant_turns(tokenizer: Any) -> None:
    (row,) = conversation_rows(TALK, [], tokenizer)
    assert trained(row, tokenizer) == [" The answer is 3.</s>", " It is.</s>"]
    assert tokenizer.decode(row["input_ids"]).count("</s>") == 5


@pytest.mark.slow
def test_rewritten_turn_becomes_a_separate_row(tokenizer: Any) -> None:
    tokenizer.chat_template = THINKING
    said = [{"role": "assistant", "content": text} for text in ("<think>1 + 2</think>3.", "<think>3</think>It is.")]
    text = [TALK[1], said[0], TALK[3], said[1]]
    rows, labelled = conversation_rows(text, [], tokenizer)
    assert trained(rows, tokenizer) == ["<think>3</think>It is.</s>"]
    assert "1 + 2</think>" not in tokenizer.decode(rows["input_ids"])
    assert trained(labelled, tokenizer) == ["<think>1 + 2</think>3.</s>"]


@pytest.mark.slow
def test_completion_labels_equal_those_of_trl(tokenizer: Any) -> None:
    row = completion_row(TALK[:2], TALK[2:3], [], tokenizer)
    assert trained(row, tokenizer) == [" The answer is 3.</s>"]


def read(path: Path, eval_fraction: float = 0.0) -> Any:
    return read_sft(path, min_quality=0.8, eval_fraction=eval_fraction, seed=0)


def conversations(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_answers_of_weight_0_have_no_loss(tokenizer: Any, tmp_path: Path) -> None:
    def weighted(*weights: int) -> dict[str, Any]:
        pairs = zip(TALK, (0, 0, *weights), strict=True)
        return {"messages": [{**message, "weight": weight} for message, weight in pairs]}

    path = conversations(tmp_path / "d.jsonl", weighted(0, 0, 1), weighted(1, 0, 0), weighted(0, 0, 0))
    data = read(path)
    assert (data.left_out.total(), [len(row["prompt"]) for row in data.train]) == (1, [4, 2])
    policy = Policy("m", None, tokenizer, None)
    rows = fitting_rows(data.train, policy, 1000, data.left_out)
    assert [trained(row, tokenizer) for row in rows] == [[" It is.</s>"], [" The answer is 3.</s>"]]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [*TALK[:2], {**TALK[2], "weight": 0.5}]},
        {"messages": [*TALK[:2], {**TALK[2], "weight": "0"}]},
        {"prompt": TALK[:2], "completion": [{**TALK[2], "weight": 0}, TALK[4]]},
        {"messages": TALK, "functions": [{"name": "add"}]},
        {"messages": [*TALK[:2], {"role": "assistant", "function_call": {"name": "add", "arguments": "{}"}}, TALK[4]]},
        {"prompt": TALK[:2], "chosen": TALK[2:3], "rejected": TALK[4:]},
    ],
)
def test_rows_in_other_forms_are_refused_rather_than_read_in_part(tmp_path: Path, row: dict[str, Any]) -> None:
    path = conversations(tmp_path / "d.jsonl", {"messages": TALK}, row)
    with pytest.raises(DataError, match=r"d\.jsonl:2: "):
        read(path)


@pytest.mark.slow
def test_conversation_is_excluded_if_the_template_hides_an_answer(
    tiny_model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ m['content'] }}", "{{ '' if 'answer' in m['content'] else m['content'] }}"
    )
    data = read(conversations(tmp_path / "d.jsonl", {"messages": TALK}))
    assert fitting_rows(data.train, Policy(str(tiny_model), None, tokenizer, None), 1000, data.left_out) == []
    assert data.left_out == Counter({"that cannot be learned from: the chat template leaves out the answer": 1})


def test_conversations_with_tools_and_plain_rows_train_together(
    tiny_model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    function = {"name": "add", "arguments": {"of": [1, 2]}}
    calls = [{"id": "c", "type": "function", "function": function}]
    call = {"role": "assistant", "content": None, "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": "c", "content": "3"}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    talk = {"messages": [TALK[1], call, result, TALK[2]], "tools": json.dumps([tool])}
    plain = {"prompt": TALK[:2], "completion": TALK[2:3]}
    data = read(conversations(tmp_path / "d.jsonl", talk, plain))
    policy = Policy(str(tiny_model), None, tokenizer, None)
    rows = to_dataset(fitting_rows(data.train, policy, 10_000, data.left_out))
    text, other = (trained(row, tokenizer) for row in rows)
    assert [json.loads(text[0].split("\n")[1])["arguments"], text[1:]] == [{"of": [1, 2]}, [" The answer is 3.</s>"]]
    assert other == [" The answer is 3.</s>"]
    assert set(rows.column_names) == {"input_ids", "labels"}


@pytest.mark.slow
def test_trainer_uses_the_labels_unchanged(tiny_model: Path, tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from assay.optimizers.finetuning.base import load_policy

    policy, config = load_policy(str(tiny_model)), SFTSettings(model=str(tiny_model), epochs=1)
    plain = {"prompt": TALK[:2], "completion": TALK[2:3]}
    arguments = SFTConfig(output_dir=str(tmp_path / "plain"), report_to="none", use_cpu=True, bf16=False)
    by_trl = SFTTrainer(
        model=str(tiny_model), args=arguments, train_dataset=Dataset.from_list([plain]),
        processing_class=policy.tokenizer,
    ).train_dataset[0]  # fmt: skip
    own = completion_row(**plain, tools=[], tokenizer=policy.tokenizer)
    assert own == {name: by_trl[name] for name in ("input_ids", "labels")}
    systems = [{"role": "system", "content": f"Be short, in {at} words."} for at in range(8)]
    path = conversations(tmp_path / "d.jsonl", *({"messages": [system, *TALK[1:]]} for system in systems))
    data = read(path, eval_fraction=0.25)
    parts = [fitting_rows(rows, policy, 500, data.left_out) for rows in (data.train, data.held_out)]
    trainer = make_trainer(policy, *parts, config, tmp_path / "out", TrainerCallback())
    for dataset in (trainer.train_dataset, trainer.eval_dataset):
        rows = [trained(row, policy.tokenizer) for row in dataset]
        assert rows == [[" The answer is 3.</s>", " It is.</s>"]] * len(dataset)


# -- loss curves


def monitor_of(*held_out: float, folder: Path | None = None) -> LossMonitor:
    """A monitor that has seen a training loss at each of these evaluations' steps, which are 0, 1, 2, …"""
    log = None if folder is None else TrainingLog(folder)
    monitor = LossMonitor(loss={}, held_out={}, stop=threading.Event(), advance=lambda steps: None, log=log)
    for step, value in enumerate(held_out):
        if step:
            monitor.record({"step": step, "loss": 1 / step})
        monitor.record({"step": step, "eval_loss": value})
    return monitor


def test_a_falling_loss_raises_no_alarm(tmp_path: Path) -> None:
    monitor = monitor_of(2.0, 1.5, 1.6, 1.4, folder=tmp_path)
    assert (monitor.alarms, monitor.diverged) == ({}, False)
    progress = read_training_log(tmp_path)
    assert progress is not None
    assert progress.curves == {"loss/held_out": monitor.held_out, "loss/training": monitor.loss}
    assert progress.step == 3


def test_rows_learned_by_heart_raise_an_alarm_once() -> None:
    monitor = monitor_of(2.0, 1.5, 1.6, 1.7, 1.8)
    assert list(monitor.alarms) == ["overfitting"]
    assert monitor.alarms["overfitting"].startswith("step 3: the held-out loss rose from 1.500 at step 1 to 1.700")


def test_a_loss_that_is_not_finite_ends_training_and_is_in_no_curve() -> None:
    monitor = monitor_of(2.0, 1.5)
    monitor.record({"step": 2, "loss": math.nan})
    assert monitor.diverged
    assert monitor.loss == {1: 1.0}
