"""A step of our GRPO against one of stock TRL: the same model, prompts, rollouts of one call, lengths, and arguments.

    python benchmarks/grpo.py [--model FOLDER] [--steps 4] [--rounds 2] [--prompt 1000] [--batch 12]

`stock` is TRL's GRPOTrainer as it comes, `stock, lean head` has our one change to TRL's settings on CPUs, `assay`
runs a DSPy program on the trainer's own generation, and `assay, llama.cpp` on the engine of embedded models. Every
answer is made as long as may be, so that the first three do the same work; llama.cpp's end where they end. Rounds
take turns; the first step of each is left out. Prints one JSON object with the median seconds a step, ratios to
stock, samples a second, tokens a second where the lengths are held, and on a GPU the most memory that PyTorch held.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import dspy

import assay
from assay.datasets import Task
from assay.evaluation import RecordedProgram, Session
from assay.models import Meter, with_recording
from assay.optimizers.finetuning.base import lean_head, load_policy, lora_of, quiet
from assay.optimizers.finetuning.comparison import EvalTask
from assay.optimizers.finetuning.engines import LlamaPolicy, PolicyEngine, TrainerPolicy
from assay.optimizers.finetuning.policy_gradient import make_trainer
from assay.optimizers.finetuning.settings import PolicySettings
from assay.optimizers.finetuning.sources import Rollouts
from assay.programs.adapters import make_adapter
from assay.traces import Recorder, Store

PLAIN = [f"Write a short letter about the number {at}." for at in range(64)]
FILLER = " The letter is read by one who counts its vowels."  # eleven tokens of SmolLM2 and of Qwen2.5


class Answer(dspy.Signature):  # type: ignore[misc]
    """Do what the question asks for."""

    question: str = dspy.InputField()
    answer: str = dspy.OutputField()


def vowels(text: str) -> float:
    return sum(c in "aeiou" for c in text[:50]) / 50


def vowels_of(task: Any, prediction: dict[str, Any], rollout: Any) -> float:
    return vowels(str(prediction["answer"]))


def ours(
    config: PolicySettings,
    engine: PolicyEngine,
    folder: Path,
    prepare: Callable[[Any], None],
    questions: list[str] = PLAIN,
) -> list[float]:
    """Seconds of each step of our trainer, with recording into a store as in `assay train`."""
    with Store(folder / "a.db") as store:
        recorder, meter = Recorder(store, run_id="r"), Meter()
        rubric = assay.Rubric("vowels", [assay.Criterion(name="vowels", check=vowels_of)])
        lm = with_recording(engine.lm, meter=meter, observers=[recorder.observe])
        session = Session(lm=lm, rubric=rubric, recorder=recorder, meter=meter, program_name="one")
        tasks = [
            Task(id=str(at), inputs={"question": question}, split="train") for at, question in enumerate(questions)
        ]
        session.register(tasks)
        source = Rollouts(
            EvalTask("one", RecordedProgram(dspy.Predict(Answer), session, prompt_format="lean"), session, [], []),
            tasks,
            config,
            engine,
        )
        engine.work_in(folder / "policy")
        policy = load_policy(config.model)
        with quiet(), lean_head():
            trainer = make_trainer(policy, config, source.items, folder, source.collect, _nothing())
            source.begin(trainer, policy)
            prepare(trainer)
            trainer.train()
        engine.close()
    return [line["step_time"] for line in trainer.state.log_history if "step_time" in line]


def stock(
    config: PolicySettings, folder: Path, prepare: Callable[[Any], None], questions: list[str], *, lean: bool
) -> list[float]:
    """The same of TRL's own trainer, with the arguments that ours has."""
    from datasets import Dataset
    from trl import GRPOTrainer

    policy = load_policy(config.model)
    adapter = make_adapter("lean")
    prompts = [adapter.format(Answer, [], {"question": question}) for question in questions]
    with quiet(), lean_head() if lean else nullcontext():
        like = make_trainer(policy, config, len(questions), folder, lambda *_: None, _nothing())
        policy = load_policy(config.model)  # the other one has its adapter already
        trainer = GRPOTrainer(
            model=policy.model,
            args=like.args,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=policy.tokenizer,
            peft_config=lora_of(config.lora_r),
            reward_funcs=_reward,
        )
        prepare(trainer)
        trainer.train()
    return [line["step_time"] for line in trainer.state.log_history if "step_time" in line]


def peak_memory() -> float:
    """GB that PyTorch held at most on the GPU since the last call; 0 without one. vLLM's cache is among them."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    most = torch.cuda.max_memory_allocated() / 1e9
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return round(most, 2)


def _reward(completions: list[Any], **_: Any) -> list[float]:
    return [vowels(completion[0]["content"]) for completion in completions]


def _nothing() -> Any:
    from transformers import TrainerCallback

    return TrainerCallback()


def medians(seconds: dict[str, list[float]], rollouts: int, tokens: int) -> dict[str, dict[str, Any]]:
    """Of each arm: its seconds a step, their median, and its speed."""
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        name: {
            "seconds": [round(value, 3) for value in seconds[name]],
            "median": round(value, 3),
            "to stock": round(value / middle["stock"], 3),
            "samples a second": round(rollouts / value, 2),
            **({} if "llama.cpp" in name else {"tokens a second": round(rollouts * tokens / value, 1)}),
        }
        for name, value in middle.items()
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="A hub model or a folder; by default the embedded one, unpacked.")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--group", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=32, help="Of each answer.")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=0, help="About how many tokens a prompt is made longer by.")
    parser.add_argument("--batch", type=int, default=0, help="Rollouts of a micro batch; by default assay's.")
    parser.add_argument("--vllm", choices=["none", "colocate"], default="none", help="For both, on a GPU.")
    return parser.parse_args()


def main() -> None:
    arguments = parsed()

    def prepare(trainer: Any) -> None:
        """All answers get to the limit."""
        if trainer.use_vllm:
            trainer.vllm_generation.generation_kwargs |= {"min_tokens": arguments.tokens}
        else:
            trainer.generation_config.update(min_new_tokens=arguments.tokens)
            trainer.generation_kwargs |= {"min_new_tokens": arguments.tokens}

    from transformers.utils import logging

    logging.set_verbosity_error()
    questions = [question + FILLER * (arguments.prompt // 11) for question in PLAIN]
    seconds: dict[str, list[float]] = defaultdict(list)
    memory: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model
        if model is None:
            policy, model = load_policy("embedded/smollm2-135m"), f"{scratch}/model"
            policy.model.save_pretrained(model)
            policy.tokenizer.save_pretrained(model)
        config = PolicySettings(
            model=model, steps=arguments.steps, prompts_per_step=arguments.tasks, num_generations=arguments.group,
            beta=0.0, max_completion=arguments.tokens,
            max_length=arguments.prompt + arguments.tokens + 1000, per_device_batch_size=arguments.batch,
            save_every=10_000, vllm=arguments.vllm,
        )  # fmt: skip
        arms: dict[str, Callable[[Path], list[float]]] = {
            "stock": lambda folder: stock(config, folder, prepare, questions, lean=False),
            "stock, lean head": lambda folder: stock(config, folder, prepare, questions, lean=True),
            "assay": lambda folder: ours(
                config, TrainerPolicy(model, max_completion=arguments.tokens), folder, prepare, questions
            ),
        }
        if arguments.model is None:
            like = PolicySettings(**{**vars(config), "model": "embedded/smollm2-135m"})
            engine = {"temperature": 1.0, "max_completion": arguments.tokens, "seed": 0}
            arms["assay, llama.cpp"] = lambda folder: ours(
                like, LlamaPolicy("embedded/smollm2-135m", **engine), folder, lambda _: None, questions
            )
        for turn in range(arguments.rounds):
            for name in list(arms)[:: 1 if turn % 2 == 0 else -1]:
                with tempfile.TemporaryDirectory(dir=scratch) as folder:
                    os.environ["ASSAY_ADAPTERS"] = f"{folder}/adapters"
                    seconds[name] += arms[name](Path(folder))[1:]
                memory[name] = max(memory.get(name, 0.0), peak_memory())
    rollouts = arguments.tasks * arguments.group
    steps = medians(seconds, rollouts, arguments.tokens)
    if any(memory.values()):
        steps = {name: {**values, "peak memory in GB": memory[name]} for name, values in steps.items()}
    print(json.dumps({"rollouts a step": rollouts, "tokens an answer": arguments.tokens, "steps": steps}))


if __name__ == "__main__":
    main()
