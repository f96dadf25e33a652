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
from assay.programs.thinking import AUTO, Round, answer_key, majority_is_sure, think
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


# settings of the policy; choices and margins of the rounds; the limits of the rounds that are asked, and why it ended
ROUNDS: list[tuple[dict[str, Any], str, list[float | None] | None, list[int], str]] = [
    ({}, "a", None, [64], "limit"),
    ({"probe_margin": 0.6}, "a", [0.7], [0], "probe"),
    ({"probe_margin": 0.6}, "ab", [0.5, 0.9], [0, 64], "limit"),
    ({"probe_margin": 0.6}, "ab", [None, 0.9], [0, 64], "limit"),  # an engine without probabilities
    ({"stable": 2, "piece": 16}, "abb", None, [16, 16, 16], "stable"),
    ({"probe_margin": 0.6, "stable": 2, "piece": 16}, "aa", [0.1, 0.2], [0, 16], "stable"),  # the probe counts
    ({"confidence": 0.9, "piece": 16}, "ab", [0.1, 0.95], [16, 16], "confident"),
    ({"stable": 2, "piece": 24}, "abc", None, [24, 24, 16], "limit"),
]


@pytest.mark.parametrize(("policy", "choices", "margins", "limits", "why"), ROUNDS)
def test_thinking_ends_as_its_policy_says_with_the_last_choice(
    policy: dict[str, Any], choices: str, margins: list[float | None] | None, limits: list[int], why: str
) -> None:
    ask, asked = rounds([*choices, "never asked"], [*margins, None] if margins else None)
    thought = think(ThinkingPolicy(**policy), 64, ask)
    assert ([tokens for tokens, _ in asked], thought.last.choice) == (limits, choices[-1])
    assert thought.why == why


def test_thoughts_so_far_are_given_again() -> None:
    ask, asked = rounds(["a", "b", "b", "b"])
    think(ThinkingPolicy(stable=2, piece=16), 64, ask)
    assert asked[2][1].startswith("0xxx")
    assert " 1xxx" in asked[2][1]


def test_an_engine_without_probabilities_is_not_probed_in_vain() -> None:
    for settings, limits in (({}, [64]), ({"stable": 2, "piece": 16}, [0, 16])):
        ask, asked = rounds(["a", "a"])
        think(ThinkingPolicy(probe_margin=0.6, **settings), 64, ask, measured=False)
        assert [tokens for tokens, _ in asked] == limits


@pytest.mark.parametrize(("thought", "calls"), [("short", 1), (LONG, 2)])
def test_a_thought_that_ended_itself_or_repeats_is_the_last(thought: str, calls: int) -> None:
    ask, asked = rounds(["a", "b", "c"], thought=thought)
    assert think(ThinkingPolicy(stable=2, piece=16), 64, ask).why == "ended"
    assert len(asked) == calls


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


def test_samples_of_typed_answers_are_compared_by_their_values() -> None:
    kind = enum.Enum("kind", {"FIRM": "firm"})
    first = dspy.Prediction(answer={"kind": kind.FIRM, "lines": [1]}, steps=[1])
    assert answer_key(first) == answer_key(dspy.Prediction(answer={"lines": [1], "kind": "Firm"}, steps=[]))
    assert answer_key(first) != answer_key(dspy.Prediction(answer={"lines": [2], "kind": "firm"}))
    assert answer_key(dspy.Prediction(answer=" Forty  two")) == answer_key(dspy.Prediction(answer="forty two"))
    for answer in (10**9000, object()):
        assert answer_key(dspy.Prediction(answer=answer)) == answer_key(dspy.Prediction(answer=answer))


WRONG: list[tuple[str, Any]] = [
    *(("probe_margin", value) for value in (1.5, "0.5", True)),
    *(("confidence", value) for value in (-0.1, float("nan"))),
    *(("posterior", value) for value in (0.5, None, "high")),
    *(("samples", value) for value in (0, True, None)),
    *(("piece", value) for value in (3, None)),
    *(("stable", 1), ("margin", 0.5)),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_values_out_of_range_or_of_a_wrong_type_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        ThinkingPolicy.of({name: value})


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
