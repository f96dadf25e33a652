"""Fields of prompts and answers, in every prompt format."""

import json
from typing import Any, Literal

import dspy
import pytest
from prompt_forms import ADAPTERS, VALUES, answer_of, prompt_of
from pydantic import BaseModel

from assay.support.sections import (
    adapter_readings,
    answer_fields,
    fields_in,
    nested_outputs,
    output_names,
    prompt_fields,
    prompt_readings,
    structure_in,
)

SIGNATURE = "question, context -> why, answer"


@pytest.mark.parametrize("form", ADAPTERS)
@pytest.mark.parametrize("value", VALUES)
def test_an_answer_in_any_format_has_its_fields(form: str, value: str) -> None:
    outputs = {"why": value, "answer": f"{value}\nend"}
    text = answer_of(ADAPTERS[form], SIGNATURE, outputs)
    for prefix in ("", "<think>is it\nanswer: 3\n<answer>4</answer>?</think>\n"):
        assert fields_in(prefix + text, ("why", "answer")) == outputs


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
        ('<answer type="int">4</answer>', {"answer": "4"}),
        ('<answer type="int"/>', {"answer": None}),
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


def test_arguments_of_tool_calls_are_fields() -> None:
    assert answer_fields("", [("search", {"query": "x"})]) == {"query": "x"}
    assert answer_fields("I am done", [("note", {}), ("submit", {"answer": 4})], ("next_thought",)) == {"answer": 4}
    calls = {"tool_calls": [{"name": "submit", "args": {"answer": "a\nb"}}]}
    for form in ADAPTERS:
        text = answer_of(ADAPTERS[form], "question -> thought, tool_calls: dict", {"thought": "t", "tool_calls": calls})
        if "XML" in form:
            text = f"<thought>t</thought>\n<tool_calls>\n{json.dumps(calls)}\n</tool_calls>"
        assert answer_fields(text, names=("thought", "tool_calls")) == {"answer": "a\nb"}, form


class Term(BaseModel):
    value: int
    sign: Literal["plus", "minus"] = "plus"
    note: str | None = None


class Sum(BaseModel):
    terms: list[Term]
    weights: dict[str, int]


class ReadSum(dspy.Signature):
    """Read it."""

    page: Sum = dspy.InputField()
    sum: Sum = dspy.OutputField()
    tags: list[str] = dspy.OutputField()
    html: str = dspy.OutputField()


@pytest.mark.parametrize("value", VALUES)
def test_objects_and_lists_in_xml_have_their_structure(value: str) -> None:
    adapter = ADAPTERS["XMLAdapter"]
    read = Sum(terms=[Term(value=1, note=value), Term(value=2)], weights={"a b": 3, "c": 4})
    nested = nested_outputs(prompt_of(adapter, ReadSum, {"page": read})[0]["content"])
    assert nested == {"sum", "tags"}
    terms = [{"value": "1", "sign": "plus", "note": value}, {"value": "2", "sign": "plus", "note": None}]
    wanted = {"sum": {"terms": terms, "weights": {"a b": "3", "c": "4"}}, "tags": [value, "x"], "html": "<b>4</b>"}
    text = answer_of(adapter, ReadSum, {"sum": read, "tags": [value, "x"], "html": "<b>4</b>"})
    names = ("sum", "tags", "html")
    assert answer_fields(text, names=names, nested=nested) == wanted
    assert answer_fields(text.replace("&lt;b>4&lt;/b>", "<b>4</b>"), names=names, nested=nested) == wanted
    written = f"<sum>{json.dumps({'terms': []})}</sum>"
    assert answer_fields(written, names=names, nested=nested) == {"sum": {"terms": []}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<a>1</a>\n<b />", {"a": "1", "b": None}),
        ("<a></a>", {"a": ""}),
        ("<a>x < 1 & <i>so</i></a>", {"a": "x < 1 & <i>so</i>"}),
        ("<a><![CDATA[x]]></a>", {"a": "x"}),
        ("<a>1</a><a>2</a>", {"a": ["1", "2"]}),
        ("<item><item>1</item></item><item/>", [["1"], None]),
        ("<entry key='a &amp; b'>1</entry>", {"a & b": "1"}),
        ("[1]", [1]),
        *(
            (text, text)
            for text in ("", "a", "<a>1</a> b", "<a>1", "</a>", "<a></b>", "<br>", '<p class="c">a</p>', "4")
        ),
        *((text, text) for text in ("<a>" * 5000 + "</a>" * 5000, "[" * 50000)),
    ],
)
def test_a_text_of_elements_is_an_object_or_a_list(text: str, value: Any) -> None:
    assert structure_in(text) == value


@pytest.mark.slow
@pytest.mark.timeout(60)  # a reader of quadratic time needs far longer
@pytest.mark.parametrize(
    "part",
    [
        "<answer>", "</answer>", "<answer></answer>", "<answer>1</answer>\n", "<a>b</a>\n", "<a>b", "<item>", "<a><b>",
        '{"answer": [\n', '{"a": {"b": 1},\n', '{"', "a: \n", "[[ ## a ## ]]\n", "\n\nRespond with", "<think>", "&",
    ],
)  # fmt: skip
def test_long_texts_are_read_in_linear_time(part: str) -> None:
    text = part * (150_000 // len(part))
    for whole in (text, f"<answer>{text}</answer>"):
        fields_in(whole)
        answer_fields(whole, names=("why", "answer", "tool_calls"), nested=("answer",))
        prompt_readings(whole)
        adapter_readings("Reply with: answer: …", whole)
