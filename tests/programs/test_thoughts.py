"""Thinking of programs: budgets and their fields; probe, early exit, adaptive sampling, forced answer."""

import enum
import random
from collections import Counter
from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import AdapterParseError
from hypothesis import given, strategies as st

from assay.errors import ConfigError, LoopStopped
from assay.models import Call, ResponseCache, Thinking, get_lm
from assay.models.thinking import budget_of
from assay.programs import Classify, MathQA, ThinkingPolicy, program_state, program_version, restore_program
from assay.programs.adapters import ADAPTERS, make_adapter
from assay.programs.thinking import AUTO, LIMIT, Round, answer_key, majority_is_sure, think
from assay.testing.fakes import scripted_lm


class Fruit(dspy.Signature):
    """Count the fruits."""

    text: str = dspy.InputField()
    reasoning: str = dspy.OutputField()
    count: int = dspy.OutputField()


def asked(thinking: Any, prompt_format: str = "json", program: Any = None) -> tuple[Any, Any]:
    """The prediction of a program with a budget, and its request."""
    requests: list[Any] = []

    def script(request: Any) -> str:
        requests.append(request)
        texts = {
            "json": '{"reasoning": "two", "count": 2}',
            "lean": "reasoning: two\ncount: 2",
            "xml": "<reasoning>\ntwo\n</reasoning>\n\n<count>\n2\n</count>",
            "chat": "[[ ## reasoning ## ]]\ntwo\n\n[[ ## count ## ]]\n2\n\n[[ ## completed ## ]]",
        }
        return texts[prompt_format]

    lm = scripted_lm(script)
    with dspy.context(lm=lm.copy(thinking=thinking), adapter=make_adapter(prompt_format)):
        return (program or dspy.Predict(Fruit))(text="a pear and a fig"), requests[-1]


def schema(request: Any) -> Any:
    return request.config.response_format["schema"]["properties"]


@pytest.mark.parametrize(("thinking", "characters"), [(8, 32), ("low", 8192), (10**6, 4 * LIMIT)])
def test_a_budget_limits_the_thought_of_any_program(thinking: Any, characters: int) -> None:
    prediction, request = asked(thinking)
    assert schema(request)["reasoning"]["maxLength"] == characters
    assert list(schema(request)) == ["reasoning", "count"]
    assert (prediction.reasoning, prediction.count) == ("two", 2)


@pytest.mark.parametrize("thinking", [None, "auto"])
def test_without_a_budget_the_request_is_unchanged(thinking: Any) -> None:
    assert "maxLength" not in schema(asked(thinking)[1])["reasoning"]


@pytest.mark.parametrize("prompt_format", ["json", "lean", "xml", "chat"])
def test_off_leaves_the_thought_out_of_the_prompt(prompt_format: str) -> None:
    prediction, request = asked("off", prompt_format)
    assert "reasoning" not in str(request.messages) + str(request.system)
    assert prediction.reasoning == ""
    assert prediction.count == 2


@pytest.mark.parametrize("prompt_format", ["xml", "chat"])
def test_a_format_without_schemas_cannot_limit_a_thought_and_is_refused(prompt_format: str) -> None:
    with pytest.raises(ConfigError, match=f"the prompt format {prompt_format} sends no schema that limits it"):
        asked(8, prompt_format)


def test_the_budget_of_an_agent_is_part_of_its_state_and_version() -> None:
    agent = MathQA(thinking=77)
    restored = restore_program("math_qa", {}, program_state(agent))
    assert restored.thinking == Thinking(tokens=77)
    assert program_version(agent, "json") != program_version(MathQA(), "json")
    assert "thinking" not in program_state(MathQA())


@pytest.mark.model
@pytest.mark.parametrize(("thinking", "prompt_format"), [(0, "json"), (4, "lean"), ("low", "lean"), (10**6, "json")])
def test_an_agent_thinks_within_its_budget(embedded: str, prompt_format: str, thinking: Any) -> None:
    calls: list[Call] = []
    lm = get_lm(embedded, temperature=0.0, max_tokens=200, observers=[calls.append], seed=1)
    agent = MathQA(prompt_format=prompt_format, thinking=thinking)
    agent.set_parameters({"max_steps": 2, "temperature": 0.1})
    with dspy.context(lm=lm):
        assert agent(question="What is 4 + 17?").answer
    decision = calls[0]
    if thinking == 0:
        assert decision.thinking_tokens is None
        assert "thought" not in decision.output
        return
    limit = 4 if thinking == 4 else 2048 if thinking == "low" else LIMIT
    assert budget_of(decision.request) == limit
    assert decision.thinking_tokens is not None
    assert 0 < decision.thinking_tokens <= 4 * limit  # the field is limited in characters, four for a token
    assert decision.thinking_tokens < (decision.completion_tokens or 0)


ANSWERS = {
    "json": '{{"answer": "{0}"}}',
    "lean": "answer: {0}",
    "xml": "<answer>\n{0}\n</answer>",
    "chat": "[[ ## answer ## ]]\n{0}\n\n[[ ## completed ## ]]",
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_only_what_follows_a_thought_is_parsed(name: str) -> None:
    adapter, signature = make_adapter(name), dspy.Signature("question -> answer")
    five, seven = ANSWERS[name].format(5), ANSWERS[name].format(7)
    assert adapter.parse(signature, five) == {"answer": "5"}
    for thought in (f"<think>\n{seven}\n</think>\n", f"{seven}\n</think>\n", f"[THINK]{seven}[/THINK]\n"):
        assert adapter.parse(signature, thought + five) == {"answer": "5"}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_answer_cut_within_a_thought_has_no_output(name: str) -> None:
    adapter, signature = make_adapter(name), dspy.Signature("question -> answer")
    try:
        assert adapter.parse(signature, f"<think>\n{ANSWERS[name].format(7)}\n") == {"answer": ""}
    except AdapterParseError:
        pass


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
