"""Anonymization: surrogates, their restoring, and what the caller knows."""

import json
import random
import re
from ipaddress import ip_address
from typing import Any

import pytest
from hypothesis import example, given, strategies as st
from privacy_values import make, matched

from assay.errors import ConfigError, DataError
from assay.traces.privacy.anonymizer import Anonymizer, restore
from assay.traces.privacy.names import TYPES, KnownValue


def luhn(digits: str) -> str:
    """Adds the check digit: every second digit from the right is doubled, and its digits added."""
    total = sum(sum(divmod(int(d) * (2 - at % 2), 10)) for at, d in enumerate(reversed(digits)))
    return digits + str(-total % 10)


def iban(country: str, account: str) -> str:
    """Adds the check digits: 98 minus the number's remainder by 97, letters as 10 to 35."""
    number = "".join(str(int(c, 36)) for c in account + country + "00")
    return f"{country}{98 - int(number) % 97:02d}{account}"


digits = st.text("0123456789", min_size=9, max_size=9)


VALUES = {
    "email": st.from_regex(r"[a-z]{3,8}\.[a-z]{3,8}@[a-z]{3,8}\.(com|de|org)", fullmatch=True).filter(
        lambda v: "example" not in v
    ),
    "phone": st.tuples(st.integers(200, 999), st.integers(200, 554), st.integers(0, 9999)).map(
        lambda p: f"{p[0]}-{p[1]}-{p[2]:04d}"
    ),
    "iban": digits.map(lambda d: iban("DE", d * 2)),
    "card": digits.map(lambda d: luhn("411111" + d)),
    "ssn": st.tuples(st.integers(1, 665), st.integers(1, 99), st.integers(1, 9999)).map(
        lambda p: f"{p[0]:03d}-{p[1]:02d}-{p[2]:04d}"
    ),
    "ip": st.integers(int(ip_address("12.10.10.10")), int(ip_address("99.99.99.99"))).map(lambda n: str(ip_address(n))),
    "mac": st.integers(0x1000000000, 0xFEFFFFFFFFFF)
    .map(lambda n: re.sub(r"(..)(?!$)", r"\1:", f"{n:012x}"))
    .filter(lambda v: len(set(v)) > 3),
}


values = st.one_of([strategy.map(lambda value, kind=kind: (kind, value)) for kind, strategy in VALUES.items()])


words = st.text(
    st.characters(codec="utf-8", categories=["L", "Po", "Zs", "Sm"], exclude_characters="@=:'\"\\%/&.,*^+×÷()[]{}<>|-"),
    max_size=12,
)


@st.composite
def texts(draw: Any) -> tuple[str, list[tuple[str, str]]]:
    """A text, and the values in it in their order; what stands around them is short and of letters."""
    inside = draw(st.lists(values, max_size=5))
    return " ; ".join([draw(words), *(f"{value} ; {draw(words)}" for _, value in inside)]), inside


@given(st.text(max_size=200), st.text(max_size=30))
def test_a_second_anonymization_changes_no_text(text: str, name: str) -> None:
    known = [KnownValue("person", name), KnownValue("id", name[::-1])]
    once = make().text(text + name, known)
    assert make().text(once, known) == once


around = st.lists(
    st.one_of(
        values.map(lambda drawn: drawn[1]),
        st.sampled_from(["phone:", "password", "=", ":", "born on", "Jane", "Doe", "\n", " ", "7365000", "5 *", "v"]),
    ),
    max_size=6,
).map(lambda pieces: "".join(pieces).strip())


@given(around, around)
@example("phone:", "7365000")
@example("password =", "hunter2")
@example("Jane", "Doe")
@example("born on", "3 May 1984")
@example("5", "+4930901820")
def test_no_match_crosses_an_empty_line(first: str, second: str) -> None:
    known = [KnownValue("person", "Jane Doe")]
    separately = make().text(first, known) + "\n\n" + make().text(second, known)
    assert make().text(f"{first}\n\n{second}", known) == separately


@pytest.mark.parametrize(
    "text", ["x " * 1600 + "\n\n", "x " * 1600 + "\n\n\n", "x " * 750 + "\n\n" + "y " * 1600 + "\n\n"]
)
def test_a_long_text_that_ends_in_an_empty_line_is_read(text: str) -> None:
    assert make().text(text) == text
    assert "jane@gmail.com" not in make().text(f"jane@gmail.com {text}")


def test_a_growing_text_is_anonymized_as_a_whole_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    turns = [f"Turn {n}: user{n}@gmail.com says {' '.join(str(rng.random()) for _ in range(40))}" for n in range(60)]
    anonymizer, uncached = make(), make()
    for n in range(1, 61):
        out = anonymizer.text("\n\n".join(turns[:n]))
    plain = "1 + 1 = 2\n\n" * 1000
    assert make().text(plain) is plain
    assert "7365000" not in make().text("and on and on and on, phone:\n7365000\n" * 300)
    key = "-----BEGIN PRIVATE KEY-----\n" + "MIIEab\n\n" * 1000 + "-----END PRIVATE KEY-----"
    assert make().text(f"{key} x") == "[secret private-key] x"
    monkeypatch.setattr("assay.traces.privacy.anonymizer.PART_CHARS", 10**9)
    assert out == uncached.text("\n\n".join(turns))


@given(texts())
def test_replaced_values_can_be_restored_and_are_not_replaced_again(drawn: tuple[str, list[tuple[str, str]]]) -> None:
    text, inside = drawn
    anonymizer = make()
    out = anonymizer.text(text)
    assert [value for _, value in inside if value in out] == []
    assert restore(out, anonymizer.table) == text
    assert anonymizer.counts.total() == len(inside)
    again = make()
    assert again.text(out) == out  # no surrogate is a personal value
    assert not again.counts


def test_running_out_of_surrogates_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "assay.traces.privacy.anonymizer.surrogate_of", lambda kind, value, digest, turn: "person00000000@example.org"
    )
    anonymizer = make()
    anonymizer.text("jane@gmail.com")
    with pytest.raises(DataError, match="'email' are used"):
        anonymizer.text("joe@gmail.com")


def test_exports_with_one_key_and_table_have_the_same_surrogates() -> None:
    rng = random.Random(1)
    phones = [f"({rng.randrange(200, 1000)}) {rng.randrange(200, 555)}-{n:04d}" for n in range(1000)]
    first = make()
    mapped = {phone: first.text(phone) for phone in phones}
    second, third = make(), make(table=first.table)
    assert len(set(mapped.values())) == len(phones)  # of 80,000 numbers, 1,000 times one at random: about 6 meet
    backwards = {phone: second.text(phone) for phone in reversed(phones)}
    assert 0 < sum(backwards[phone] != mapped[phone] for phone in phones) < 50
    assert {phone: third.text(phone) for phone in reversed(phones)} == mapped
    names = [KnownValue("person", "Jane Doe")]
    assert make(table=first.table).text("Jane Doe", names) == make().text("Jane Doe", names)
    assert Anonymizer(b"another key, as long", engine="patterns").text(phones[0]) != mapped[phones[0]]
    assert Anonymizer(engine="patterns").text("jane@gmail.com") != Anonymizer(engine="patterns").text("jane@gmail.com")


@pytest.mark.parametrize(
    "spellings",
    [
        ["jane@gmail.com", "JANE@Gmail.com", "jane [at] gmail [dot] com", "jane at gmail dot com", "jane @ gmail.com"],
        ["jane@gmail.com", "jane%40gmail.com"],
        ["(212) 736-5000", "212-736-5000", "212.736.5000", "+1 212 736 5000", "1-212-736-5000", "phone 2127365000"],
        ["+49 30 901820", "+4930901820", "0049 30 901820"],
        ["DE89370400440532013000", "de89 3704 0044 0532 0130 00", "DE89-3704-0044-0532-0130-00"],
        ["4111111111111111", "4111-1111-1111-1111", "4111 1111 1111 1111"],
        ["536-90-4399", "ssn 536 90 4399"],
        ["2a00:1450:4001:81b::200e", "2A00:1450:4001:081B:0:0:0:200E"],
        ["3c:22:fb:9a:01:7e", "3C-22-FB-9A-01-7E", "3c22.fb9a.017e"],
    ],
)
def test_spellings_of_one_value_get_the_same_surrogate(spellings: list[str]) -> None:
    anonymizer = make()
    assert len({re.sub(r"^(phone|ssn) ", "", anonymizer.text(spelling)) for spelling in spellings}) == 1


def test_surrogates_have_the_format_of_their_type_and_are_reserved_values() -> None:
    out = make().text(
        "jane@gmail.com 212-736-5000 DE89370400440532013000 4111111111111111 536-90-4399 93.184.216.34 "
        "2a00:1450:4001:81b::200e"
    )
    email, phone, account, card, ssn, v4, v6 = out.split()
    assert re.fullmatch(r"person[0-9a-f]{8}@example\.org", email)
    assert re.fullmatch(r"\+1-[2-9]\d\d-555-01\d\d", phone)
    assert re.fullmatch(r"DE00\d{18}", account)
    assert re.fullmatch(r"400000\d{10}", card)
    assert luhn(card[:-1]) != card
    assert ssn[:3] in ("000", "666")
    assert ip_address(v4).is_reserved
    assert v6.startswith("2001:db8:")
    assert str(ip_address(v6)) == v6
    assert re.fullmatch(r"born 1[1-8]\d\d-\d\d-\d\d", make().text("born 3 May 1984"))
    assert re.fullmatch(r"at Address [0-9a-f]{8}", make().text("at 12 Main Street"))


def test_no_surrogate_is_detected_as_a_personal_value() -> None:
    for kind in TYPES:
        for value in ("Some Value", "ab", "93.184.216.34", "::1", "x" * 60):
            known = [KnownValue(kind, value)]
            once = make().text(f"so: {value}!", known)
            assert (value in once) == (len(value) < 3)
            assert make().text(once, known) == once
            assert make().text(once) == once
            if kind != "secret":
                anonymizer = make()
                anonymizer.text(f"so: {value}!", known)
                assert restore(once, anonymizer.table) == f"so: {value}!"


def test_a_known_person_is_replaced_everywhere() -> None:
    anonymizer = make()
    full = anonymizer.text("Jane Doe", [KnownValue("person", "Jane Doe")])
    jane, doe = full.removeprefix("Person ").split("-")
    for text, expected in [
        ("JANE  DOE's", f"{full}'s"),
        ("jane\ndoe", full),
        ("Doe, Jane", f"Person {doe}-{jane}"),
        ("Jane and doe", f"Person {jane} and Person {doe}"),
        (r"Hi\nJane", rf"Hi\nPerson {jane}"),
        ("Janet, a doer, jane_doe", "Janet, a doer, jane_doe"),
    ]:
        assert anonymizer.text(text, [KnownValue("person", "Jane Doe")]) == expected
    assert restore(f"{full} Person {doe}", anonymizer.table) == "Jane Doe Doe"


def test_names_that_are_also_words_are_replaced_only_as_full_names() -> None:
    known = [KnownValue("person", "Will Young")]
    both = [("person", "Will Young"), ("person", "Young, Will")]
    assert matched("Will Young will be young, Young, Will", *known) == both
    assert matched("Will WILL will", KnownValue("person", "Will")) == [("person", "Will"), ("person", "WILL")]
    assert matched("will smithson go to Al", KnownValue("person", "Al Smithson")) == [("person", "smithson")]


def test_known_values_are_found_as_json_writes_them() -> None:
    known = [KnownValue("person", "José Núñez"), KnownValue("place", "Örebro")]
    anonymizer = make()
    plain = anonymizer.text("José Núñez, ÖREBRO", known)
    for text in ("José Núñez, Örebro", "josé núñez, örebro"):
        once = json.dumps(text)
        assert json.loads(anonymizer.text(once, known)) == plain
        assert json.loads(json.loads(anonymizer.text(json.dumps(once), known))) == plain
    first = make()
    assert restore(first.text(json.dumps("José Núñez"), known), first.table) == '"José Núñez"'


def test_known_values_of_two_letters_are_ignored() -> None:
    short = [KnownValue("person", "be"), *(KnownValue("id", value) for value in ("42", "", " "))]
    assert matched("to be or 42", *short) == []
    assert matched("customer 4711-B", KnownValue("id", "4711-b")) == [("id", "4711-B")]


def test_an_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="type='custmer' must be one of"):
        KnownValue("custmer", "Jane")
