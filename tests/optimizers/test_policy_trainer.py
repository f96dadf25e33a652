"""The policy gradient: that the trainer is TRL's."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from assay.optimizers.finetuning.policy_gradient import task_order
from assay.optimizers.finetuning.rows import Row, Trajectory, ValueMemory, assign_credit
from assay.optimizers.finetuning.settings import PolicySettings


def arguments(folder: Path, **more: Any) -> Any:
    from trl import GRPOConfig

    settings: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "steps_per_generation": 2,
        "num_generations": 4, "max_completion_length": 8, "max_steps": 3, "learning_rate": 1e-2, "report_to": "none",
        "use_cpu": True,
        "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "seed": 3, "lr_scheduler_type": "constant",
        "loss_type": "dapo",
        "scale_rewards": "group", "bf16": False,
    }  # fmt: skip
    return GRPOConfig(**{**settings, **more})


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 20), st.integers(0, 3))
def test_tasks_are_sampled_without_repetition_until_all_were_used(
    tasks: int, spare: int, steps: int, seed: int
) -> None:
    items, config = tasks + spare - 1, PolicySettings(prompts_per_step=tasks, steps=steps, seed=seed)
    order = task_order(items, config)
    assert len(order) == tasks * steps
    assert all(len(set(order[at : at + tasks])) == tasks for at in range(0, len(order), tasks))
    assert all(set(order[at : at + items]) == set(range(items)) for at in range(0, len(order) - items + 1, items))


def logged(model: Path, folder: Path, rows: list[Row], parts: int, **more: Any) -> list[dict[str, float]]:
    """Logs of three steps on these rows, eight rollouts per step in this number of parts."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from assay.optimizers.finetuning.trl_trainer import Batch, TransitionTrainer

    steps = {"gradient_accumulation_steps": parts, "steps_per_generation": parts}
    shares = {"per_device_train_batch_size": 8 // parts, **steps}
    trainer = TransitionTrainer(
        model=AutoModelForCausalLM.from_pretrained(model), args=arguments(folder / str(parts), **shares, **more),
        train_dataset=Dataset.from_list([{"prompt": "", "index": at} for at in range(4)]),
        processing_class=AutoTokenizer.from_pretrained(model), collect=lambda inputs, trainer: Batch(rows),
    )  # fmt: skip
    trainer.train()
    return [line for line in trainer.state.log_history if "entropy" in line]


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_padding_rows_of_a_batch_do_not_change_the_loss(tiny_model: Path, tmp_path: Path, loss_type: str) -> None:
    rows = [
        Row(turn=0, prompt_ids=[5, 6], completion_ids=[7, at], trained=[True, True], advantage=1.0) for at in (8, 9)
    ]
    unsplit, shared = (logged(tiny_model, tmp_path, rows, parts, loss_type=loss_type, beta=0.5) for parts in (1, 8))
    assert unsplit[0]["entropy"] > 1
    assert unsplit[-1]["kl"] > 0
    for many, alone in zip(shared, unsplit, strict=True):
        for name in ("entropy", "kl", "grad_norm"):
            assert many[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-6), name


@pytest.mark.slow
def test_a_mean_over_parts_is_not_reduced_by_padding(tiny_model: Path, tmp_path: Path) -> None:
    rows = [
        Row(turn=0, prompt_ids=[5, 6], completion_ids=[7, 8], trained=[True, True], advantage=1.0) for _ in range(9)
    ]
    unsplit, shared = (
        logged(tiny_model, tmp_path, rows, parts, loss_type="bnpo") for parts in (1, 8)
    )  # parts of two: most likely, some are blank
    assert [line["grad_norm"] for line in shared] == pytest.approx([line["grad_norm"] for line in unsplit], rel=1e-3)


@pytest.mark.slow
def test_the_reference_model_is_the_base(tiny_model: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from assay.optimizers.finetuning.engines import TrainerPolicy

    def logits(of: Any) -> Any:
        with torch.no_grad():
            return of(torch.tensor([[5, 6, 7]])).logits

    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    before = logits(base)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    after, engine = logits(model), TrainerPolicy(str(tiny_model))
    accelerator, tokenizer = SimpleNamespace(unwrap_model=lambda wrapped: wrapped), SimpleNamespace(pad_token_id=0)
    engine.sync(SimpleNamespace(model=model, accelerator=accelerator, _tokenizer=tokenizer, eos_token_ids=[0]))
    with engine.before():
        assert torch.equal(logits(model), before)
        model.merge_adapter()  # as TRL does for vLLM
        assert torch.allclose(logits(model), before)
        model.unmerge_adapter()
    assert torch.allclose(logits(model), after)
    assert not torch.allclose(before, after)


def spread(completions: list[Any], completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
    """A reward that differs between all completions, except those of every third prompt."""
    flat = [at % 3 == 2 for at in index]
    sums = [(sum(n * token for n, token in enumerate(ids, 1)) % 997) / 997 for ids in completion_ids]
    return [0.5 if same else value for same, value in zip(flat, sums, strict=True)]


def stock_trainer(made: list[list[tuple[list[int], list[int], float]]], **options: Any) -> Any:
    """TRL's own trainer; lists the prompts, answers and rewards of each of its batches in `made`."""
    from trl import GRPOTrainer

    class Stock(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            out = super()._generate_and_score_completions(inputs)
            masked = [zip(out[f"{part}_ids"], out[f"{part}_mask"], strict=True) for part in ("prompt", "completion")]
            ids = [[tokens[mask.bool()].tolist() for tokens, mask in rows] for rows in masked]
            made.append(list(zip(*ids, spread([], ids[1], [example["index"] for example in inputs]), strict=True)))
            return out

    return Stock(reward_funcs=spread, **options)


def replayed(made: list[list[tuple[list[int], list[int], float]]], dropped: list[int]) -> Callable[..., Any]:
    """Gives the trainer the batches of another one, in turn; `dropped` gets the number of rows without credit."""
    from assay.optimizers.finetuning.trl_trainer import Batch

    replay = iter(made)

    def collect(inputs: list[dict[str, Any]], trainer: Any) -> Batch:
        batch = []
        for at, (prompt, answer, reward) in enumerate(next(replay)):
            row = Row(turn=0, prompt_ids=prompt, completion_ids=answer, trained=[True] * len(answer))
            batch.append(Trajectory(group=str(at // 4), rollout=str(at), rewards=[reward], rows=[row]))
        rows_with_credit, flat = assign_credit(batch, PolicySettings(), ValueMemory()).apply_to(batch, Counter())
        dropped.append(len(flat))
        return Batch(rows_with_credit, flat)

    return collect


def furthest(model: Any, weights: Mapping[str, Any]) -> float:
    """The largest difference of a trained weight from these."""
    return max(
        (value - weights[name]).abs().max().item() for name, value in model.named_parameters() if value.requires_grad
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "lean"),
    [
        ({}, False),
        ({}, True),
        ({"beta": 0.1}, False),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, False),
        ({"num_iterations": 2}, False),
    ],
    ids=["plain", "lean head", "kl", "cispo", "twice"],
)
def test_on_single_calls_the_trainer_equals_stock_grpo(
    tiny_model: Path, tmp_path: Path, more: dict[str, Any], lean: bool
) -> None:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from assay.optimizers.finetuning.base import lean_head
    from assay.optimizers.finetuning.trl_trainer import TransitionTrainer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rows = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"How much is {at} + 1?"}], "index": at} for at in range(8)]
    )
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    made: list[list[tuple[list[int], list[int], float]]] = []
    # Adam moves weights as far for a gradient that is mere rounding
    more = {"optim": "sgd", "learning_rate": 0.5, **more}

    def options(name: str) -> dict[str, Any]:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        data = {"train_dataset": rows, "processing_class": tokenizer, "peft_config": lora}
        return {"model": model, "args": arguments(tmp_path / name, **more), **data}

    stock = stock_trainer(made, **options("a"))
    stock.train()
    dropped: list[int] = []
    transition_trainer = TransitionTrainer(**options("b"), collect=replayed(made, dropped))
    start = {name: value.clone() for name, value in transition_trainer.model.named_parameters() if value.requires_grad}
    with lean_head() if lean else nullcontext():
        transition_trainer.train()
    moved = furthest(transition_trainer.model, start)
    apart = furthest(transition_trainer.model, dict(stock.model.named_parameters()))
    assert moved > 1e-3
    assert sum(dropped) == 4 * len([at for at in dropped if at])  # whole groups
    assert any(dropped)
    assert apart < 1e-4 * moved, f"{apart} apart after a move of {moved}"


@pytest.mark.tutorial
@pytest.mark.slow
def test_two_processes_train_like_one(tiny_model: Path, tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "two_processes.py")
    results = []
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    launch += ["--master_addr", "127.0.0.1", "--master_port", "0"]
    for number, words in ((1, []), (2, launch)):
        out = tmp_path / f"{number}.json"
        command = [sys.executable, *words, script, str(tiny_model), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        results.append(json.loads(out.read_text()))
    first, two = results
    assert [list(step) for step in first["advantages"]] == [list(step) for step in two["advantages"]]
    for step, other in zip(first["advantages"], two["advantages"], strict=True):
        for name, turns in step.items():
            assert turns == pytest.approx(other[name], abs=1e-12)
    pairs = [(first["weights"][name], two["weights"][name]) for name in first["weights"]]
    apart = max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))
    adapters = [values for name, values in first["weights"].items() if "lora_B" in name]
    moved = max(abs(value) for values in adapters for value in values)  # from 0
    assert moved > 1e-3
    assert apart < 1e-4 * moved, f"{apart} apart after a move of {moved}"
