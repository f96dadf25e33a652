"""What a model writes within a thought is not an output of a program, in any prompt format."""

import dspy
import pytest
from dspy.utils.exceptions import AdapterParseError

from assay.programs.adapters import ADAPTERS, make_adapter

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
