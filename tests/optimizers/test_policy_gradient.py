"""The policy gradient: rows, credit, guards, and that the trainer is TRL's."""

import dataclasses
import json
import math
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.errors import ConfigError
from assay.optimizers.finetuning.advantages import ValueMemory, add_hidden, assign_credit
from assay.optimizers.finetuning.monitoring import TrainingMonitor
from assay.optimizers.finetuning.rows import Row, Trajectory, trained_tokens, trajectory_of
from assay.optimizers.finetuning.settings import ALGORITHMS, PolicySettings, SFTSettings
from assay.optimizers.finetuning.trl_settings import task_order
from assay.traces import Rollout, Transition


def trajectory(name: str, group: str, *rewards: float) -> Trajectory:
    features = [{"turn": float(turn), "tools": float(turn)} for turn in range(len(rewards))]
    rows = [Row(turn=turn, prompt_ids=[1], completion_ids=[2], trained=[True]) for turn in range(len(rewards))]
    return Trajectory(group=group, rollout=name, rewards=list(rewards), features=features, rows=rows)


# -- credit


def test_grpo_on_single_calls_equals_the_formula_of_trl() -> None:
    batch = [
        trajectory(f"r{at}", f"g{at // 4}", reward) for at, reward in enumerate([0, 1, 1, 0.5, 0.2, 0.2, 0.2, 0.9])
    ]
    advantages = assign_credit(batch, PolicySettings(), ValueMemory()).advantages
    first = [0, 1, 1, 0.5]
    mean, deviation = 0.625, math.sqrt(sum((r - 0.625) ** 2 for r in first) / 3)  # of the sample, as torch.std
    assert [advantages[f"r{at}"][0] for at in range(4)] == pytest.approx(
        [(r - mean) / (deviation + 1e-4) for r in first]
    )


def test_rloo_uses_the_unscaled_mean_of_the_other_rollouts() -> None:
    batch = [trajectory(f"r{at}", "g", reward) for at, reward in enumerate([0.0, 1.0, 0.5])]
    advantages = assign_credit(batch, PolicySettings(algorithm="rloo"), ValueMemory()).advantages
    assert [advantages[f"r{at}"][0] for at in range(3)] == pytest.approx([-0.75, 0.75, 0.0])


def test_reinforce_uses_the_batch_statistics() -> None:
    batch = [trajectory("a", "g", 0.0), trajectory("b", "g", 0.0), trajectory("c", "h", 1.0), trajectory("d", "h", 1.0)]
    credit = assign_credit(batch, PolicySettings(algorithm="reinforce++-turn"), ValueMemory())
    deviation = math.sqrt(1 / 3)
    assert credit.advantages["a"] == pytest.approx([-0.5 / (deviation + 1e-4)])
    assert credit.advantages["d"] == pytest.approx([0.5 / (deviation + 1e-4)])
    assert credit.zero_variance == 0  # though neither group has spread of its own
    assert assign_credit(batch, PolicySettings(), ValueMemory()).zero_variance == 2


@pytest.mark.slow
def test_reinforce_normalises_over_the_tokens_of_the_batch() -> None:
    """Three calls of 1, 3 and 2 trained tokens with returns 1, 0, 0.5.

    Mean (1 + 0 + 2 * 0.5) / 6 = 1/3 over the six tokens, variance (4/9 + 3 * 1/9 + 2 * 1/36) / 6 = 5/36.
    """
    from assay.optimizers.finetuning.trl_trainer import normalised, token_returns

    rows = [
        Row(turn=0, prompt_ids=[1], completion_ids=[2] * n, advantage=a, rollout=str(n))
        for n, a in ((1, 1.0), (3, 0.0), (2, 0.5))
    ]
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0]])
    earned = token_returns(rows, torch.zeros(3, 3), 0.0)
    result = normalised(earned, mask, lambda sums: sums)
    sigma = math.sqrt(5 / 36 + 1e-8)
    assert result[0].tolist() == pytest.approx([(2 / 3) / sigma, 0, 0])
    assert result[1].tolist() == pytest.approx([(-1 / 3) / sigma] * 3)
    assert result[2].tolist() == pytest.approx([(1 / 6) / sigma] * 2 + [0])
    same = token_returns(
        [Row(turn=0, prompt_ids=[1], completion_ids=[2], advantage=0.7) for _ in range(3)], torch.zeros(3, 1), 0.0
    )
    assert normalised(same, torch.ones(3, 1), lambda sums: sums).tolist() == [[0.0]] * 3


def test_kl_in_the_reward_counts_for_every_token_before_it() -> None:
    """KL 0.1, 0.2 in the first call and 0.4 in the second one of rollout a, weight 0.5.

    1 - 0.5 * 0.7, 1 - 0.5 * 0.6; then 1 - 0.5 * 0.4.
    """
    from assay.optimizers.finetuning.trl_trainer import token_returns

    rows = [
        Row(turn=turn, prompt_ids=[1], completion_ids=[2], advantage=1.0, rollout=name)
        for name, turn in (("a", 0), ("a", 1), ("b", 1))
    ]
    kl = torch.tensor([[0.1, 0.2], [0.4, 0.0], [9.0, 0.0]])
    returns = token_returns(rows, kl, 0.5)
    assert returns[0].tolist() == pytest.approx([0.65, 0.7])
    assert returns[1].tolist() == pytest.approx([0.8, 1.0])


def test_a_value_head_explains_variance_that_features_do_not() -> None:
    """The hidden state tells which tasks are hard; the features are alike for all."""
    rng = np.random.default_rng(0)
    batch = [trajectory(f"r{at}", f"g{at // 4}", 0.0, float(at // 4 % 2)) for at in range(96)]
    hidden = {
        id(row): rng.normal(size=32) * 0.1 + trajectory.rewards[-1] for trajectory in batch for row in trajectory.rows
    }
    plain = assign_credit(batch, PolicySettings(algorithm="ppo"), ValueMemory()).explained
    add_hidden(batch, lambda rows: [hidden[id(row)].tolist() for row in rows])
    head = assign_credit(batch, PolicySettings(algorithm="ppo", value="head"), ValueMemory()).explained
    assert plain < 0.1
    assert head > 0.8


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_identical_rollouts_have_zero_advantage(algorithm: str) -> None:
    batch = [trajectory(f"r{at}", "g", 0.15, 0.15, 1.0) for at in range(4)]
    credit = assign_credit(batch, PolicySettings(algorithm=algorithm), ValueMemory())
    assert credit.advantages == {}
    assert credit.zero_variance == 1
    excluded = Counter[str]()
    assert credit.apply_to(batch, excluded) == ([], [row for trajectory in batch for row in trajectory.rows])
    assert excluded["rollouts of zero-variance groups"] == 4


def test_a_ppo_value_is_fitted_on_other_groups_and_survives_a_reload() -> None:
    memory, config = ValueMemory(), PolicySettings(algorithm="ppo")
    for at in range(4):
        assign_credit([trajectory(f"{at}{n}", f"g{n // 2}", 0.1, 0.0, n % 2) for n in range(4)], config, memory)
    repeated = ValueMemory()
    repeated.load(json.loads(json.dumps(memory.to_json())))
    batch = [trajectory(f"x{n}", f"h{n // 2}", 0.1, 0.0, n % 2) for n in range(4)]
    memorized, other = (
        assign_credit(batch, config, memory).advantages,
        assign_credit(batch, config, repeated).advantages,
    )
    assert memorized == other
    assert memorized["x1"][2] > 0 > memorized["x0"][2]


@given(
    st.lists(st.lists(st.floats(-1, 1), min_size=1, max_size=5), min_size=2, max_size=8), st.sampled_from(ALGORITHMS)
)
def test_every_call_has_one_finite_advantage(rewards: list[list[float]], algorithm: str) -> None:
    batch = [trajectory(f"r{at}", f"g{at % 2}", *turns) for at, turns in enumerate(rewards)]
    for member in batch:
        turns = assign_credit(batch, PolicySettings(algorithm=algorithm), ValueMemory()).advantages.get(member.rollout)
        assert turns is None or (len(turns) == len(member.rewards) and all(map(math.isfinite, turns)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "dpo"}, "algorithm='dpo' must be one of grpo"),
        ({"num_generations": 1}, "num_generations=1 must be at least 2"),
        ({"algorithm": "rloo", "num_generations": 1}, "num_generations=1 must be at least 2"),
        ({"kl_in_reward": True}, "needs algorithm='reinforce\\+\\+'"),
        ({"algorithm": "reinforce++", "kl_in_reward": True, "beta": 0.0}, "and beta > 0"),
        ({"algorithm": "reinforce++", "loss": "luspo"}, "one advantage a call"),
        ({"value": "head"}, "only ppo has a value"),
        ({"algorithm": "ppo", "value": "critic"}, "value='critic' must be one of features, head"),
        ({"per_device_batch_size": 5}, "per_device_batch_size=5 must divide the 24 rollouts"),
        ({"algorithm": "ppo", "returns": "episode"}, "would have no effect: ppo"),
        ({"gae_lambda": 0.5}, "would have no effect on grpo"),
        ({"step_weight": 0, "outcome_weight": 0}, "nothing would be rewarded"),
        ({"learning_rate": math.nan}, "learning_rate=nan must be a finite number above 0"),
        ({"temperature": 0.0}, "temperature=0.0 must be between 0.1 and 2"),
        ({"vllm": "yes"}, "vllm='yes' must be one of"),
        (
            {"loss": "sapo", "epsilon": 0.1, "epsilon_high": 0.1},
            "epsilon and epsilon_high would have no effect: the loss sapo",
        ),
        ({"loss": "cispo", "epsilon": 0.2}, "epsilon would have no effect: the loss cispo"),
        ({"epsilon_high": 11}, "epsilon_high=11 must be between 0 and 10"),
    ],
)
def test_inconsistent_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PolicySettings(**settings)


def test_each_loss_has_the_clip_of_its_paper() -> None:
    assert [PolicySettings(loss=loss).clip for loss in ("dapo", "cispo")] == [(0.2, 0.28), (0.2, 5.0)]
    assert PolicySettings(loss="cispo", epsilon_high=3.0).clip[1] == 3.0


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "reinforce++-turn"])
@pytest.mark.parametrize(
    "settings", [{"discount": 0.8}, {"returns": "uniform"}, {"returns": "step"}], ids=["discount", "uniform", "step"]
)
def test_of_two_right_answers_the_shorter_rollout_has_the_higher_advantage(
    algorithm: str, settings: dict[str, Any]
) -> None:
    batch = [trajectory("short", "g", 0.0, 1.0), trajectory("long", "g", 0.0, 0.0, 0.0, 1.0)]
    credit = assign_credit(batch, PolicySettings(algorithm=algorithm, **settings), ValueMemory())
    assert credit.zero_variance == 0
    assert sum(credit.advantages["short"]) > sum(credit.advantages["long"])
    assert max(abs(value) for turns in credit.advantages.values() for value in turns) < 3


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "reinforce++-turn"])
@pytest.mark.parametrize(
    "settings", [{"discount": 0.0}, {"discount": 0.5}, {"discount": 1.0}, {"returns": "step"}, {"returns": "uniform"}]
)
def test_a_right_rollout_has_a_small_positive_advantage_for_any_returns(
    algorithm: str, settings: dict[str, Any]
) -> None:
    config = PolicySettings(algorithm=algorithm, **settings)
    credit = assign_credit(
        [trajectory("right", "g", *[0.0] * 7, 1.0), trajectory("wrong", "g", *[0.0] * 8)], config, ValueMemory()
    )
    assert credit.zero_variance == 0
    assert max(credit.advantages["right"]) > 0 > min(credit.advantages["wrong"])
    assert max(abs(value) for turns in credit.advantages.values() for value in turns) < 4
    same = assign_credit([trajectory(name, "g", 0.0, 0.0, 1.0) for name in "ab"], config, ValueMemory())
    assert (same.zero_variance, same.advantages) == (1, {})


def test_rollouts_are_divided_without_splitting_them() -> None:
    assert PolicySettings().shared_out(1) == (2, 12)
    assert PolicySettings().shared_out(8) == (1, 3)
    assert PolicySettings(prompts_per_step=3, num_generations=3).shared_out(1) == (1, 9)
    with pytest.raises(
        ConfigError,
        match=r"per_device_batch_size=1 must divide the 24 rollouts of a step .*, shared out to 7 processes",
    ):
        PolicySettings().shared_out(7)


def test_flags_have_the_defaults_of_the_settings() -> None:
    from assay.cli.train import command

    for name, config in [("sft", SFTSettings), *((algorithm, PolicySettings) for algorithm in ALGORITHMS)]:
        known = {item.name: item.default for item in dataclasses.fields(config)}
        flags = {option.name: option.default for option in command.commands[name].params if option.name in known}
        assert len(flags) > 9
        assert flags == {flag: known[flag] for flag in flags}, name


# -- rows


class Letters:
    """A tokenizer of characters."""

    def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
        return [ord(c) for message in messages for c in f"{message['role']}:{message['content']}\n"]

    def decode(self, ids: list[int]) -> str:
        return "".join("" if token == 0 else chr(token) for token in ids)


def transition(output: str, *, schema: dict[str, Any] | None = None, **more: Any) -> Transition:
    request: dict[str, Any] = {
        "messages": [{"role": "user", "parts": [{"type": "text", "text": "2+2?"}]}],
        "config": {},
    }
    if schema is not None:
        request["config"]["response_format"] = {
            "type": "json_schema",
            "name": "outputs",
            "schema": schema,
        }  # as it is stored
    ids = (*map(ord, output), 0)
    defaults = {
        "t": 0,
        "model": "m",
        "request": request,
        "output": output,
        "token_ids": ids,
        "logprobs": tuple(-0.1 for _ in ids),
    }
    return Transition(**{**defaults, "constrained": schema is not None, **more})


def chosen(call: Transition) -> str:
    pieces = [Letters().decode([token]) for token in call.token_ids or ()]
    return "".join(piece if mine else "·" for piece, mine in zip(pieces, trained_tokens(call, pieces), strict=True))


def test_tokens_forced_by_a_line_grammar_are_not_trained() -> None:
    schema = {"x-assay-lines": True, "properties": {"thought": {}, "action": {}}}
    assert (
        chosen(transition("thought: add them\naction: calculator", schema=schema))
        == "·········add them\n········calculator"
    )


def test_of_grammar_choices_the_deciding_tokens_are_trained() -> None:
    fields = {
        "action": {"enum": ["add", "answer"]},
        "sure": {"type": "boolean"},
        "unit": {"const": "km"},
        "n": {"type": "integer"},
        "end": {"enum": ["x", "xy"]},
    }
    text = "action: answer\nsure: true\nunit: km\nn: 12\nend: x"
    schema = {"x-assay-lines": True, "properties": fields}
    assert chosen(transition(text, schema=schema)) == "·" * 9 + "n" + "·" * 11 + "t" + "·" * 16 + "12\n" + "·" * 6
    schema = {
        "properties": {
            "action": {"enum": ["add", "answer"]},
            "sure": {"type": "boolean"},
            "more": {"properties": {"end": {"enum": ["x", "xy"]}}},
        }
    }
    text = '{"action": "answer", "sure": false, "more": {"end": "xy"}}'
    assert chosen(transition(text, schema=schema)) == "·" * 13 + "n" + "·" * 15 + "f" + "·" * 24 + "y" + "·" * 4


def test_tokens_forced_by_a_json_grammar_are_not_trained() -> None:
    schema = {"properties": {"expression": {}, "n": {}}}
    assert (
        chosen(transition('{"expression": "2 + 2", "n": 12}', schema=schema))
        == '················2 + 2"·······12··'[:33]
    )


def test_a_token_of_negligible_probability_is_attributed_to_the_grammar() -> None:
    schema = {"x-assay-lines": True, "properties": {"action": {}}}
    odds = [-0.1] * 8 + [-15.0] + [-0.1] * 3
    assert chosen(transition("action: abc", schema=schema, logprobs=tuple(odds))) == "········" + "·bc"


class Bytes(Letters):
    """A tokenizer of bytes, some of which are halves of letters."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace").replace("\0", "")


def test_multi_token_letters_are_distinguished_from_forced_tokens() -> None:
    schema = {"x-assay-lines": True, "properties": {"city": {}, "sure": {}}}
    text = "city: Ål\nsure: yes"
    ids = (*text.encode(), 0)
    call = transition(text, schema=schema, token_ids=ids, logprobs=tuple(-0.1 for _ in ids))
    rollout = Rollout(id="r", group_id="g", score=1.0, transitions=[call])
    row = trajectory_of(rollout, Bytes(), max_length=64, behaviour=True).rows[0]
    forced = [at for at, trained in enumerate(row.trained) if not trained]
    assert bytes(ids[at] for at in forced).decode() == "city: sure: "


def test_invalid_bytes_do_not_hide_forced_tokens() -> None:
    schema = {"x-assay-lines": True, "properties": {"thought": {}, "action": {}}}
    call = transition("thought: so ÏÃ\naction: answer", schema=schema)  # as the engine wrote it; as the tokenizer does:
    pieces = ["thought", ": ", "so", "\ufffd", "\ufffd", "\n", "action", ": ", "answer"]
    call.logprobs = tuple(-0.1 for _ in pieces)
    assert trained_tokens(call, pieces) == [False, False, True, True, True, True, False, False, True]


def test_rows_contain_the_sampled_tokens_and_untrainable_calls_are_counted() -> None:
    calls = [
        transition("4"), transition("4", cached=True), transition("", error="ServerError"),
        transition("4", token_ids=None),
        transition("4", prompt_tokens=3), transition("4" * 90), transition("4", logprobs=(math.nan, 0.0)),
        transition("4", model="judge"),
    ]  # fmt: skip
    for at, call in enumerate(calls):
        call.t = at
    rollout, excluded = Rollout(id="r", group_id="g", score=1.0, transitions=calls), Counter[str]()
    trajectory = trajectory_of(
        rollout, Letters(), is_policy=lambda call: call.model == "m", max_length=64, behaviour=True, left_out=excluded
    )
    assert [(row.turn, row.completion_ids, row.logprobs) for row in trajectory.rows] == [(0, [52, 0], [-0.1, -0.1])]
    assert trajectory.rewards == [0.0] * 7 + [1.0]
    assert sum(excluded.values()) == 7
    assert len(excluded) == 7
    assert trajectory_of(rollout, Letters(), max_length=64, behaviour=False).rows[0].logprobs is None


# -- guards


def seen(**curves: list[float]) -> TrainingMonitor:
    watch = TrainingMonitor()
    for step in range(max(map(len, curves.values()))):
        watch.update(step, {name: values[step] for name, values in curves.items() if step < len(values)})
    return watch


def test_each_alarm_names_its_remedy_once() -> None:
    watch = seen(
        entropy=[1.0, 1.0, 1.0, 0.1, 0.1, 0.1, 0.1], zero_variance_groups=[1.0] * 7, score=[0.9] * 7, kl=[0.9] * 7
    )
    assert set(watch.alarms) == {"entropy", "zero_variance", "kl"}
    assert "Raise beta=…" in watch.alarms["entropy"]
    assert "harder tasks" in watch.alarms["zero_variance"]
    assert watch.update(8, {"entropy": 0.1}) == []
    assert (
        "little is left to learn from"
        in seen(reward_std=[0.4, 0.4, 0.4, 0.05, 0.05, 0.05], score=[0.3] * 6).alarms["deviation"]
    )
    assert not seen(reward_std=[0.4, 0.4, 0.4, 0.05, 0.05, 0.05], score=[0.95] * 6).alarms
    assert not seen(
        entropy=[1.0, 0.9, 0.8, 0.7, 0.6], zero_variance_groups=[0.5] * 5, score=[0.3] * 5, kl=[0.01] * 5
    ).alarms


def test_a_gamed_rubric_raises_an_alarm_by_the_monitor_rubric() -> None:
    up, down = [0.1 * at for at in range(12)], [1.0 - 0.05 * at for at in range(12)]
    assert "being gamed" in seen(score=up, monitor=down).alarms["hacking"]
    assert not seen(score=up, monitor=up).alarms
    assert not seen(score=[0.5] * 12, monitor=down).alarms


def test_step_rewards_earned_by_repeated_calls_are_reported() -> None:
    up, flat = [0.1 * at for at in range(12)], [0.5] * 12
    assert "earned by making more calls" in seen(reward=up, turns=up, score=flat).alarms["income"]
    assert not seen(reward=up, turns=up, score=up).alarms
    assert not seen(reward=up, turns=flat, score=flat).alarms


def test_convergence_requires_no_difference_and_little_noise() -> None:
    flat = [0.8, 0.82, 0.79, 0.81, 0.8, 0.8, 0.81, 0.79, 0.8, 0.82]
    assert seen(reward=flat).converged is None
    assert seen(reward=flat + flat).converged is True
    assert seen(reward=[0.1 * at for at in range(20)]).converged is False
    assert seen(reward=[0.0, 1.0] * 10).converged is False  # no difference, but too noisy to tell


# -- the trainer


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
    """What three steps on these rows tell, eight rollouts a step in so many parts."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from assay.optimizers.finetuning.trl_trainer import Batch, TransitionTrainer

    shares = {
        "per_device_train_batch_size": 8 // parts,
        "gradient_accumulation_steps": parts,
        "steps_per_generation": parts,
    }
    trainer = TransitionTrainer(
        model=AutoModelForCausalLM.from_pretrained(model), args=arguments(folder / str(parts), **shares, **more),
        train_dataset=Dataset.from_list([{"prompt": "", "index": at} for at in range(4)]),
        processing_class=AutoTokenizer.from_pretrained(model), collect=lambda inputs, trainer: Batch(rows),
    )  # fmt: skip
    trainer.train()
    return [line for line in trainer.state.log_history if "entropy" in line]


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo"])
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


@pytest.mark.parametrize("vllm", [True, False])
def test_every_process_sends_vllm_the_same_number_of_requests(monkeypatch: pytest.MonkeyPatch, vllm: bool) -> None:
    import types

    from assay.optimizers.finetuning import engines
    from assay.optimizers.finetuning import trl_trainer as trainer

    counts: list[int] = []

    class Asking:
        class _tokenizer:
            eos_token_id = pad_token_id = 0

            @staticmethod
            def apply_chat_template(messages: Any, **_: Any) -> list[int]:
                return [len(messages)]

            @staticmethod
            def decode(ids: list[int], **_: Any) -> str:
                return "4"

        use_vllm = vllm

        def _generate_single_turn(self, prompts: list[list[int]], *_: Any) -> Any:
            counts.append(len(prompts))
            return [[7, 0]] * len(prompts), None

    def with_second_process(items: list[Any]) -> list[Any]:
        """With a process that has five questions while this one has any."""
        return [*items, True] if isinstance(items[0], bool) else [*items, 5 if items[0] else 0]

    monkeypatch.setattr(trainer, "over_ranks", with_second_process)
    engine = engines.TrainerPolicy("tiny", max_completion=4)
    engine.sync(Asking())
    monkeypatch.setattr(
        engines,
        "calls_of",
        lambda runs, session: [lambda: engine.lm(messages=[{"role": "user", "content": "2+2?"}])] * 2,
    )
    program = types.SimpleNamespace(program=None)
    played = engine.play([(program, None)] * 2, types.SimpleNamespace())  # type: ignore[arg-type, list-item]
    assert len(played) == 2
    assert counts == [5 if vllm else 2]


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
    engine.sync(
        SimpleNamespace(model=model, accelerator=SimpleNamespace(unwrap_model=lambda wrapped: wrapped), _tokenizer=None)
    )
    with engine.before():
        assert torch.equal(logits(model), before)
        model.merge_adapter()  # as TRL does for vLLM
        assert torch.allclose(logits(model), before)
        model.unmerge_adapter()
    assert torch.allclose(logits(model), after)
    assert not torch.allclose(before, after)


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
    from trl import GRPOTrainer

    from assay.optimizers.finetuning.base import lean_head
    from assay.optimizers.finetuning.trl_trainer import Batch, TransitionTrainer

    def spread(completions: list[Any], completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        """A reward that no two completions share, but for those of every third prompt."""
        flat = [at % 3 == 2 for at in index]
        sums = [(sum(n * token for n, token in enumerate(ids, 1)) % 997) / 997 for ids in completion_ids]
        return [0.5 if same else value for same, value in zip(flat, sums, strict=True)]

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rows = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"How much is {at} + 1?"}], "index": at} for at in range(8)]
    )
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    made: list[list[tuple[list[int], list[int], float]]] = []
    more = {
        "optim": "sgd",
        "learning_rate": 0.5,
        **more,
    }  # Adam moves weights as far for a gradient that is mere rounding

    class Stock(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            out = super()._generate_and_score_completions(inputs)
            ids = [
                [
                    tokens[mask.bool()].tolist()
                    for tokens, mask in zip(out[f"{part}_ids"], out[f"{part}_mask"], strict=True)
                ]
                for part in ("prompt", "completion")
            ]
            made.append(list(zip(*ids, spread([], ids[1], [example["index"] for example in inputs]), strict=True)))
            return out

    def model() -> Any:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    stock = Stock(
        model=model(),
        args=arguments(tmp_path / "a", **more),
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=lora,
        reward_funcs=spread,
    )
    stock.train()
    replay = iter(made)

    def collect(inputs: list[dict[str, Any]], trainer: Any) -> Batch:
        batch = [
            Trajectory(
                group=str(at // 4),
                rollout=str(at),
                rewards=[reward],
                rows=[Row(turn=0, prompt_ids=p, completion_ids=c, trained=[True] * len(c))],
            )
            for at, (p, c, reward) in enumerate(next(replay))
        ]
        rows_with_credit, flat = assign_credit(batch, PolicySettings(), ValueMemory()).apply_to(batch, Counter())
        dropped.append(len(flat))
        return Batch(rows_with_credit, flat)

    dropped: list[int] = []
    transition_trainer = TransitionTrainer(
        model=model(),
        args=arguments(tmp_path / "b", **more),
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=lora,
        collect=collect,
    )
    start = {name: value.clone() for name, value in transition_trainer.model.named_parameters() if value.requires_grad}
    with lean_head() if lean else nullcontext():
        transition_trainer.train()
    reference = dict(stock.model.named_parameters())
    moved = max(
        (value - start[name]).abs().max().item()
        for name, value in transition_trainer.model.named_parameters()
        if value.requires_grad
    )
    apart = max(
        (value - reference[name]).abs().max().item()
        for name, value in transition_trainer.model.named_parameters()
        if value.requires_grad
    )
    assert moved > 1e-3
    assert sum(dropped) == 4 * len([at for at in dropped if at])  # whole groups
    assert any(dropped)
    assert apart < 1e-4 * moved, f"{apart} apart after a move of {moved}"


@pytest.mark.slow
def test_two_processes_train_like_one(tiny_model: Path, tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "two_processes.py")
    results = []
    launch = [
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_addr",
        "127.0.0.1",
        "--master_port",
        "0",
        "--standalone",
    ]
    for number, words in ((1, []), (2, launch)):
        out = tmp_path / f"{number}.json"
        done = subprocess.run(
            [sys.executable, *words, script, str(tiny_model), str(out)],
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        results.append(json.loads(out.read_text()))
    first, two = results
    assert [list(step) for step in first["advantages"]] == [list(step) for step in two["advantages"]]
    for step, other in zip(first["advantages"], two["advantages"], strict=True):
        for name, turns in step.items():
            assert turns == pytest.approx(other[name], abs=1e-12)
    apart = max(
        abs(a - b)
        for name in first["weights"]
        for a, b in zip(first["weights"][name], two["weights"][name], strict=True)
    )
    moved = max(
        abs(value) for name, values in first["weights"].items() if "lora_B" in name for value in values
    )  # from 0
    assert moved > 1e-3
    assert apart < 1e-4 * moved, f"{apart} apart after a move of {moved}"
