"""Texts of the privacy benchmark: templates with personal values, and texts without any."""

import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from faker import Faker
from personal_values import ALNUM, HEX, VALUES, run

from assay.traces.privacy.names import KnownValue

LOCALES = ["en_US", "en_GB", "de_DE", "fr_FR", "es_ES", "it_IT", "nl_NL", "pl_PL", "pt_BR", "sv_SE", "en_IN", "cs_CZ"]


@dataclass(frozen=True)
class Text:
    """One text, with what is personal in it: (type, hard, start, end)."""

    text: str
    gold: tuple[tuple[str, bool, int, int], ...] = ()
    known: tuple[KnownValue, ...] = ()


# -- templates: {type} is a value; what stands around it is not personal


TEMPLATES = [
    "Please write to {email} before the end of the week, the 42 pages are due.",
    "From: {person} <{email}>\nTo: {email}\nSubject: Re: invoice 2024-118\n\nThanks, I got it.",
    "Contact: {email}, {phone}",
    "Her address is {email}.",
    "cc {email}; {email}",
    "I tried {email} twice and it bounced (550 5.1.1).",
    "mailto:{email}?subject=Hello",
    "https://shop.test/unsubscribe?u={email}&list=7",
    "user={email} action=login status=200 took 31ms",
    "| {person} | {email} | {phone} |",
    "<a href='mailto:{email}'>{person}</a>",
    "You can call me at {phone} after 5 pm.",
    "Phone: {phone}",
    "my number is {phone} if anything comes up",
    "Tel. {phone} / Fax {phone}",
    "Reach {person} on {phone}.",
    "The caller ({phone}) asked for a refund of 42.50.",
    "{phone} called twice today, please ring back.",
    "WhatsApp {phone} or write to {email}",
    "tel:{phone}",
    "Mobile {phone}, room 204",
    "SMS from {phone}: your code is 4821",
    "Wire it to {iban} by Friday.",
    "IBAN: {iban}, BIC: COBADEFFXXX",
    "Refund to account {iban} (42.00 EUR).",
    "My card number is {card}, exp 04/29, cvv 123",
    "Charge {card} for 3 x 14.50",
    "card={card};amount=12.99",
    "The customer typed '{card}' in the comment field.",
    "SSN: {ssn}",
    "his social security number is {ssn}, please verify",
    "Applicant {person}, SSN {ssn}, born {dob}",
    "Taxpayer {ssn} filed on 2024-04-15.",
    "Failed login from {ip} port 52314 ssh2",
    '{ip} - - [03/May/2024:12:30:45 +0000] "GET /index.html HTTP/1.1" 200 5123',
    "ping {ip} gave 4 packets, 0 lost, 12.3 ms",
    "http://{ip}:8080/health returned 503",
    "The server at {ip} does not answer.",
    "Client IP {ip}, user agent Mozilla/5.0 Chrome/120.0.0.0",
    "wlan0: associated with {mac} (aid 3)",
    "ether {mac} txqueuelen 1000",
    "Device MAC {mac} was seen at 12:30:45",
    "Date of birth: {dob}",
    "DOB {dob}, female, 62 kg",
    "She was born on {dob} in the county hospital.",
    "patient {person}, birthdate {dob}, admitted with a fever of 39.4",
    "Ship to {address}.",
    "I moved from {address} to {address} last year.",
    "Deliver 3 boxes to {person}, {address}, {place}",
    "Dear {person},\nthank you for your order.",
    "My name is {person} and I live in {place}.",
    "{person} asked whether 42 - 73 is negative.",
    "I spoke with {person} about it; {person} agreed.",
    "Assistant: Hello {person}, how can I help you today?",
    "Passenger {person} from {place} to {place}, seat 14C",
    "The flat in {place} belongs to {person}'s mother.",
    "user: what is the weather in {place}?",
    "password: {password}",
    "PASSWORD={password}",
    "The password is {password}, do not share it.",
    "mysql -u root -p'{password}' shop",
    "postgresql://app:{password}@db.internal:5432/shop",
    "https://deploy:{password}@git.internal/repo.git",
    "db_password = '{password}'",
    "curl -u admin:{password} http://localhost:8080/",
    "export OPENAI_API_KEY={key}",
    "Authorization: Bearer {key}",
    "I accidentally pasted {key} into the chat",
    "client = Client(api_key='{key}')",
    "git clone https://{key}@github.com/acme/shop.git",
    "token: {key}",
    "AWS_SECRET_ACCESS_KEY={opaque}",
    "api_key: {opaque}",
    "x-api-key: {opaque}",
    "Authorization: Bearer {opaque}",
    "client_secret={opaque}&grant_type=client_credentials",
    "secret = '{opaque}'",
    "cat ~/.ssh/id_rsa\n{pem}\nexit code 0",
    "Here is my key:\n{pem}",
]


FIELDS = {  # names as tool arguments have them
    "email": ["email", "recipient", "to"],
    "phone": ["phone", "phoneNumber", "contact_number"],
    "iban": ["iban", "account"],
    "card": ["card_number", "cc"],
    "ssn": ["ssn", "taxId"],
    "ip": ["ip", "host", "remote_addr"],
    "mac": ["mac", "device"],
    "dob": ["date_of_birth", "dob", "birthDate"],
    "address": ["street", "address"],
    "person": ["customer", "full_name", "name"],
    "place": ["city", "destination"],
    "password": ["password", "passwd", "pwd"],
    "key": ["api_key", "token", "value"],
    "opaque": ["access_token", "client_secret", "apiKey"],
}


def fill(template: str, rng: random.Random, fake: Any) -> Text:
    out, gold = "", []
    for literal, field, _, _ in string.Formatter().parse(template):
        out += literal
        if field:
            value, hard = VALUES[field](rng, fake[rng.choice(LOCALES)])
            gold.append((field, hard, len(out), len(out) + len(value)))
            out += value
    return Text(out, tuple(gold))


def within(outer: str, inner: Text, encode: Callable[[str], str]) -> Text:
    """The text inside `outer` (at its mark \\x00), written as `encode` writes it."""
    before, after = outer.split("\0")
    gold = tuple(
        (kind, hard, len(before) + len(encode(inner.text[:start])), len(before) + len(encode(inner.text[:end])))
        for kind, hard, start, end in inner.gold
    )
    return Text(before + encode(inner.text) + after, gold)


def quoted(text: str) -> str:
    return json.dumps(text)[1:-1]


def twice(text: str) -> str:
    return quoted(quoted(text))


SHAPES: list[tuple[str, Callable[[str], str]]] = [
    ("\0", str), ("\0", str), ("\0", str),
    ("User: \0\nAssistant: Let me look. 12/(3*4) = 1.", str),
    ("[[ ## question ## ]]\n\0\n\n[[ ## reasoning ## ]]\nStep 1: 42 - 73 = -31.\n", str),
    ('[{"role": "user", "content": "\0"}]', quoted),
    ('{"name": "send", "arguments": "{\\"text\\": \\"\0\\"}"}', twice),
    ("Observation: \0\nThought: I now know the answer.", str),
    ("2024-05-03 12:30:45,123 INFO worker-3 \0", str),
    ("> \0\n> -- \nquoted by the mail program", str),
]  # fmt: skip


def arguments_of(rng: random.Random, fake: Any) -> Text:
    """A tool call's arguments as JSON."""
    out, gold = f'{{"name": "update_record", "arguments": {{"id": {rng.randrange(10**6)}', []
    for kind in rng.sample(sorted(FIELDS), 3):
        value, hard = VALUES[kind](rng, fake[rng.choice(LOCALES)])
        out += f', "{rng.choice(FIELDS[kind])}": "'
        gold.append((kind, hard, len(out), len(out) + len(quoted(value))))
        out += quoted(value) + '"'
    return Text(out + "}}", tuple(gold))


def personal(size: int, seed: int) -> list[Text]:
    rng, fake = random.Random(seed), Faker(LOCALES)
    Faker.seed(seed)
    texts = []
    for at in range(size):
        if at % 5 == 4:
            texts.append(arguments_of(rng, fake))
        else:
            texts.append(
                within(
                    *(lambda shape: (shape[0], fill(TEMPLATES[at % len(TEMPLATES)], rng, fake), shape[1]))(
                        rng.choice(SHAPES)
                    )
                )
            )
    return texts


# -- clean texts: nothing in them is anybody's


CLEAN = [
    "{a} - {b} = {d}",
    "What is {a} - {b} + {c}?",
    "({a} + {b}) * {c} / {s} = {f}",
    "{a}-{b}-{g}",
    "12/(3*4) is 1, and {f} * {f} is about {f}.",
    "Thought: I need {g} divided by {s}.\nAction: calculator\nAction Input: {g} / {s}\nObservation: {f}",
    "{g} {g} {g}\n{g} {g} {g}",
    "sum([{a}, {b}, {c}, {g}]) -> {g}",
    "{a} x {b} = {g}; {g} : {a} = {b}",
    "Compute {g}{g}{g} mod {a}.",
    "0.{g}{g} + 0.{g} = 0.{g}",
    "+{a} -{b} +{c} -{g}",
    "{n10}-{n10}",
    "{n10} + {n10} = {n11}",
    "1{a}-{b}-{n4} = ?",
    "({a}) {b}-{n4} simplifies to {g}",
    "x = {n16}; y = x * {s}",
    "{n16} * {s} = {n16}{s}",
    "{y}-{mo}-{dd} {hh}:{mi}:{ss}",
    "{dd}.{mo}.{y}",
    "{mo}/{dd}/{y}",
    "{y}-{mo}-{dd}T{hh}:{mi}:{ss}.{g}Z",
    "from {y}{mo}{dd} to {y}{mo}{dd}",
    "timestamp {n10}, {n13} ms",
    "version {v}.{v}.{v}.{v}",
    "Chrome/{a}.0.{n4}.{b} Safari/{a}.36",
    "numpy=={v}.{v}.{v}\ntorch=={v}.{v}.{v}+cu{a}",
    "upgrade from v{v}.{v}.{v}.{v} to v{v}.{v}.{v}.{v}",
    "see section {s}.{s}.{s}.{s} of the manual",
    "build {v}.{v}.{n5}.{v}",
    "actions/checkout@v4.{s}.{s}",
    "react@{v}.{v}.{v}",
    "{hex40}",
    "sha256:{hex64}",
    "uuid {uuid}",
    "commit {hex7} touched {a} files (+{b}, -{c})",
    "ISBN 978-3-16-14{n4}-0",
    "ISBN 0-306-40615-2",
    "ISSN 0317-8471",
    "doi:10.{n4}/s{n5}-0{a}-{n5}-x",
    "arXiv:24{mo}.{n5}",
    "order {a}-{n7}-{n7} shipped",
    "ticket #{n7} (was #{n7})",
    "invoice {y}-{n5}",
    "row {n7}: {f}, {f}, {f}",
    "lat {f2}, lon -{f2}",
    "tracking number 1Z{n10}{n7}",
    "def add(a, b):\n    return a + b\n\nassert add({a}, {b}) == {g}",
    "@dataclass\nclass Point:\n    x: int = {a}\n    y: int = {b}",
    "y = a@b.T + c@d.mean(0)",
    "tokens = text.split()\nmax_tokens = {n4}",
    "password = getpass.getpass()",
    "api_key = os.environ['API_KEY']",
    "def login(user: str, password: str) -> None: ...",
    '{{"prompt_tokens": {n4}, "completion_tokens": {a}, "total_tokens": {n5}}}',
    '{{"id": "call_{alnum24}", "type": "function", "function": {{"name": "add", "arguments": "{{}}"}}}}',
    '{{"type": "object", "properties": {{"password": {{"type": "string"}}}}, "required": ["password"]}}',
    "The password must have at least 8 characters.",
    "sort_key=lambda token: token.start",
    "key: value\nother_key: {a}",
    "for key, value in table.items():",
    "secret santa is on {dd} December",
    "the token is then passed to the next layer",
    "0x{hex8} 0x{hex8}",
    "{hh}:{mi}:{ss} --> {hh}:{mi}:{ss},{a}",
    "1.e4 e5 2.Nf3 Nc6 3.Bb5 a6",
    "\\frac{{{a}}}{{{b}}} + \\sqrt{{{g}}}",
    "{f}e-{dd} +/- {f}e-{dd}",
    "127.0.0.1 localhost",
    "listening on 0.0.0.0:8000",
    "netmask 255.255.255.0",
    "http://localhost:8080/v1/models",
    "mail somebody@example.com for help",
    "std::vector<int> v{{{a}, {b}}};",
    "a[1::2] + b[::3]",
    "dead::beef()",
    "epoch {s}/{dd}: loss {f}, lr {f}e-5, {a}.{b} it/s",
    "p. {a}-{b}, vol. {dd} ({y}) {n4}-{n4}",
    "{a},{b},{c}\n{n4},{n5},{n7}\n",
    "RFC {n4}, ISO {n4}-{s}:{y}",
    "mode 0755 0644 0600",
    "0 1 1 2 3 5 8 13 21 34 55 89 144 233 377",
    "01 02 03 04 05 06 07 08",
    "3.14159265358979323846",
    "1,234,567,890 people",
    "USD {n7}.{dd} at {f} %",
    "{dd} {dd} {dd} {dd} {dd}",
    "{b} {c} {n4}",
    "zip codes {n5}, {n5} and {n5}-{n4}",
    "EAN {n13}",
    "The call took {n7} cycles; phone it in {dd} times.",
    "function call {n10} returned {n7}",
    "git@github.com:acme/shop.git",
    "npm install left-pad@1.{s}.{s}",
    "icon@2x.png",
    "model-name_with-many-parts_and-a-long-tail_of_words_v{s}",
    "the-quick-brown-fox-jumps-over-the-lazy-dog",
    "Traceback (most recent call last):\n  File \"/app/main.py\", line {a}, in run\nKeyError: 'token'",
    "a token of {a} characters; key idea: {b} steps",
    "risk-averse-investors-{y}-{mo}",
]


PROSE = [  # nothing here is anybody's, yet a name model may think so: what it takes here it takes from the task
    "What is the capital of France?",
    "The Great Wall is longer than the Amazon River in some retellings.",
    "Summarise Hamlet in two sentences.",
    "Einstein's equation relates mass and energy.",
    "Translate 'Good morning' into German.",
    "A train leaves Boston at {hh}:{mi} at {a} km/h.",
    "Alice has {a} apples, Bob has {b}.",
    "Use Python, Rust or Java; avoid Perl.",
    "Solve for X: {a}X + {b} = {g}",
    "JSON Schema, YAML and TOML are formats.",
    "Monday to Friday, March through May",
    "Which planet is larger, Mars or Venus?",
]


def clean(size: int, seed: int, templates: list[str]) -> list[Text]:
    rng = random.Random(seed)
    texts = []
    for at in range(size):
        counts = {
            "a": (100, 1000),
            "b": (200, 1000),
            "c": (200, 1000),
            "s": (1, 10),
            "g": (1000, 10**6),
            "v": (0, 30),
            "y": (1990, 2027),
        }

        def part(name: str, counts: dict[str, tuple[int, int]] = counts) -> str:
            if name in counts:
                return str(rng.randrange(*counts[name]))
            two = {"mo": 12, "dd": 28, "hh": 23, "mi": 59, "ss": 59}
            if name in two:
                return f"{rng.randrange(1, two[name] + 1):02d}"
            if name[0] == "n":
                return str(rng.randrange(10 ** (int(name[1:]) - 1), 10 ** int(name[1:])))
            if name.startswith("hex"):
                return run(rng, HEX, int(name[3:]))
            if name == "uuid":
                return "-".join(run(rng, HEX, n) for n in (8, 4, 4, 4, 12))
            if name == "alnum24":
                return run(rng, ALNUM, 24)
            return {
                "f": f"{rng.random() * 10 ** rng.randrange(4):.4f}",
                "f2": f"{rng.random() * 90:.6f}",
                "d": str(-rng.randrange(900)),
            }[name]

        out = []
        for _ in range(rng.randrange(1, 4)):
            template = templates[(at + len(out) * 37) % len(templates)]
            out.append(
                "".join(
                    literal + (part(field) if field else "")
                    for literal, field, _, _ in string.Formatter().parse(template)
                )
            )
        texts.append(Text("\n".join(out)))
    return texts
