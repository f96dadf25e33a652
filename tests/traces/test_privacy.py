"""Anonymization: detected and unchanged values, surrogates, restoring, hostile texts."""

import json
import os
import random
import re
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from assay.errors import ConfigError, DataError, MissingExtra
from assay.traces.privacy.anonymizer import TYPES, Anonymizer, KnownValue, restore
from assay.traces.privacy.key_files import key_of

KEY = b"0123456789abcdef"
JANE = KnownValue("person", "Jane Q. Doe")


def make(**settings: Any) -> Anonymizer:
    return Anonymizer(KEY, engine="patterns", **settings)


def matched(text: str, *known: KnownValue) -> list[tuple[str, str]]:
    return [(span.type, text[span.start : span.end]) for span in make().find(text, known)]


def luhn(digits: str) -> str:
    """Adds the check digit: every second digit from the right is doubled, and its digits added."""
    total = sum(sum(divmod(int(d) * (2 - at % 2), 10)) for at, d in enumerate(reversed(digits)))
    return digits + str(-total % 10)


def iban(country: str, account: str) -> str:
    """Adds the check digits: 98 minus the number's remainder by 97, letters as 10 to 35."""
    number = "".join(str(int(c, 36)) for c in account + country + "00")
    return f"{country}{98 - int(number) % 97:02d}{account}"


# -- detected values

PERSONAL = [
    ("mail jane.doe@gmail.com today", "email", "jane.doe@gmail.com"),
    ("<Jane+lists@Mail.Corp.io>", "email", "Jane+lists@Mail.Corp.io"),
    ("u=jane%40gmail.com&x=1", "email", "jane%40gmail.com"),
    ("jane [at] gmail [dot] com", "email", "jane [at] gmail [dot] com"),
    ("jane dot doe at gmail dot com", "email", "jane dot doe at gmail dot com"),
    (r'{"text": "Hi\njane@gmail.com"}', "email", "jane@gmail.com"),
    ("müller@gmail.com", "email", "müller@gmail.com"),
    ("邮箱jane@gmail.com", "email", "jane@gmail.com"),
    ("https://jane@bitbucket.org/x", "email", "jane@bitbucket.org"),
    ("call (212) 736-5000 x12 now", "phone", "(212) 736-5000 x12"),
    ("it is 212-736-5000.", "phone", "212-736-5000"),
    ("it is 212.736.5000", "phone", "212.736.5000"),
    ("it is +49 30 901820", "phone", "+49 30 901820"),
    ("it is +44 (0)20 7219 3000", "phone", "+44 (0)20 7219 3000"),
    ("it is 0049 30 901820", "phone", "0049 30 901820"),
    ("Paris 01 42 92 81 00", "phone", "01 42 92 81 00"),
    ("Berlin 030 9018 2000", "phone", "030 9018 2000"),
    ("phone: 2127365000", "phone", "2127365000"),
    (r"{\"phone_number\": \"212 736 5000\"}", "phone", "212 736 5000"),
    (r"hello\n(212) 736-5000", "phone", "(212) 736-5000"),
    (r"hello\ntel: 7365000", "phone", "7365000"),
    ("to DE89 3704 0044 0532 0130 00 and", "iban", "DE89 3704 0044 0532 0130 00"),  # the standard's own examples
    ("to gb82west12345698765432.", "iban", "gb82west12345698765432"),
    (r"x\nFR1420041010050500013M02606", "iban", "FR1420041010050500013M02606"),
    ("pay 4111 1111 1111 1111 123", "card", "4111 1111 1111 1111"),  # 4111…: doubled 8 + 2 x 7 = 22, others 8: 30
    ("pay 378282246310005 now", "card", "378282246310005"),
    ("card: 4 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1", "card", "4 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1"),
    ("it is 536-90-4399", "ssn", "536-90-4399"),
    ("SSN 536904399", "ssn", "536904399"),
    ("from 93.184.216.34:80", "ip", "93.184.216.34"),
    ("http://93.184.216.34/x", "ip", "93.184.216.34"),
    ("ip 5.6.7.8", "ip", "5.6.7.8"),
    ("ping 2a00:1450:4001:81b::200e ok", "ip", "2a00:1450:4001:81b::200e"),
    ("ping fe80::1 ok", "ip", "fe80::1"),
    ("a1b2:c3d4:e5f6:a7b8:c9d0:e1f2:a3b4:c5d6", "ip", "a1b2:c3d4:e5f6:a7b8:c9d0:e1f2:a3b4:c5d6"),
    ("ether 3c:22:fb:9a:01:7e", "mac", "3c:22:fb:9a:01:7e"),
    ("mac 3c22fb9a017e", "mac", "3c22fb9a017e"),
    ("3c22.fb9a.017e", "mac", "3c22.fb9a.017e"),
    ("born on 3 May 1984 in", "dob", "3 May 1984"),
    ('"dateOfBirth": "1984-05-03"', "dob", "1984-05-03"),
    ("DOB: 03/05/84", "dob", "03/05/84"),
    ("at 221B Baker Street, London", "address", "221B Baker Street"),
    ("at 12 Old Mill Road Apt 4, Leeds", "address", "12 Old Mill Road Apt 4"),
    ("in der Hauptstraße 12a, Köln", "address", "Hauptstraße 12a"),
    ("au 12 rue de la Paix", "address", "12 rue de la Paix"),
]


@pytest.mark.parametrize(("text", "kind", "value"), PERSONAL)
def test_personal_values_are_found(text: str, kind: str, value: str) -> None:
    assert matched(text) == [(kind, value)]


A, D, H = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ0123", "012345678901", "0123456789abcdef0123456789abcdef"
SECRETS = [
    (f"sk-proj-{A}", f"sk-proj-{A}", "openai-key"),
    (f"sk-ant-api03-{A}", f"sk-ant-api03-{A}", "anthropic-key"),
    (f"x ghp_{A}", f"ghp_{A}", "github-key"),
    (f"github_pat_{A}", f"github_pat_{A}", "github-key"),
    ("AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE", "aws-key"),
    (f"AIza{A[:35]}", f"AIza{A[:35]}", "google-key"),
    (f"xoxb-{D}-{D}-{A[:24]}", f"xoxb-{D}-{D}-{A[:24]}", "slack-key"),
    (f"sk_live_{A[:24]}", f"sk_live_{A[:24]}", "stripe-key"),
    (f"hf_{A[:34]}", f"hf_{A[:34]}", "huggingface-key"),
    (f"gsk_{A}", f"gsk_{A}", "service-key"),
    (rf"key\nsk-{A}", f"sk-{A}", "openai-key"),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln", "jwt"),
    (f"Authorization: Bearer {H}", H, "bearer"),
    ("postgresql://app:hunter2@db/x", "app:hunter2", "login"),
    ("https://me:p@ss@host/x", "me:p@ss", "login"),
    ("password=swordfish", "swordfish", "password"),
    ("DB_PASSWORD='two words'", "two words", "password"),
    ('{"passwd": "hunter2", "x": 1}', "hunter2", "password"),
    (r"{\"pwd\": \"hunter2\"}", "hunter2", "password"),
    ("password: swordfish\nnext", "swordfish", "password"),
    ("the password is hunter2.", "hunter2", "password"),
    ("İİİ password=hunter2", "hunter2", "password"),  # i and a dot above, each: longer in small letters
    ("a=1&client_secret=x9&b=2", None, ""),  # too short to be one
    ("a=1&client_secret=x9y8&b=2", "x9y8", "password"),
    (f"api_key: {H}", H, "token"),
    (f"AWS_SECRET_ACCESS_KEY={A}", A, "password"),
    ("curl -u admin:hunter2 http://x", "hunter2", "password"),
    ("mysql -p'hunter2' shop", "hunter2", "password"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\nab/+\n-----END RSA PRIVATE KEY-----", None, "private-key"),
    ("-----BEGIN PRIVATE KEY-----\nMIIEabc", None, "private-key"),
]


@pytest.mark.parametrize(("text", "value", "kind"), SECRETS)
def test_secrets_become_marks(text: str, value: str | None, kind: str) -> None:
    expected = text if not kind else text.replace(value, f"[secret {kind}]") if value else f"[secret {kind}]"
    assert make().text(text) == expected
    assert make().text(expected) == expected


def test_secrets_are_never_in_the_table() -> None:
    anonymizer = make()
    anonymizer.text(f"jane@gmail.com password=hunter2 sk-{A}", [KnownValue("secret", "open sesame")])
    assert anonymizer.text("say open sesame", [KnownValue("secret", "open sesame")]) == "say [secret known]"
    assert list(anonymizer.table.values()) == ["jane@gmail.com"]
    assert anonymizer.counts == {"email": 1, "secret": 3}


def test_a_secret_inside_a_personal_value_is_replaced_as_a_secret() -> None:
    assert make().text("https://jane:hunter2@gmail.com/x") == "https://[secret login]@gmail.com/x"
    key = "-----BEGIN PRIVATE KEY-----\nPerson 3f2a91bc 400000123456789012\n-----END PRIVATE KEY-----"
    assert make().text(f"a {key} b") == "a [secret private-key] b"


# -- what is left alone

CLEAN = """42 - 73 = -31
12/(3*4)
4.4228 and 3.14159265358979
2024-05-03 12:30:45,123
03.05.2024 12:30
345-234-5678 = -5567
123-45-6789 + 1
(345) * (234-5678)
x = 4111111111111111
4111111111111111 * 2
1717171717 and 1717171717171
4111111111119 is an article, 9111111111111110 of no issuer
card 4111111111111112
5 +4930901820
(7)+345678901
y +49.301820
+999 30 901820
(212) 555-0142
api_token: "abcdefghijklmnopqrstuvwxyz"
ping 8.8.8.8
0.1 + 0.2 = 0.30000000000000004
978-3-16-148410-0
02139-4307
550e8400-e29b-41d4-a716-446655440000
0123456789
01 02 03 04 05
0110101101
mode 0755 0644 0600
version 10.20.30.40 and v11.22.33.44, Chrome/120.13.14.15
see 1.2.3.4
127.0.0.1 0.0.0.0 255.255.255.0 8.8.8.8 192.0.2.7
a[1::2] std::vector dead::beef()
12:34:56
y = a@b.T + c@d.mean(0)
git@github.com:acme/shop.git
icon@2x.png left-pad@1.2.3
somebody@example.com
+1-212-555-0142
max_tokens=512, tokens = text.split()
password = getpass.getpass()
api_key = os.environ['API_KEY']
def login(user: str, password: str) -> None:
{"properties": {"password": {"type": "string"}}, "passage": "the text", "secretary": "a person"}
password=[secret password]
password: ****** or <your password>
The password must have 8 characters. The password is wrong.
sort_key=lambda token: token.start
risk-averse-investors-of-the-year-2024
Bearer certificates are transferable
Wall Street fell 3 points
DE89 3704 0044 0532 0130 01
4111 1111 1111 1112
000-12-3456
born in 1984
call id 12345678, function call 12345678
function_call(2127365000)
It was $1,234,567,890.12"""


@pytest.mark.parametrize("text", CLEAN.split("\n"))
def test_other_values_are_unchanged(text: str) -> None:
    anonymizer = make()
    assert anonymizer.text(text) is text
    assert not anonymizer.counts


numbers = st.one_of(
    st.integers(0, 10**7).map(str),
    st.decimals(0, 10**4, places=4).map(str),
    st.integers(0, 999).map("({})".format),
    st.integers(-99, -1).map(str),
)
operators = st.sampled_from([" + ", " - ", " * ", " / ", "+", "*", "/", "**", " % ", " × ", " ÷ "])


@example(terms=[("(0)", "+"), ("200", " - "), ("150", " - ")], last="10000", end=" is")  # +20 is Egypt's code
@given(st.lists(st.tuples(numbers, operators), max_size=8), numbers, st.sampled_from(["", " =", " = ?", " is"]))
def test_numbers_in_arithmetic_are_unchanged(terms: list[tuple[str, str]], last: str, end: str) -> None:
    text = "".join(number + operator for number, operator in terms) + last + end
    assert make().text(text) == text


@given(
    st.datetimes(),
    st.sampled_from(
        ["%Y-%m-%d %H:%M:%S", "%d.%m.%Y %H:%M", "%m/%d/%Y", "%Y%m%dT%H%M%SZ", "%H:%M:%S.%f", "%d %B %Y", "%d-%m-%Y"]
    ),
)
def test_dates_without_a_label_are_unchanged(when: Any, form: str) -> None:
    text = f"from {when:{form}} to {when:{form}}"
    assert make().text(text) == text


# -- surrogates

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


@settings(deadline=None)
@given(texts())
def test_anonymizing_twice_changes_nothing_the_second_time(drawn: tuple[str, list[tuple[str, str]]]) -> None:
    once = make().text(drawn[0])
    again = make()
    assert again.text(once) == once
    assert not again.counts


@settings(deadline=None)
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


@settings(deadline=None)
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


def test_of_a_growing_text_only_the_new_parts_are_anonymized_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    turns = [
        f"Turn {n}: user{n}@gmail.com says {' '.join(str(rng.random()) for _ in range(rng.randrange(80)))}"
        for n in range(60)
    ]
    anonymizer, uncached = make(), make()
    read: list[int] = []
    anonymise = Anonymizer._anonymise
    monkeypatch.setattr(
        Anonymizer, "_anonymise", lambda self, text, *rest: read.append(len(text)) or anonymise(self, text, *rest)
    )
    for n in range(1, 61):
        text = "\n\n".join(turns[:n])
        out = anonymizer.text(text)
    assert max(read) < 5000
    assert sum(read) < 60 * 5000 < len(text) * 30
    plain = "1 + 1 = 2\n\n" * 1000
    assert make().text(plain) is plain
    lines = make()
    assert "7365000" not in lines.text("and on and on and on, phone:\n7365000\n" * 300)
    key = "-----BEGIN PRIVATE KEY-----\n" + "MIIEab\n\n" * 1000 + "-----END PRIVATE KEY-----"
    assert make().text(f"{key} x") == "[secret private-key] x"
    monkeypatch.setattr("assay.traces.privacy.anonymizer._PART", 10**9)
    assert out == uncached.text(text)


@settings(deadline=None)
@given(texts())
def test_replaced_values_can_be_restored(drawn: tuple[str, list[tuple[str, str]]]) -> None:
    text, inside = drawn
    anonymizer = make()
    out = anonymizer.text(text)
    assert [value for _, value in inside if value in out] == []
    assert restore(out, anonymizer.table) == text
    assert anonymizer.counts.total() == len(inside)


@settings(deadline=None)
@given(st.lists(values, min_size=2, max_size=20, unique=True))
def test_different_values_get_different_surrogates(pairs: list[tuple[str, str]]) -> None:
    anonymizer = make()
    surrogates = [anonymizer.text(value) for _, value in pairs]
    assert len(set(surrogates)) == len(pairs)
    assert [anonymizer.text(value) for _, value in pairs] == surrogates
    assert {anonymizer.text(f"see {value} there") for _, value in pairs} == {
        f"see {surrogate} there" for surrogate in surrogates
    }


def test_values_with_the_same_hash_get_different_surrogates() -> None:
    rng = random.Random(0)
    phones = {f"({rng.randrange(200, 1000)}) {rng.randrange(200, 555)}-{n:04d}" for n in range(3000)}
    anonymizer, alone = make(), {make().text(phone) for phone in phones}
    assert len(alone) < len(phones)  # of 80,000 numbers, 3,000 times one at random: about 56 meet
    assert len({anonymizer.text(phone) for phone in phones}) == len(phones)


def test_running_out_of_surrogates_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "assay.traces.privacy.anonymizer._surrogate", lambda kind, value, digest, turn: "person00000000@example.org"
    )
    anonymizer = make()
    anonymizer.text("jane@gmail.com")
    with pytest.raises(DataError, match="'email' are used"):
        anonymizer.text("joe@gmail.com")


def test_exports_with_one_key_and_table_have_the_same_surrogates() -> None:
    rng = random.Random(1)
    phones = [f"({rng.randrange(200, 1000)}) {rng.randrange(200, 555)}-{n:04d}" for n in range(3000)]
    first = make()
    mapped = {phone: first.text(phone) for phone in phones}
    second, third = make(), make(table=first.table)
    backwards = {phone: second.text(phone) for phone in reversed(phones)}
    assert 0 < sum(backwards[phone] != mapped[phone] for phone in phones) < 150
    assert {phone: third.text(phone) for phone in reversed(phones)} == mapped
    names = [KnownValue("person", "Jane Doe")]
    assert make(table=first.table).text("Jane Doe", names) == make().text("Jane Doe", names)
    assert Anonymizer(b"another key, as long", engine="patterns").text(phones[0]) != mapped[phones[0]]
    assert Anonymizer(engine="patterns").text("jane@gmail.com") != Anonymizer(engine="patterns").text("jane@gmail.com")


@pytest.mark.parametrize(
    "spellings",
    [
        [
            "jane@gmail.com",
            "JANE@Gmail.com",
            "jane [at] gmail [dot] com",
            "jane at gmail dot com",
            "jane%40gmail.com",
            "jane @ gmail.com",
        ],
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


# -- what the caller knows


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
    assert matched("Will Young will be young, Young, Will", *known) == [
        ("person", "Will Young"),
        ("person", "Young, Will"),
    ]
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
    assert (
        matched(
            "to be or 42",
            KnownValue("person", "be"),
            KnownValue("id", "42"),
            KnownValue("id", ""),
            KnownValue("id", " "),
        )
        == []
    )
    assert matched("customer 4711-B", KnownValue("id", "4711-b")) == [("id", "4711-B")]


def test_an_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="type='custmer' must be one of"):
        KnownValue("custmer", "Jane")


# -- data


def test_data_keeps_its_form() -> None:
    data = {"a": [1, 2.5, None, True, {"b": ("x", b"y")}], 7: "jane@gmail.com", "n": 2127365000, "t": 1717171717171}
    out = make().value(data)
    assert out == {
        "a": [1, 2.5, None, True, {"b": ["x", b"y"]}],
        7: make().text("jane@gmail.com"),
        "n": 2127365000,
        "t": 1717171717171,
    }
    assert data["a"][4] == {"b": ("x", b"y")}  # type: ignore[index]


def test_field_names_serve_as_labels() -> None:
    out = make().value(
        {
            "phone": "2127365000",
            "phones": ["2127365001"],
            "dob": "1984-05-03",
            "ssn": 536904399,
            "card_number": 4111111111111111,
        }
    )
    assert out["phone"] == make().text("(212) 736-5000")
    assert out["phones"][0] == make().text("(212) 736-5001")
    assert re.fullmatch(r"1[1-8]\d\d-\d\d-\d\d", out["dob"])
    assert (out["ssn"], out["card_number"]) == (make().text("536-90-4399"), make().text("4111111111111111"))
    assert make().value({"id": "2127365000", "created_at": "1984-05-03"}) == {
        "id": "2127365000",
        "created_at": "1984-05-03",
    }


def test_values_of_secret_fields_are_secrets() -> None:
    anonymizer = make()
    assert anonymizer.value(
        {"password": 'a "b" c', "apiKey": H, "passed": "yes", "token": "word", "max_tokens": "512", "key": "name"}
    ) == {
        "password": "[secret password]",
        "apiKey": "[secret token]",
        "passed": "yes",
        "token": "word",
        "max_tokens": "512",
        "key": "name",
    }
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


# -- hostile texts

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
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_take_linear_time(name: str) -> None:
    unit = HOSTILE[name]
    for text in (unit * (200_000 // len(unit)), unit * (200_000 // len(unit)) + "x"):
        anonymizer = make()
        clock = time.monotonic()
        out = anonymizer.text(text, [JANE])
        anonymizer.value({text[:5000]: [text]}, [JANE])
        restore(out, anonymizer.table)
        assert time.monotonic() - clock < 20  # under a second each; what is quadratic takes minutes


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


def test_the_longer_of_two_matches_is_used_and_surrogates_are_not_split() -> None:
    assert matched("jane.doe@gmail.com", JANE) == [("email", "jane.doe@gmail.com")]
    known = [
        KnownValue("organisation", "Example"),
        KnownValue("id", "555"),
        KnownValue("secret", "secret"),
        KnownValue("person", "Person Place"),
    ]
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


# -- the table


def test_the_table_is_encrypted_and_its_key_is_in_another_folder(tmp_path: Path) -> None:
    anonymizer = make()
    out = anonymizer.text("mail jane@gmail.com, password=hunter2, \ud800", [KnownValue("person", "mail")])
    table, key = tmp_path / "export" / "table.bin", tmp_path / "keys" / "table.key"
    anonymizer.save_table(table, key)
    assert b"jane" not in table.read_bytes()
    assert stat.S_IMODE(os.stat(key).st_mode) == stat.S_IMODE(os.stat(table).st_mode) == 0o600
    loaded = Anonymizer.read_table(table, key)
    assert loaded == anonymizer.table
    assert restore(out, loaded) == "mail jane@gmail.com, password=[secret password], \ud800"
    secret = key.read_bytes()
    assert key_of(key) == secret
    anonymizer.text("joe@gmail.com")
    anonymizer.save_table(table, key)
    assert key.read_bytes() == secret
    assert "joe@gmail.com" in Anonymizer.read_table(table, key).values()


def test_a_key_in_the_folder_of_the_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "export")
    for key in ("export/key", "export/deeper/key", "link/key", "export/../export/key"):
        with pytest.raises(ConfigError, match="is inside the table's folder"):
            make().save_table(tmp_path / "export" / "table", tmp_path / key)
    assert not list(tmp_path.glob("**/key"))


def test_a_key_file_is_never_readable_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "chmod", lambda *_: None)
    key_of(tmp_path / "key")
    assert stat.S_IMODE(os.stat(tmp_path / "key").st_mode) == 0o600


def test_an_invalid_key_or_one_that_others_can_read_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    make().save_table(tmp_path / "a" / "table", key)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        make().save_table(tmp_path / "a" / "table", key)
    key.chmod(0o600)
    key.write_text("not a key")
    with pytest.raises(ConfigError, match="does not contain a key"):
        make().save_table(tmp_path / "a" / "table", key)


def test_a_table_with_another_key_or_of_a_newer_assay_is_refused(tmp_path: Path) -> None:
    from cryptography.fernet import Fernet

    make().save_table(tmp_path / "a" / "table", tmp_path / "k1")
    make().save_table(tmp_path / "b" / "table", tmp_path / "k2")
    with pytest.raises(DataError, match="InvalidToken"):
        Anonymizer.read_table(tmp_path / "a" / "table", tmp_path / "k2")
    with pytest.raises(DataError, match="No such file"):
        Anonymizer.read_table(tmp_path / "nothing", tmp_path / "k2")
    newer = Fernet((tmp_path / "k1").read_bytes()).encrypt(json.dumps({"version": 99, "surrogates": {}}).encode())
    (tmp_path / "a" / "table").write_bytes(newer)
    with pytest.raises(DataError, match="version 99"):
        Anonymizer.read_table(tmp_path / "a" / "table", tmp_path / "k1")


def test_without_cryptography_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.fernet", None)
    for use in (make().save_table, Anonymizer.read_table):
        with pytest.raises(MissingExtra, match=r"assay\[privacy\]"):
            use(tmp_path / "a" / "table", tmp_path / "key")
    with pytest.raises(MissingExtra, match=r"assay\[privacy\]"):
        key_of(tmp_path / "key")
    assert not (tmp_path / "key").exists()


# -- engines


def test_a_short_key_and_an_unknown_engine_are_refused() -> None:
    with pytest.raises(ConfigError, match="key has 5 bytes"):
        Anonymizer(b"short")
    with pytest.raises(ConfigError, match="engine='spacy' must be one of"):
        Anonymizer(KEY, engine="spacy")


def test_patterns_find_no_names_and_report_it() -> None:
    anonymizer = make()
    assert (anonymizer.engine_name, anonymizer.finds_names) == ("patterns", False)
    assert anonymizer.text("Jane Doe of Leeds") == "Jane Doe of Leeds"


def test_without_presidio_auto_uses_patterns_and_presidio_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "presidio_analyzer", None)
    monkeypatch.setattr("assay.traces.privacy.gazetteers.available", lambda: False)
    assert (Anonymizer(KEY).engine_name, Anonymizer(KEY).finds_names) == ("patterns", False)
    with pytest.raises(MissingExtra, match="'presidio-analyzer' is not installed"):
        Anonymizer(KEY, engine="presidio")


def test_the_module_loads_no_optional_package() -> None:
    code = (
        "import assay.traces.privacy.anonymizer, sys; print({'spacy', 'presidio_analyzer', 'cryptography.fernet', "
        "'faker'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_presidio_without_a_model_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("presidio_analyzer")
    spacy = pytest.importorskip("spacy")
    monkeypatch.setattr(spacy.util, "get_installed_models", lambda: [])
    for engine in ("auto", "presidio"):
        anonymizer = Anonymizer(KEY, engine=engine)
        assert (anonymizer.engine_name, anonymizer.finds_names) == ("presidio/none", False)
        assert anonymizer.text("Jane Doe, jane@gmail.com").startswith("Jane Doe, person")


def test_presidio_finds_names_and_agrees_with_what_is_known() -> None:
    pytest.importorskip("presidio_analyzer")
    anonymizer = Anonymizer(KEY, engine="auto")
    if not anonymizer.finds_names:
        pytest.skip("no English model of spaCy is installed")
    assert anonymizer.engine_name.startswith("presidio/en_")
    text = "Yesterday John Smith met Mary Jones in Berlin.\nThe answer to 42 - 73 is -31."
    out = anonymizer.text(text)
    assert anonymizer.counts == {"person": 2, "place": 1}
    assert Anonymizer(KEY, engine="auto").text(out) == out
    assert restore(out, anonymizer.table) == text
    assert make().text("John Smith", [KnownValue("person", "John Smith")]) in out
    assert anonymizer.value({"John Smith": 1}) == {"John Smith": 1}


# -- the documentation


def test_the_example_in_the_documentation_works(own_folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "privacy.md").read_text()
    block = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert block
    names: dict[str, Any] = {"key": KEY}
    exec(block[1], names)
    assert re.fullmatch(r"Person [0-9a-f]{8}-[0-9a-f]{8}, person[0-9a-f]{8}@example\.org", names["text"])
    assert names["data"]["phone"].startswith("+1-")
    assert restore(names["text"], names["anonymizer"].table) == "Jane Doe, jane@gmail.com"
    assert (own_folder / "keys" / "table.key").exists()
