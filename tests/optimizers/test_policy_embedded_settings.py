"""Training with the embedded model: its judges, retention tasks, tokenizers, wrong settings."""

import json
import re
from pathlib import Path

import dspy
import pytest
from embedded_training import DATA, SMALL

import assay
from assay.commands.train import train
from assay.commands.train_sft import check_comparison
from assay.errors import ConfigError, DataError
from assay.models import get_lm
from assay.models.embedded import LlamaBackend
from assay.models.registry import spec
from assay.optimizers.finetuning import TRLProvider
from assay.optimizers.finetuning.base import tokenizer_sha, unpacked_weights
from assay.runs.independence import independent

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
    tasks = [
        {"inputs": {"question": f"What is the number {number} known for?"}, "expected": {}} for number in range(160)
    ]
    Path("numbers.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
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
    for judge in ({}, {"judge_model": model_name}):
        for options in ({"rubric": "nice.yaml"}, {"rubric": "math_qa", "monitor": "nice.yaml"}):
            with pytest.raises(ConfigError, match="would learn to satisfy itself"):
                train("math_qa", data=DATA, name="x", model=model_name, **options, **judge, **SMALL)
        with pytest.raises(ConfigError, match="would learn to satisfy itself"):
            train(
                "math_qa",
                rubric="math_qa",
                retention=["math_qa,nice.yaml,arithmetic:size=60"],
                data=DATA,
                name="x",
                model=model_name,
                **judge,
                **SMALL,
            )
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


def test_retention_task_is_reported_separately(model_name: str) -> None:
    with pytest.raises(ConfigError, match=f"math_qa on {re.escape(DATA)} is named twice"):
        train(
            "math_qa",
            rubric="math_qa",
            retention=[f"math_qa,math_qa,{DATA}"] * 2,
            data=DATA,
            name="x",
            model=model_name,
            **SMALL,
        )
    with pytest.raises(ConfigError, match="temperature would have no effect: temperature is that of rollouts"):
        train(
            "math_qa", rubric="math_qa", data=DATA, name="x", model=model_name, parameters={"temperature": 0.3}, **SMALL
        )


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
        ({"lora_r": 0}, "lora_r=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            lm.reinforce({"name": "x", **settings})
    with pytest.raises(ConfigError, match="temperature 0"):
        lm.copy(temperature=0.0).reinforce({})
