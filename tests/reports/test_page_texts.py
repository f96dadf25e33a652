"""Texts of the page: what is invisible, long or cut."""

import pytest

from assay.reports.texts import Budget, iso, moment, preview, readable, seconds, setting_texts
from assay.support.numbers import price
from assay.web.rendering import link


def test_invisible_characters_are_named() -> None:
    assert readable("a\x00\x1b\u202e\ud800\u2067b") == "a[U+0000][U+001B][U+202E][U+D800][U+2067]b"
    assert readable("tab\tline\nÄ שלום 🎉") == "tab\tline\nÄ שלום 🎉"


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ('{"q":"How much?"}', "How much?"),
        ('{"q": "two\\nlines \\u0041\\"', 'two lines A"'),
        ('{"q":"cut in an escape \\u00', "cut in an escape "),
        ('{"q":"cut after a backslash \\', "cut after a backslash "),
        ('{"a \\"key\\"":"x"}', "x"),
        ('{"rows":[1,2', "[1,2"),
        ("{}", ""),
        ("", ""),
        ('{"q":"' + "x" * 200, "x" * 120 + "…"),
    ],
)
def test_a_preview_is_the_first_value_in_one_line(inputs: str, text: str) -> None:
    assert preview(inputs).rstrip() == text.rstrip()


def test_a_budget_leaves_every_text_its_beginning() -> None:
    budget = Budget(1_000, most=600, least=10)
    clipped = [budget.clip("x" * 5_000) for _ in range(4)]
    assert [len(text.text) for text in clipped] == [600, 400, 10, 10]
    assert [text.left_out for text in clipped] == [4_400, 4_600, 4_990, 4_990]


def test_numbers_and_times_are_formatted_for_reading() -> None:
    assert [seconds(value) for value in (None, 0.04, 59, 61, 7_260)] == ["–", "0.0 s", "59 s", "1 min 1 s", "2 h 1 min"]
    assert (iso(0.0), iso(None)) == ("1970-01-01T00:00:00+00:00", "")
    assert [moment(value) for value in (None, 1e300)] == ["–", "–"]


def test_a_small_cost_is_not_nothing() -> None:
    assert [price(value) for value in (None, 0.0, 0.00004, 0.00006, 1.5)] == [
        "unknown", "$0", "< $0.0001", "$0.0001", "$1.5000"
    ]  # fmt: skip


def test_addresses_quote_every_part() -> None:
    assert (
        link("rollouts", "a/b?c#d", text="x&y=ä", empty="", none=None) == "/rollouts/a%2Fb%3Fc%23d?text=x%26y%3D%C3%A4"
    )
    assert link("rollouts", "\ud800") == "/rollouts/%3F"


def test_settings_are_texts_and_no_python_values() -> None:
    config = {
        "kind": "tune", "program": "p.py:P", "preflight": True, "cache": False, "task_timeout": 600.0, "margin": 0.02,
        "objectives": ["score", "tokens"], "parameters": {"temperature": 0.1}, "data": None, "sizes": {}, "seed": 0,
        "roles": {"judge": {"model": "m"}},
    }  # fmt: skip
    assert dict(setting_texts(config)) == {
        "program": "p.py:P", "preflight": "yes", "cache": "no", "task timeout": "600", "margin": "0.02",
        "objectives": "score, tokens", "parameters": "temperature 0.1", "seed": "0",
        "roles": '{"judge": {"model": "m"}}',
    }  # fmt: skip
