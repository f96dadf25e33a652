"""The policy gradient: rows, credit, guards, settings."""

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from assay.errors import ConfigError
from assay.optimizers.finetuning.policy_gradient import TrainingMonitor
from assay.optimizers.finetuning.rows import (
    Row,
    Trajectory,
    ValueMemory,
    add_hidden,
    assign_credit,
    trained_tokens,
    trajectory_of,
)
from assay.optimizers.finetuning.settings import ALGORITHMS, PolicySettings
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
    assert credit.zero_variance == 0  # though each group alone has zero variance
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


@pytest.mark.slow
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
    memorized, other = (assign_credit(batch, config, values).advantages for values in (memory, repeated))
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
    ("settings", "field"),
    [
        ({"algorithm": "dpo"}, "algorithm"),
        ({"num_generations": 1}, "num_generations"),
        ({"algorithm": "rloo", "num_generations": 1}, "num_generations"),
        ({"kl_in_reward": True}, "kl_in_reward"),
        ({"algorithm": "reinforce++", "kl_in_reward": True, "beta": 0.0}, "kl_in_reward"),
        ({"algorithm": "reinforce++", "loss": "luspo"}, "loss"),
        ({"value": "head"}, "value"),
        ({"algorithm": "ppo", "value": "critic"}, "value"),
        ({"per_device_batch_size": 5}, "per_device_batch_size"),
        ({"algorithm": "ppo", "returns": "episode"}, "returns"),
        ({"gae_lambda": 0.5}, "gae_lambda"),
        ({"algorithm": "rloo", "scale": False}, "scale"),
        ({"step_weight": 0, "outcome_weight": 0}, ""),
        ({"learning_rate": math.nan}, "learning_rate"),
        ({"temperature": 0.0}, "temperature"),
        ({"vllm": "yes"}, "vllm"),
        ({"loss": "sapo", "epsilon": 0.1, "epsilon_high": 0.1}, "epsilon"),
        ({"loss": "cispo", "epsilon": 0.2}, "epsilon"),
        ({"epsilon_high": 11}, "epsilon_high"),
    ],
)
def test_inconsistent_settings_are_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        PolicySettings(**settings)
    assert refused.value.field == field


GROUPED = ("grpo", "rloo", "reinforce++-turn")


@pytest.mark.parametrize("settings", [{"discount": 0.8}, {"returns": "uniform"}, {"returns": "step"}], ids=str)
def test_the_shorter_of_two_right_rollouts_has_the_higher_advantage(settings: dict[str, Any]) -> None:
    batch = [trajectory("short", "g", 0.0, 1.0), trajectory("long", "g", 0.0, 0.0, 0.0, 1.0)]
    for algorithm in GROUPED:
        credit = assign_credit(batch, PolicySettings(algorithm=algorithm, **settings), ValueMemory())
        assert credit.zero_variance == 0
        assert sum(credit.advantages["short"]) > sum(credit.advantages["long"]), algorithm
        assert max(abs(value) for turns in credit.advantages.values() for value in turns) < 3


@pytest.mark.parametrize(
    "settings",
    [{"discount": 0.0}, {"discount": 0.5}, {"discount": 1.0}, {"returns": "step"}, {"returns": "uniform"}],
    ids=str,
)
def test_a_right_rollout_has_a_small_positive_advantage_for_any_returns(settings: dict[str, Any]) -> None:
    batch = [trajectory("right", "g", *[0.0] * 7, 1.0), trajectory("wrong", "g", *[0.0] * 8)]
    for algorithm in GROUPED:
        config = PolicySettings(algorithm=algorithm, **settings)
        credit = assign_credit(batch, config, ValueMemory())
        assert credit.zero_variance == 0
        assert max(credit.advantages["right"]) > 0 > min(credit.advantages["wrong"]), algorithm
        assert max(abs(value) for turns in credit.advantages.values() for value in turns) < 4
        same = assign_credit([trajectory(name, "g", 0.0, 0.0, 1.0) for name in "ab"], config, ValueMemory())
        assert (same.zero_variance, same.advantages) == (1, {})


def seen(**curves: list[float]) -> TrainingMonitor:
    watch = TrainingMonitor()
    for step in range(max(map(len, curves.values()))):
        watch.update(step, {name: values[step] for name, values in curves.items() if step < len(values)})
    return watch


# -- guards


def test_each_alarm_names_its_remedy_once() -> None:
    watch = seen(
        entropy=[1.0, 1.0, 1.0, 0.1, 0.1, 0.1, 0.1], zero_variance_groups=[1.0] * 7, score=[0.9] * 7, kl=[0.9] * 7
    )
    assert set(watch.alarms) == {"entropy", "zero_variance", "kl"}
    assert "Raise `beta=…`" in watch.alarms["entropy"]
    assert "harder tasks" in watch.alarms["zero_variance"]
    assert watch.update(8, {"entropy": 0.1}) == []
    falling = [0.4, 0.4, 0.4, 0.05, 0.05, 0.05]
    assert "little is left to learn from" in seen(reward_std=falling, score=[0.3] * 6).alarms["deviation"]
    assert not seen(reward_std=falling, score=[0.95] * 6).alarms
    entropy = [1.0, 0.9, 0.8, 0.7, 0.6]
    assert not seen(entropy=entropy, zero_variance_groups=[0.5] * 5, score=[0.3] * 5, kl=[0.01] * 5).alarms
    for score, advice in ((0.0, "too hard"), (0.4, "finer grades"), (1.0, "too easy")):
        assert advice in seen(zero_variance_groups=[1.0] * 3, score=[score] * 3).alarms["zero_variance"]


def test_a_gamed_rubric_and_rewards_of_repeated_calls_raise_an_alarm() -> None:
    up, down, flat = [0.1 * at for at in range(12)], [1.0 - 0.05 * at for at in range(12)], [0.5] * 12
    assert "being gamed" in seen(score=up, monitor=down).alarms["hacking"]
    assert not seen(score=up, monitor=up).alarms
    assert not seen(score=flat, monitor=down).alarms
    assert "earned by making more calls" in seen(reward=up, turns=up, score=flat).alarms["income"]
    assert not seen(reward=up, turns=up, score=up).alarms
    assert not seen(reward=up, turns=flat, score=flat).alarms


def test_convergence_requires_no_difference_and_little_noise() -> None:
    flat = [0.8, 0.82, 0.79, 0.81, 0.8, 0.8, 0.81, 0.79, 0.8, 0.82]
    assert seen(reward=flat).converged is None
    assert seen(reward=flat + flat).converged is True
    assert seen(reward=[0.1 * at for at in range(20)]).converged is False
    assert seen(reward=[0.97, 0.98] * 5 + [0.99, 1.0] * 5).converged is True  # significant, and too small to matter
    assert seen(reward=[0.88, 0.89] * 5 + [0.95, 0.96] * 5).converged is False
    assert seen(reward=[0.0, 1.0] * 10).converged is False  # no difference, but too noisy to tell


# -- the rows that are trained, and tokens forced by a grammar


class Letters:
    """A tokenizer of characters."""

    def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
        return [ord(c) for message in messages for c in f"{message['role']}:{message['content']}\n"]

    def decode(self, ids: list[int]) -> str:
        return "".join("" if token == 0 else chr(token) for token in ids)


def transition(output: str, *, schema: dict[str, Any] | None = None, **more: Any) -> Transition:
    messages = [{"role": "user", "parts": [{"type": "text", "text": "2+2?"}]}]
    request: dict[str, Any] = {"messages": messages, "config": {}}
    if schema is not None:  # as it is stored
        request["config"]["response_format"] = {"type": "json_schema", "name": "outputs", "schema": schema}
    ids = (*map(ord, output), 0)
    call = {"t": 0, "model": "m", "request": request, "output": output, "token_ids": ids}
    return Transition(**{**call, "logprobs": (-0.1,) * len(ids), "constrained": schema is not None, **more})


def schema_of_lines(**fields: Any) -> dict[str, Any]:
    """The schema of a lean prompt, whose grammar forces the names of the lines."""
    return {"x-assay-lines": True, "properties": fields}


ACTION, SURE, END = {"enum": ["add", "answer"]}, {"type": "boolean"}, {"enum": ["x", "xy"]}


@pytest.mark.parametrize(
    ("schema", "text", "trained"),
    [
        (
            schema_of_lines(thought={}, action={}),
            "thought: add them\naction: calculator",
            "·········add them\n········calculator",
        ),
        (
            schema_of_lines(action=ACTION, sure=SURE, unit={"const": "km"}, n={"type": "integer"}, end=END),
            "action: answer\nsure: true\nunit: km\nn: 12\nend: x",
            "·" * 9 + "n" + "·" * 11 + "t" + "·" * 16 + "12\n" + "·" * 6,
        ),
        (
            {"properties": {"action": ACTION, "sure": SURE, "more": {"properties": {"end": END}}}},
            '{"action": "answer", "sure": false, "more": {"end": "xy"}}',
            "·" * 13 + "n" + "·" * 15 + "f" + "·" * 24 + "y" + "·" * 4,
        ),
        (
            {"properties": {"expression": {}, "n": {}}},
            '{"expression": "2 + 2", "n": 12}',
            '················2 + 2"·······12··',
        ),
    ],
    ids=["lines", "choices in lines", "choices in JSON", "JSON"],
)
def test_only_tokens_that_the_grammar_left_open_are_trained(schema: dict[str, Any], text: str, trained: str) -> None:
    assert chosen(transition(text, schema=schema)) == trained


def chosen(call: Transition) -> str:
    pieces = [Letters().decode([token]) for token in call.token_ids or ()]
    return "".join(piece if mine else "·" for piece, mine in zip(pieces, trained_tokens(call, pieces), strict=True))


def test_a_token_of_negligible_probability_is_attributed_to_the_grammar() -> None:
    odds = [-0.1] * 8 + [-15.0] + [-0.1] * 3
    call = transition("action: abc", schema=schema_of_lines(action={}), logprobs=tuple(odds))
    assert chosen(call) == "········" + "·bc"


class Bytes(Letters):
    """A tokenizer of bytes, some of which are halves of letters."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace").replace("\0", "")


def test_multi_token_letters_are_distinguished_from_forced_tokens() -> None:
    text = "city: Ål\nsure: yes"
    ids = (*text.encode(), 0)
    call = transition(text, schema=schema_of_lines(city={}, sure={}), token_ids=ids, logprobs=(-0.1,) * len(ids))
    rollout = Rollout(id="r", group_id="g", score=1.0, transitions=[call])
    row = trajectory_of(rollout, Bytes(), max_length=64, behaviour=True).rows[0]
    forced = [at for at, trained in enumerate(row.trained) if not trained]
    assert bytes(ids[at] for at in forced).decode() == "city: sure: "


def test_invalid_bytes_do_not_hide_forced_tokens() -> None:
    # as the engine wrote it; as the tokenizer does:
    call = transition("thought: so ÏÃ\naction: answer", schema=schema_of_lines(thought={}, action={}))
    pieces = ["thought", ": ", "so", "\ufffd", "\ufffd", "\n", "action", ": ", "answer"]
    call.logprobs = (-0.1,) * len(pieces)
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
