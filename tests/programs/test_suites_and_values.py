"""Suites of tests: malformed ones, values that travel to a solution and back, equality."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from solution_suites import RIGHT, SUITES, outcome, sandboxed as sandboxed, suite as suite

from assay.errors import ConfigError, DataError
from assay.programs.sandbox import Case, Suite
from assay.programs.sandbox.values import NotPlain, decode, encode, same, show


@pytest.mark.parametrize(
    ("tests", "entry_point"),
    [
        *(([], ""), (3, ""), ("x = 1", ""), ("def check(c): pass", ""), ("def test_(:", ""), ([["f(", "1"]], "")),
        *(([["f()", "object()"]], ""), ([["f()", "1", "2"]], ""), ([{"expression": "f()"}], "")),
        *(([{"expression": "f()", "expected": "1", "raises": "E"}], ""), ([["f()", "__import__('os')"]], "")),
    ],
)
def test_malformed_suites_are_refused(tests: Any, entry_point: str) -> None:
    with pytest.raises(DataError):
        Suite.parse(tests, entry_point)


@pytest.mark.parametrize("wrong", [{"test_timeout_s": 0}, {"test_timeout_s": 99}, {"module": "a-b"}, {"memory_mb": 0}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        outcome(RIGHT, SUITES["cases"], "none", **wrong)


KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)


VALUES = st.recursive(
    KEYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4) | st.sets(KEYS, max_size=4),
    max_leaves=8,
)


def _through_json(value: Any) -> Any:
    return json.loads(json.dumps(encode(value)))


@settings(deadline=None)
@given(VALUES)
def test_values_travel_unchanged_and_equal_themselves(value: Any) -> None:
    data = _through_json(value)
    assert repr(decode(data, lambda *_: None)) == repr(value) or "{" in repr(value)
    assert same(data, encode(value))
    assert show(data)


def _has_nan(value: Any) -> bool:
    return "nan" in repr(value)


@settings(deadline=None)
@given(VALUES, VALUES)
def test_values_are_compared_by_pythons_equality(one: Any, other: Any) -> None:
    if not _has_nan(one) and not _has_nan(other):
        assert same(_through_json(one), _through_json(other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        *((1, True, True), (1, 1.0, True), (0.0, -0.0, True), (2, 2 + 0j, True), ([1], (1,), False), ("1", 1, False)),
        *((math.nan, math.nan, True), ({1, 2}, frozenset({2, 1}), True), (b"a", bytearray(b"a"), True)),
        *((range(0, 10, 3), range(0, 11, 3), True), (range(0), range(5, 5), True), (range(3), [0, 1, 2], False)),
        *(({"a": 1, "b": 2}, {"b": 2, "a": 1}, True), ({"a": 1}, {"a": 2}, False)),
        *((range(10**18), range(10**18), True), ("nan", math.nan, False), (2**63, float(2**63), True)),
    ],
)
def test_equality_of_encoded_values(one: Any, other: Any, equal: bool) -> None:
    assert same(_through_json(one), _through_json(other)) is equal


def test_objects_of_other_classes_are_no_plain_values() -> None:
    for value in (object(), [object()], {1: print}, int):
        with pytest.raises(NotPlain):
            encode(value)


@pytest.mark.slow
def test_asserts_are_cases_where_they_compare_with_a_literal(sandboxed: str) -> None:
    source = """
import math
TWO = 2
assert double(2) == 4
assert double("a") == 'a' + 'a'
assert double(TWO) == 4
assert double(math.inf) == math.inf
assert double(0) is not None
def test_list():
    assert double([]) == []
"""
    suite = Suite.parse(source)
    assert suite.cases == (Case(expression="double(2)", expected="4"),)
    assert suite.functions == ("test_list", *(f"test_assert_{line}" for line in (5, 6, 7, 8)))
    assert outcome(RIGHT, suite, sandboxed).share == 1.0
    assert Suite.parse(["assert double(2) == 4", "assert double(-1.5) == -3.0"]).names == ("double(2)", "double(-1.5)")
    with pytest.raises(DataError):
        Suite.parse("import math")
