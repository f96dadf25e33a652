"""Anonymization of data and of hostile texts."""

import json
import re
import threading
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, strategies as st
from privacy_values import H, make, matched

from assay.traces.privacy.anonymizer import restore
from assay.traces.privacy.names import KnownValue

JANE = KnownValue("person", "Jane Q. Doe")


def test_anonymized_data_keeps_its_structure_and_types() -> None:
    data = {"a": [1, 2.5, None, True, {"b": ("x", b"y")}], 7: "jane@gmail.com", "n": 2127365000, "t": 1717171717171}
    parts = [1, 2.5, None, True, {"b": ["x", b"y"]}]
    mail = make().text("jane@gmail.com")
    assert make().value(data) == {"a": parts, 7: mail, "n": 2127365000, "t": 1717171717171}
    assert data["a"][4] == {"b": ("x", b"y")}  # type: ignore[index]


def test_field_names_serve_as_labels() -> None:
    numbers = {"ssn": 536904399, "card_number": 4111111111111111}
    out = make().value({"phone": "2127365000", "phones": ["2127365001"], "dob": "1984-05-03", **numbers})
    assert out["phone"] == make().text("(212) 736-5000")
    assert out["phones"][0] == make().text("(212) 736-5001")
    assert re.fullmatch(r"1[1-8]\d\d-\d\d-\d\d", out["dob"])
    assert (out["ssn"], out["card_number"]) == (make().text("536-90-4399"), make().text("4111111111111111"))
    unlabelled = {"id": "2127365000", "created_at": "1984-05-03"}
    assert make().value(unlabelled) == unlabelled


def test_values_of_secret_fields_are_secrets() -> None:
    anonymizer = make()
    plain = {"passed": "yes", "token": "word", "max_tokens": "512", "key": "name"}
    masked = {"password": "[secret password]", "apiKey": "[secret token]", **plain}
    assert anonymizer.value({"password": 'a "b" c', "apiKey": H, **plain}) == masked
    assert anonymizer.counts == {"secret": 2}


def test_personal_keys_are_replaced_without_losing_any() -> None:
    out = make().value({"jane@gmail.com": 1, "JANE@gmail.com": 2, "city": 3})
    surrogate = make().text("jane@gmail.com")
    assert out == {surrogate: 1, f"{surrogate}#2": 2, "city": 3}
    assert make().value(out) == out


def test_deep_and_recursive_data_is_anonymized() -> None:
    deep: Any = "jane@gmail.com"
    for _ in range(20_000):
        deep = [{"x": deep}]
    out = make().value(deep)
    for _ in range(20_000):
        out = out[0]["x"]
    assert out == make().text("jane@gmail.com")
    ring: dict[str, Any] = {"mail": "jane@gmail.com"}
    ring["self"] = ring
    turned = make().value(ring)
    assert turned["self"]["self"]["mail"] == make().text("jane@gmail.com")


HOSTILE = {
    "digits": "1", "spaced digits": "1 ", "zeros": "0 ", "ats": "@", "names and ats": "a@", "dots": "a.",
    "mail": "a@b.", "long local": "a" * 50 + "@",
    "quotes": "\"'", "password quotes": "password='", "password colons": "password: ", "keys": "key=", "sk": "sk-",
    "eyJ": "eyJ-", "eyJ.": "eyJaaaaaaaa.",
    "tails": "_aaaaaaaaaaaaaaaaa", "begin": "-----BEGIN PRIVATE KEY-----!", "login": "://a:", "bearer": "bearer ",
    "parens": "(", "plus": "+1", "slashes": "\\",
    "escapes": "\\n", "colons": ":a", "macs": "aa:", "ips": "1.1.", "ibans": "DE12 ", "streets": "1 A B C ",
    "street": "Aaa ", "born": "born ", "dob": "born on the ",
    "labels": "phone is at ", "at dot": " at a dot", "names": "Jane Doe ", "shapes": "Person 3f2a91bc-", "braces": "{",
    "nul": "\0", "emoji": "👩‍👩‍👧",
    "surrogates": "\ud800", "big small letters": "İ", "blanks": " ", "lines": "\n", "hyphens": "1-",
    "SG": "SG.aaaaaaaaaaaaaaaaa", "urls": "https://a@",
    "capitals": "A", "short words": "Aa ", "fractions": "12/", "brackets": "(1", "calles": "Calle ", "calls": "call ",
    "initials": "12 A. ",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.timeout(30)  # a fifth of a second each; what is quadratic takes minutes
def test_hostile_texts_take_linear_time(name: str) -> None:
    unit = HOSTILE[name]
    for text in (unit * (100_000 // len(unit)), unit * (100_000 // len(unit)) + "x"):
        anonymizer = make()
        out = anonymizer.text(text, [JANE])
        anonymizer.value({text[:5000]: [text]}, [JANE])
        restore(out, anonymizer.table)


@given(st.text(max_size=100))
def test_lone_surrogates_and_control_characters_are_accepted(text: str) -> None:
    hostile = f"\ud800{text}\0 jane@gmail.com \udfff"
    out = make().text(hostile, [KnownValue("person", f"\ud800{text}x")])
    assert "jane@gmail.com" not in out


def test_numbers_in_json_texts_are_replaced_by_strings_where_they_must() -> None:
    for data in (
        {"x": 1, "phone": 2127365000, "y": 2},
        {"phone": 2127365000},
        {"ssn": 536904399, "cc": [4111111111111111]},
    ):
        for text in (json.dumps(data), json.dumps(data, separators=(",", ":")), json.dumps(data, indent=1)):
            assert json.loads(make().text(text)).keys() == data.keys()
            assert json.loads(json.loads(make().text(json.dumps(text)))).keys() == data.keys()
    assert type(json.loads(make().text('{"cc": 4111111111111111}'))["cc"]) is int
    assert make().text("phone: 2127365000, ok") == make().text("phone: (212) 736-5000, ok")


def test_the_longer_of_two_overlapping_matches_is_used_and_surrogates_are_not_split() -> None:
    assert matched("jane.doe@gmail.com", JANE) == [("email", "jane.doe@gmail.com")]
    values = {"organisation": "Example", "id": "555", "secret": "secret", "person": "Person Place"}
    known = [KnownValue(kind, value) for kind, value in values.items()]
    once = make().text("jane@gmail.com (212) 736-5000 tell the secret to Example of Person Place", known)
    assert make().text(once, known) == once


class SlowCounter(Counter[str]):
    def update(self, more: Any = None) -> None:  # type: ignore[override]
        for name, n in (more or {}).items():
            before = self[name]
            time.sleep(0.001)
            self[name] = before + n


def test_an_anonymizer_is_thread_safe() -> None:
    anonymizer = make()
    anonymizer.counts = SlowCounter()
    lines = [f"user{n}@gmail.com" for n in range(50)]
    out: list[list[str]] = []
    threads = [threading.Thread(target=lambda: out.append([anonymizer.text(line) for line in lines])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert out[0] == out[1] == out[2] == out[3]
    assert anonymizer.counts["email"] == 200


def test_cached_results_are_counted_and_depend_on_the_known_values() -> None:
    anonymizer = make()
    for _ in range(3):
        anonymizer.text("jane@gmail.com")
    assert anonymizer.counts == {"email": 3}
    assert anonymizer.text("Jane Doe") == "Jane Doe"
    assert anonymizer.text("Jane Doe", [KnownValue("person", "Jane Doe")]).startswith("Person ")
