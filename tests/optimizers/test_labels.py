"""Where the loss of the warm-up is: on completions, and in whole conversations on all that the assistant said."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from assay.errors import DataError
from assay.optimizers.finetuning import SFTSettings, read_sft, train_sft
from assay.optimizers.finetuning.base import Policy
from assay.optimizers.finetuning.data import completion_row, conversation_rows
from assay.optimizers.finetuning.sft import fitting_rows, make_trainer, to_dataset

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
    text = [
        {**TALK[1]},
        {"role": "assistant", "content": "<think>1 + 2</think>3."},
        TALK[3],
        {"role": "assistant", "content": "<think>3</think>It is."},
    ]
    rows, labelled = conversation_rows(text, [], tokenizer)
    assert trained(rows, tokenizer) == ["<think>3</think>It is.</s>"]
    assert "1 + 2</think>" not in tokenizer.decode(rows["input_ids"])
    assert trained(labelled, tokenizer) == ["<think>1 + 2</think>3.</s>"]


@pytest.mark.slow
def test_completion_labels_equal_those_of_trl(tokenizer: Any) -> None:
    row = completion_row(TALK[:2], TALK[2:3], [], tokenizer)
    assert trained(row, tokenizer) == [" The answer is 3.</s>"]


def conversations(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_answers_of_weight_0_have_no_loss(tokenizer: Any, tmp_path: Path) -> None:
    def weighted(*weights: int) -> dict[str, Any]:
        return {
            "messages": [{**message, "weight": weight} for message, weight in zip(TALK, (0, 0, *weights), strict=True)]
        }

    path = conversations(tmp_path / "d.jsonl", weighted(0, 0, 1), weighted(1, 0, 0), weighted(0, 0, 0))
    data = read_sft(path, min_quality=0.8, eval_fraction=0.0, seed=0)
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
        read_sft(path, min_quality=0.8, eval_fraction=0.0, seed=0)


@pytest.mark.slow
def test_conversation_is_excluded_if_the_template_hides_an_answer(
    tiny_model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ m['content'] }}", "{{ '' if 'answer' in m['content'] else m['content'] }}"
    )
    data = read_sft(conversations(tmp_path / "d.jsonl", {"messages": TALK}), min_quality=0.8, eval_fraction=0.0, seed=0)
    assert fitting_rows(data.train, Policy(str(tiny_model), None, tokenizer, None), 1000, data.left_out) == []
    assert data.left_out == Counter({"that cannot be learned from: the chat template leaves out the answer": 1})


def test_conversations_with_tools_and_plain_rows_train_together(
    tiny_model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": {"of": [1, 2]}}}],
    }
    result = {"role": "tool", "tool_call_id": "c", "content": "3"}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    talk = {"messages": [TALK[1], call, result, TALK[2]], "tools": json.dumps([tool])}
    plain = {"prompt": TALK[:2], "completion": TALK[2:3]}
    data = read_sft(conversations(tmp_path / "d.jsonl", talk, plain), min_quality=0.8, eval_fraction=0.0, seed=0)
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

    policy, config, nothing = (
        load_policy(str(tiny_model)),
        SFTSettings(model=str(tiny_model), epochs=1),
        TrainerCallback(),
    )
    plain = {"prompt": TALK[:2], "completion": TALK[2:3]}
    arguments = SFTConfig(output_dir=str(tmp_path / "plain"), report_to="none", use_cpu=True, bf16=False)
    by_trl = SFTTrainer(
        model=str(tiny_model), args=arguments, train_dataset=Dataset.from_list([plain]),
        processing_class=policy.tokenizer,
    ).train_dataset[0]  # fmt: skip
    assert completion_row(**plain, tools=[], tokenizer=policy.tokenizer) == {
        name: by_trl[name] for name in ("input_ids", "labels")
    }
    path = conversations(
        tmp_path / "d.jsonl",
        *({"messages": [{"role": "system", "content": f"Be short, in {at} words."}, *TALK[1:]]} for at in range(8)),
    )
    data = read_sft(path, min_quality=0.8, eval_fraction=0.25, seed=0)
    parts = [fitting_rows(rows, policy, 500, data.left_out) for rows in (data.train, data.held_out)]
    trainer = make_trainer(policy, *parts, config, tmp_path / "out", nothing)
    for dataset in (trainer.train_dataset, trainer.eval_dataset):
        assert [trained(row, policy.tokenizer) for row in dataset] == [[" The answer is 3.</s>", " It is.</s>"]] * len(
            dataset
        )
    report = train_sft(
        path,
        "talks",
        SFTSettings(model=str(tiny_model), epochs=3, batch=2, lora_r=2, eval_fraction=0.25, learning_rate=1e-2),
    )
    assert (report.rows, report.held_out_rows, dict(report.left_out)) == (6, 2, {})
    assert report.held_out_loss[max(report.held_out_loss)] < report.held_out_loss[0]
