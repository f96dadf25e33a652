"""Which inputs are the same task."""

import json
from datetime import date
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, strategies as st

from assay.datasets import load_tasks
from assay.datasets.keys import overlap
from assay.datasets.memory import data_spec
from assay.datasets.tasks import task_key

SAME: list[list[dict[str, Any]]] = [
    [  # white space, case, Unicode form, invisible characters
        {"question": "Where is the parcel?"},
        {"question": "  where is\tthe\n parcel? "},
        {"question": "WHERE IS THE PARCEL?"},
        {"question": "Ｗｈｅｒｅ ｉｓ ｔｈｅ ｐａｒｃｅｌ？"},
        {"question": "Where\u00a0is\u2003the\u202fparcel?\ufeff"},
        {"question": "Whe\u00adre is\u200b the par\u2060cel?"},
    ],
    [{"q": "Straße"}, {"q": "STRASSE"}, {"q": "strasse"}],
    [{"q": "caf\u00e9"}, {"q": "cafe\u0301"}, {"q": "CAFE\u0301 "}],
    [{"q": "ﬁle ①"}, {"q": "file 1"}],
    [{"q": "Is it sunny ☀\ufe0f today?"}, {"q": "is it sunny ☀ today?"}, {"q": "is it sun\u034fny ☀\ufe0e today?"}],
    [{"n": 3}, {"n": 3.0}, {"n": "3"}, {"n": "3.0"}, {"n": "3e0"}, {"n": " 3.00 "}, {"n": "３"}, {"n": Decimal("3.0")}],
    [{"n": 1200}, {"n": 1.2e3}, {"n": "1.2E3"}, {"n": "1200.0"}],
    [{"n": 0}, {"n": -0.0}, {"n": "0.000"}],
    [{"n": 10**30}, {"n": "1e30"}],
    [{"flag": True}, {"flag": "true"}, {"flag": "True"}, {"flag": "TRUE "}],
    [{"day": date(2024, 2, 29)}, {"day": "2024-02-29"}],
    [  # order of keys, at any depth, and a cell of a CSV file
        {"order": {"id": 7, "lines": [{"sku": "A", "n": 1}]}},
        {"order": {"lines": [{"n": 1.0, "sku": "a"}], "id": "7"}},
        {"order": '{"lines": [{"n": 1, "sku": "A"}], "id": 7}'},
    ],
    [  # messages of a chat
        {"messages": [{"role": "user", "content": "Hello  there"}]},
        {"messages": [{"content": "hello there", "role": "user"}]},
    ],
    [{"a": "x", "b": None}, {"a": "x"}, {"a": "x", "b": ""}, {"a": "x", "b": " "}],
    [{"a": {"b": 1, "c": None}}, {"a": {"b": 1}}],
    # columns with other names, in another order
    [
        {"context": "A text of some length.", "question": "What is its length?"},
        {"passage": "A text of some length.", "query": "What is its length?"},
        {"text": "A text of some length.", "ask": "What is its length?"},
    ],
    [{"question": "2 + 2"}, {"problem": "2 + 2"}],
]  # fmt: skip


@pytest.mark.parametrize("spellings", SAME)
def test_spellings_of_one_task_have_one_key(spellings: list[dict[str, Any]]) -> None:
    assert len({task_key(inputs) for inputs in spellings}) == 1
    assert len(task_key(spellings[0])) == 16


def test_different_tasks_have_different_keys() -> None:
    tasks: list[dict[str, Any]] = [
        {"n": 3}, {"n": 3.5}, {"n": -3}, {"n": 30}, {"n": True}, {"n": 1}, {"n": False}, {"n": "three"}, {"n": [3]},
        {"n": {"x": 3}}, {"n": {"y": 3}}, {"n": [3, None]}, {"n": "007"}, {"n": 7}, {"n": "1,000"}, {"n": 1000},
        {"n": "+7"}, {"n": "1 000"}, {"a": 3, "b": 5}, {"a": 5, "b": 3}, {"a": "yes", "b": "no"},
        {"a": "no", "b": "yes"}, {"q": "a.b"}, {"q": "a b"}, {"q": "ab"}, {"q": "What is 1 + 2?"},
        {"q": "What is 1 + 2.0?"}, {"q": "x²"}, {"q": "[1, 2"}, {"q": [1, 2]}, {"q": [2, 1]}, {"q": "null"},
        {"image": "data:image/png;base64,AAAA"}, {"image": "data:image/png;base64,AAAB"},
        {"image": "https://example.org/1.png"}, {"image": "https://example.org/2.png"},
    ]  # fmt: skip
    assert len({task_key(inputs) for inputs in tasks}) == len(tasks)


def test_inputs_without_a_value_have_no_key() -> None:
    assert {task_key(inputs) for inputs in ({}, {"a": None}, {"a": ""}, {"a": " \u200b"})} == {""}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(min_size=1), json_values, max_size=4))
def test_a_key_survives_json_another_order_and_upper_case(inputs: dict[str, Any]) -> None:
    key = task_key(inputs)
    assert task_key(json.loads(json.dumps(inputs))) == key
    assert task_key(dict(reversed(inputs.items()))) == key
    spaced = {name: f" {value}\n" if isinstance(value, str) else value for name, value in inputs.items()}
    assert task_key(spaced) == key


def test_a_set_in_a_row_has_one_order() -> None:
    sets = [set[int](), set[int]()]
    for tags, order in zip(sets, ((0, 8), (8, 0)), strict=True):  # two orders of iteration, as those of two processes
        for tag in order:
            tags.add(tag)
    first, second = (data_spec([{"question": "Which?", "tags": tags, "answer": tags}]) for tags in sets)
    assert list(sets[0]) != list(sets[1])
    assert first == second
    (task,) = load_tasks(first)
    assert (task.inputs["tags"], task.expected["answer"]) == ([0, 8], [0, 8])


def test_the_overlap_of_texts_does_not_depend_on_their_unicode_form() -> None:
    text = "Whether the caf\u00e9 \uff4f\uff46 the old har\u00adbour is open on Sundays and holidays"
    assert overlap(text, ["whether the cafe\u0301 of the old harbour is open on sundays and holidays"]) == 1
