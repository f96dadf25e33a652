"""Anonymization: detected and unchanged values."""

import pytest
from hypothesis import example, given, strategies as st
from privacy_values import A, D, H, make, matched

from assay.traces.privacy.names import KnownValue

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
    ("https://jane:hunter2@gmail.com/x", "jane:hunter2", "login"),  # and not as an address
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
    ("-----BEGIN PRIVATE KEY-----\nPerson 3f2a91bc 400000123456789012\n-----END PRIVATE KEY-----", None, "private-key"),
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
def test_values_without_personal_data_are_unchanged(text: str) -> None:
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
