"""Thoughts of programs: the field, its limit and its place in the state; what is in a thought is no output."""

from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import AdapterParseError

from assay.errors import ConfigError
from assay.models import Call, Thinking, get_lm
from assay.models.thinking import budget_of
from assay.programs import MathQA, program_state, program_version, restore_program
from assay.programs.adapters import ADAPTERS, make_adapter
from assay.programs.thinking import LIMIT
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


def test_a_thought_that_is_the_whole_answer_cannot_be_off() -> None:
    with pytest.raises(ConfigError, match="the only output field"):
        asked("off", program=dspy.Predict("text -> reasoning"))


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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<answer>a < b & c</answer>", "a < b & c"),
        ("<answer>\n&lt;b> &amp; c\n</answer>", "<b> & c"),
        ("The answer:\n```xml\n<answer>7</answer>\n```", "7"),
        ("<answer>\n7", "7"),
        ('{"answer": "7"}', "7"),
        ("7", "7"),
    ],
)
def test_xml_of_small_models_is_read(text: str, value: str) -> None:
    assert make_adapter("xml").parse(dspy.Signature("question -> answer"), text) == {"answer": value}


def test_xml_keeps_types_and_a_reasoning_field() -> None:
    signature = dspy.Signature("question -> reasoning, items: list[str], count: int")
    text = "<reasoning>\na < b\n</reasoning>\n<items><item>x</item><item>y & z</item></items>\n<count>2</count>"
    assert make_adapter("xml").parse(signature, text) == {"reasoning": "a < b", "items": ["x", "y & z"], "count": 2}
    with pytest.raises(AdapterParseError):
        make_adapter("xml").parse(signature, text.replace("2", "two"))
