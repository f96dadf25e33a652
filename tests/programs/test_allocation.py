"""Dynamic allocation of thinking: probe, early exit, adaptive sampling, forced answer."""

import enum
import random
from collections import Counter
from typing import Any

import dspy
import pytest
from hypothesis import given, strategies as st

from assay.errors import ConfigError, LoopStopped
from assay.models import Call, ResponseCache, get_lm
from assay.programs import Classify, MathQA, ThinkingPolicy, program_state, restore_program
from assay.programs.thinking import AUTO, Round, answer_key, majority_is_sure, margin_of, think
from assay.testing.fakes import scripted_lm

LONG = "x" * 400


def rounds(choices: list[str], margins: list[float | None] | None = None, thought: str = "") -> Any:
    """A model that chooses these in turn; keeps the limits and the thoughts that it was asked with."""
    asked: list[tuple[int, str]] = []

    def ask(tokens: int, thoughts: str) -> Round:
        at = len(asked)
        asked.append((tokens, thoughts))
        margin = margins[at] if margins else None
        return Round(choices[at], margin, (thought or f"{at}{LONG}") if tokens else "")

    return ask, asked


def test_without_a_policy_a_step_thinks_once() -> None:
    ask, asked = rounds(["a"])
    thought = think(ThinkingPolicy(), 64, ask)
    assert (thought.last.choice, thought.why, asked) == ("a", "limit", [(64, "")])


def test_an_agent_does_not_think_if_the_probe_is_clear() -> None:
    ask, asked = rounds(["a"], [0.7])
    assert think(ThinkingPolicy(probe_margin=0.6), 64, ask).why == "probe"
    assert asked == [(0, "")]


@pytest.mark.parametrize("margin", [0.5, None])  # close, or unknown because the engine has no probabilities
def test_an_agent_thinks_if_the_probe_is_close_or_unknown(margin: float | None) -> None:
    ask, asked = rounds(["a", "b"], [margin, 0.9])
    assert think(ThinkingPolicy(probe_margin=0.6), 64, ask).last.choice == "b"
    assert asked == [(0, ""), (64, "")]


def test_an_engine_without_probabilities_is_not_probed_in_vain() -> None:
    ask, asked = rounds(["a"])
    assert think(ThinkingPolicy(probe_margin=0.6), 64, ask, measured=False).last.choice == "a"
    assert asked == [(64, "")]
    ask, asked = rounds(["a", "a"])
    assert think(ThinkingPolicy(probe_margin=0.6, stable=2, piece=16), 64, ask, measured=False).why == "stable"
    assert asked == [(0, ""), (16, "")]


def test_thinking_ends_once_the_choice_is_stable() -> None:
    ask, asked = rounds(["a", "b", "b", "b"])
    thought = think(ThinkingPolicy(stable=2, piece=16), 64, ask)
    assert (thought.why, [tokens for tokens, _ in asked]) == ("stable", [16, 16, 16])
    assert asked[2][1].startswith("0xxx")  # the thoughts so far are given again
    assert " 1xxx" in asked[2][1]


def test_a_probe_counts_towards_a_stable_choice() -> None:
    ask, asked = rounds(["a", "a"], [0.1, 0.2])
    assert think(ThinkingPolicy(probe_margin=0.6, stable=2, piece=16), 64, ask).why == "stable"
    assert len(asked) == 2


def test_thinking_ends_once_the_choice_is_confident() -> None:
    ask, asked = rounds(["a", "b", "c"], [0.1, 0.95, 0.1])
    assert think(ThinkingPolicy(confidence=0.9, piece=16), 64, ask).last.choice == "b"
    assert len(asked) == 2


def test_the_last_choice_is_the_answer_at_the_limit() -> None:
    ask, asked = rounds(["a", "b", "c"])
    thought = think(ThinkingPolicy(stable=2, piece=16), 40, ask)
    assert (thought.why, thought.last.choice) == ("limit", "c")
    assert [tokens for tokens, _ in asked] == [16, 16, 8]


def test_a_thought_that_ended_itself_or_repeats_is_the_last() -> None:
    ask, asked = rounds(["a", "b"], thought="short")
    assert think(ThinkingPolicy(stable=2, piece=16), 64, ask).why == "ended"
    assert len(asked) == 1
    ask, asked = rounds(["a", "b", "c"], thought=LONG)
    assert think(ThinkingPolicy(stable=2, piece=16), 64, ask).why == "ended"
    assert len(asked) == 2


@pytest.mark.parametrize("policy", [ThinkingPolicy(), ThinkingPolicy(probe_margin=0.6, stable=2)])
def test_a_budget_of_0_asks_once_without_a_thought(policy: ThinkingPolicy) -> None:
    ask, asked = rounds(["a"], [0.0])
    assert think(policy, 0, ask).why == "off"
    assert asked == [(0, "")]


def test_a_loop_ends_in_the_choice_made_before_or_in_a_forced_one() -> None:
    asked: list[int] = []

    def ask(tokens: int, thoughts: str) -> Round:
        asked.append(tokens)
        if tokens:
            raise LoopStopped("the model repeated itself")
        return Round("forced", 0.1)

    assert think(ThinkingPolicy(stable=2), 64, ask).last.choice == "forced"
    assert asked == [32, 0]
    assert think(ThinkingPolicy(probe_margin=0.6), 64, ask).why == "loop"
    assert asked == [32, 0, 0, 64]  # the probe is the answer
    with pytest.raises(LoopStopped):
        think(ThinkingPolicy(), 64, ask)


@given(
    budget=st.integers(0, 10**6),
    piece=st.integers(4, 10**6),
    stable=st.none() | st.integers(2, 5),
    probe=st.none() | st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_thinking_never_exceeds_its_budget(
    budget: int, piece: int, stable: int | None, probe: float | None, seed: int
) -> None:
    rng, spent = random.Random(seed), [0]
    piece = max(piece, budget // 50, 4)

    def ask(tokens: int, thoughts: str) -> Round:
        spent[0] += tokens
        return Round(rng.choice("ab"), rng.random(), f"{rng.random()}{'x' * min(4 * tokens, 2000)}")

    thought = think(ThinkingPolicy(probe_margin=probe, stable=stable, piece=piece), budget, ask)
    assert spent[0] <= budget
    assert thought.rounds
    assert thought.why


def test_the_majority_is_sure_by_the_beta_posterior() -> None:
    # 4 to 0: 1 - 0.5**5 = 0.96875; 3 to 0: 1 - 0.5**4 = 0.9375
    assert majority_is_sure(Counter({"a": 4}), 0.95)
    assert not majority_is_sure(Counter({"a": 3}), 0.95)
    assert not majority_is_sure(Counter({"a": 4, "b": 3}), 0.95)
    assert not majority_is_sure(Counter(), 0.95)


@given(st.integers(0, 30), st.integers(0, 30))
def test_more_votes_for_the_first_make_it_surer(first: int, second: int) -> None:
    low, high = sorted((first, second))
    if majority_is_sure(Counter({"a": high, "b": low}), 0.9):
        assert majority_is_sure(Counter({"a": high + 1, "b": low}), 0.9)


def test_margins_and_answers_are_compared_as_documented() -> None:
    assert margin_of({"a": 0.7, "b": 0.2, "c": 0.1}) == pytest.approx(0.5)
    assert margin_of({"a": 1.0}) == 1.0
    first = dspy.Prediction(answer=" Forty  two", steps=[1], thought="a")
    assert answer_key(first) == answer_key(dspy.Prediction(answer="forty two", steps=[], thought="b"))


def test_samples_of_typed_answers_are_compared_by_their_values() -> None:
    kind = enum.Enum("kind", {"FIRM": "firm"})
    first = dspy.Prediction(answer={"kind": kind.FIRM, "lines": [1]})
    assert answer_key(first) == answer_key(dspy.Prediction(answer={"lines": [1], "kind": "Firm"}))
    assert answer_key(first) != answer_key(dspy.Prediction(answer={"lines": [2], "kind": "firm"}))


@pytest.mark.parametrize("answer", [10**9000, object()], ids=["long", "object"])
def test_an_answer_is_the_same_as_itself(answer: Any) -> None:
    long = dspy.Prediction(answer=answer)
    assert answer_key(long) == answer_key(long)


@pytest.mark.parametrize(
    "values",
    [
        {"probe_margin": 1.5},
        {"confidence": -0.1},
        {"stable": 1},
        {"piece": 3},
        {"samples": 0},
        {"posterior": 0.5},
        {"margin": 0.5},
        {"samples": True},
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        ThinkingPolicy.of(values)


@pytest.mark.parametrize(
    "values",
    [
        {"probe_margin": "0.5"},
        {"probe_margin": True},
        {"confidence": float("nan")},
        {"posterior": None},
        {"posterior": "high"},
        {"samples": None},
        {"piece": None},
    ],
)
def test_values_of_a_wrong_type_are_refused_with_the_rule(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(ConfigError, match=f"^{name}: must be a "):
        ThinkingPolicy(**values)


def test_a_policy_is_part_of_the_program_state() -> None:
    policy = ThinkingPolicy(probe_margin=0.4, samples=3)
    state = program_state(MathQA(policy=policy))
    assert state["policy"] == {"probe_margin": 0.4, "samples": 3}
    assert restore_program("math_qa", {}, state).policy == policy
    assert MathQA(thinking="auto").thinking_policy == AUTO
    assert MathQA().thinking_policy == ThinkingPolicy()


def test_samples_differ_in_the_cache_key() -> None:
    calls: list[Call] = []
    lm = scripted_lm(lambda request: '{"label": "sad"}', cache=ResponseCache(), observers=[calls.append])
    with dspy.context(lm=lm):
        Classify(["happy", "sad"], policy={"samples": 3, "posterior": 0.99})(text="x")
    assert [call.cached for call in calls] == [False] * 3


def test_an_agent_that_is_sure_does_not_think(small_embedded: str) -> None:
    calls: list[Call] = []
    lm = get_lm(small_embedded, temperature=0.0, max_tokens=200, observers=[calls.append], seed=1)
    with dspy.context(lm=lm, trace=[]):
        for margin, thinks in ((0.0, False), (1.0, True)):
            calls.clear()
            agent = MathQA(prompt_format="lean", thinking=64, policy={"probe_margin": margin})
            agent.set_parameters({"max_steps": 2})
            dspy.settings.trace.clear()
            prediction = agent(question="What is 4 + 17?")
            assert any(call.thinking_tokens for call in calls) is thinks
            decisions = [entry for entry in dspy.settings.trace if entry[0] is agent.decide]
            # a probe is not a demonstration; after a tool call, max_steps forces a second decision
            assert len(decisions) == 1 + len(prediction.steps)


def test_a_classifier_stops_thinking_when_its_label_is_stable(small_embedded: str) -> None:
    calls: list[Call] = []
    lm = get_lm(small_embedded, temperature=0.0, max_tokens=200, observers=[calls.append], seed=1)
    agent = Classify(["happy", "sad"], thinking=200, policy={"stable": 2, "piece": 8})
    agent.set_parameters({"temperature": 0.1})
    with dspy.context(lm=lm):
        assert agent(text="I lost my dog").label in ("happy", "sad")
    assert 1 <= len(calls) <= 25
    assert sum(call.thinking_tokens or 0 for call in calls) <= 4 * 200
