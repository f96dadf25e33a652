"""Fields of prompts and answers, in every prompt format."""

import json
from typing import Any

import pytest
from prompt_forms import ADAPTERS, VALUES, answer_of, prompt_of

from assay.support.sections import (
    adapter_readings,
    answer_fields,
    fields_in,
    output_names,
    prompt_fields,
    prompt_readings,
    sections_in,
)

SIGNATURE = "question, context -> why, answer"


@pytest.mark.parametrize("form", ADAPTERS)
@pytest.mark.parametrize("value", VALUES)
def test_an_answer_in_any_format_has_its_fields(form: str, value: str) -> None:
    outputs = {"why": value, "answer": f"{value}\nend"}
    text = answer_of(ADAPTERS[form], SIGNATURE, outputs)
    for prefix in ("", "<think>is it\nanswer: 3\n<answer>4</answer>?</think>\n"):
        assert fields_in(prefix + text, ("why", "answer")) == outputs


@pytest.mark.parametrize("form", ADAPTERS)
@pytest.mark.parametrize("value", VALUES)
def test_one_of_the_readings_of_a_prompt_has_its_inputs(form: str, value: str) -> None:
    inputs = {"question": value, "context": f"first\n{value}"}
    prompt = prompt_of(ADAPTERS[form], SIGNATURE, inputs)[-1]["content"]
    assert inputs in prompt_readings(prompt)
    if form != "lean" or not ("\nnote: " in value or "\n\nRespond with" in value):
        assert prompt_fields(prompt) == inputs


@pytest.mark.parametrize("form", ADAPTERS)
def test_the_system_message_names_the_outputs(form: str) -> None:
    assert output_names(prompt_of(ADAPTERS[form], SIGNATURE, {"question": "a", "context": "b"})[0]["content"]) == (
        "why",
        "answer",
    )


def test_text_of_users_names_no_outputs_and_has_no_fields() -> None:
    assert output_names("You are a helpful assistant. Reply with: yes or no.") == ()
    for text in ("How far is it?", "Read this:\n<document>\na\n</document>\nHow far is it?", "<b>bold</b> text"):
        assert adapter_readings("Be brief.", text) == []
        assert prompt_fields(text) == {}
    assert adapter_readings("Be brief.", "question: How far is it?") == []


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("<answer>\na &lt;b> &amp; c\n</answer>", {"answer": "a <b> & c"}),
        ("<answer>a <b>c</b> & d</answer>", {"answer": "a <b>c</b> & d"}),
        ("<answer><answer>x</answer></answer>", {"answer": "<answer>x</answer>"}),
        ("<answer/>", {"answer": None}),
        ("<answer />", {"answer": None}),
        ("<answer></answer>", {"answer": ""}),
        ("<answer><item>a</item><item>b &amp; c</item><item /></answer>", {"answer": ["a", "b & c", None]}),
        ("<answer><![CDATA[a < b]]></answer>", {"answer": "a < b"}),
        ("Here it is:\n```xml\n<answer>4</answer>\n```", {"answer": "4"}),
        ("<why>w</why><answer>\n4", {"answer": "4", "why": "w"}),
        ("<reasoning>\nr\n</reasoning>\n\n<answer>\n4\n</answer>", {"reasoning": "r", "answer": "4"}),
        ('```json\n{"answer": {"a": [1]}, "why": "x\ny"}\n```', {"answer": {"a": [1]}, "why": "x\ny"}),
        ('Sure. {"answer": 4} is it', {"answer": 4}),
        ('{"why": "w", "answer": "cu', {"why": "w"}),
        ("Sure: here\n[[ ## answer ## ]]\n4", {"answer": "4"}),
        ("why: a\nb\nanswer: 4", {"why": "a\nb", "answer": "4"}),
        ("four", {}),
        ("", {}),
    ],
)
def test_answers_of_models_are_read_leniently(text: str, fields: dict[str, Any]) -> None:
    assert fields_in(text, ("reasoning", "why", "answer")) == fields


def test_positions_are_those_of_the_values() -> None:
    for text in (
        "[[ ## why ## ]]\na\n\n[[ ## answer ## ]]\n4 5\n",
        "<answer>\n4 5\n</answer>",
        "answer: 4 5",
        "<think>x</think>answer: 4 5",
    ):
        [section] = sections_in(text, ("answer",))
        assert text[section.start : section.end] == "4 5"


def test_arguments_of_tool_calls_are_fields() -> None:
    assert answer_fields("", [("search", {"query": "x"})]) == {"query": "x"}
    assert answer_fields("I am done", [("note", {}), ("submit", {"answer": 4})], ("next_thought",)) == {"answer": 4}
    calls = {"tool_calls": [{"name": "submit", "args": {"answer": "a\nb"}}]}
    for form in ADAPTERS:
        text = answer_of(ADAPTERS[form], "question -> thought, tool_calls: dict", {"thought": "t", "tool_calls": calls})
        if "XML" in form:
            text = f"<thought>t</thought>\n<tool_calls>\n{json.dumps(calls)}\n</tool_calls>"
        assert answer_fields(text, names=("thought", "tool_calls")) == {"answer": "a\nb"}, form
