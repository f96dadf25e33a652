"""How many of 20 short trainings converge, by the rule of `assay train` and of the figure in `assay loop status`.

    python benchmarks/convergence.py FOLDER [--seeds 5] [--steps 120] [--rate 0.005] [--model embedded/smollm2-135m]

Four algorithms with so many seeds each train a model to begin its answers with certain letters. The model is by default
a Llama of two layers with random weights, which takes seconds. A training counts if it ended by itself and its report
says that it converged (by its `TrainingMonitor`). A training that learns nothing converges by that rule too, so that
the trainings whose last ten steps have a higher mean reward than the first ten (Welch's interval above 0) are counted
too. One line a training, in FOLDER/runs.jsonl too, so that a run can be cut off and called again; the last line has the
shares.
"""

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import dspy
import numpy as np
from scipy import stats

import assay
from assay.cli import Console
from assay.programs import Agent

GOAL = 0.9
ALGORITHMS = ("grpo", "rloo", "reinforce++", "ppo")
LETTERS, FIRST = "aeiou 0123", 10
RUBRIC = "name: letters\ncriteria:\n- {name: letters, weight: 1, check: 'FILE:letters'}\n"


class Answer(Agent):
    """One call."""

    input_names = ("question",)

    def __init__(self, parameters: Any = None, prompt_format: str = "lean") -> None:
        super().__init__(parameters, prompt_format)
        self.answer = dspy.Predict("question -> answer")

    def solve(self, **inputs: Any) -> dspy.Prediction:
        return dspy.Prediction(answer=self.answer(**inputs).answer)


def letters(task: Any, prediction: Any, rollout: Any) -> float:
    """Share of certain letters among the first of the answer."""
    return sum(letter in LETTERS for letter in str(prediction["answer"])[:FIRST]) / FIRST


def tiny_model(folder: Path) -> str:
    """A Llama of two layers with random weights and a tokenizer of bytes; the same at each call."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<unk>", "<s>", "</s>"]
    alphabet = trainers.BpeTrainer(special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["How much is 1 + 2?"], alphabet)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt "
        "%}assistant:{% endif %}"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast), max_position_embeddings=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, initializer_range=0.3,  # with the default one no answer can become likely
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder.absolute())


def trained(model: str, algorithm: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One training in a folder of its own."""
    began = time.perf_counter()
    folder = Path(f"{algorithm.replace('+', 'p')}-{seed}").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.environ["ASSAY_ADAPTERS"] = str(folder / "adapters")
    row: dict[str, Any] = {"algorithm": algorithm, "seed": seed}
    try:
        report = assay.train(
            f"{__file__}:Answer", rubric="letters.yaml", data="tasks.jsonl", name="letters", model=model,
            algorithm=algorithm, seed=seed, steps=arguments.steps, learning_rate=arguments.rate,
            prompts_per_step=2, num_generations=4, max_completion=12, evaluate_every=0, test=False,
            sizes={"val": 2}, store=folder / "assay.db", progress=Console(),
        )  # fmt: skip
    except assay.AssayError as error:
        return {**row, "ended": False, "converged": None, "rose": False, "error": str(error)[:300]}
    rewards = [value for _, value in sorted(report.curves["reward"].items())]
    return {
        **row, "ended": report.stopped is None, "converged": report.converged, "steps": report.steps,
        "first": round(float(np.mean(rewards[:3])), 3), "before": round(float(np.mean(rewards[-20:-10])), 3),
        "last": round(float(np.mean(rewards[-10:])), 3), "rose": rose(rewards),
        "deviation": round(float(np.std(rewards[-10:])), 3),
        "alarms": report.alarms, "seconds": round(time.perf_counter() - began),
    }  # fmt: skip


def rose(rewards: list[float]) -> bool:
    """Whether the mean reward of the last ten steps is above that of the first ten."""
    if len(rewards) < 20 or not np.ptp(rewards):
        return False
    test = stats.ttest_ind(rewards[-10:], rewards[:10], equal_var=False)
    return bool(test.confidence_interval(0.95).low > 0)


def shares(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares of trainings that ended by themselves, and that converged, with exact 95 % intervals."""
    report: dict[str, Any] = {"trainings": len(rows), "goal": GOAL}
    for name, good in (
        ("ended", sum(row["ended"] for row in rows)),
        ("converged", sum(row["ended"] and row["converged"] is True for row in rows)),
        ("rose", sum(row["ended"] and row["rose"] for row in rows)),
    ):
        interval = stats.binomtest(good, len(rows)).proportion_ci(0.95)
        report[name] = {"count": good, "share": good / len(rows), "low": interval.low, "high": interval.high}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rate", type=float, default=5e-3)
    parser.add_argument("--model")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(arguments.folder)
    model = arguments.model or tiny_model(Path("tiny"))
    Path("letters.yaml").write_text(RUBRIC.replace("FILE", __file__))
    tasks = [{"inputs": {"question": f"How much is {number} + 1?"}} for number in range(100)]
    Path("tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    out = Path("runs.jsonl")
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    for seed in range(1, arguments.seeds + 1):  # steps and rate were set with seed 0
        for algorithm in ALGORITHMS:
            if not any((row["algorithm"], row["seed"]) == (algorithm, seed) for row in rows):
                rows.append(trained(model, algorithm, seed, arguments))
                with out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(json.dumps(rows[-1]), flush=True)
    print(json.dumps(shares(rows)))


if __name__ == "__main__":
    main()
