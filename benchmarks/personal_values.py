"""Personal values of the privacy benchmark, by Faker in several locales, in easy and in hard forms."""

import base64
import json
import random
import string
import urllib.parse
from collections.abc import Callable
from typing import Any

from faker import Faker

ALNUM, HEX, B64 = (
    string.ascii_letters + string.digits,
    string.hexdigits[:16],
    string.ascii_letters + string.digits + "-_",
)


AMERICAN = Faker("en_US")
WHOLE: dict[str, str] = {}  # a person as it is written in a text -> the name as metadata have it


def run(rng: random.Random, alphabet: str, n: int) -> str:
    return "".join(rng.choices(alphabet, k=n))


def is_english(fake: Any) -> bool:
    return any(provider.__class__.__module__.startswith("faker.providers.address.en") for provider in fake.providers)


def email(rng: random.Random, fake: Any) -> tuple[str, bool]:
    first, last = (
        urllib.parse.quote(part.split()[0].lower()).replace("%", "") for part in (fake.first_name(), fake.last_name())
    )
    host = rng.choice(
        [
            "gmail.com",
            "web.de",
            "orange.fr",
            "mail.corp-internal.io",
            "uni-heidelberg.de",
            "nhs.uk",
            "outlook.com",
            "acme.co.jp",
        ]
    )
    local = rng.choice(
        [
            f"{first}.{last}",
            f"{first}{last}{rng.randrange(100)}",
            f"{first[0]}_{last}",
            f"{first}+lists",
            f"{last}-{first}",
            first,
        ]
    )
    plain = f"{local}@{host}"
    name, dot = host.rsplit(".", 1)
    hard = [
        plain.upper(),
        f"{local} [at] {name} [dot] {dot}",
        f"{local}(at){host}",
        f"{local} at {name} dot {dot}",
        f"{local}%40{host}",
        f"{local} @ {host}",
        f"{local}&#64;{host}",
    ]
    return (rng.choice(hard), True) if rng.random() < 0.3 else (plain, False)


def phone(rng: random.Random, fake: Any) -> tuple[str, bool]:
    value = fake.phone_number()
    digits = "".join(c for c in value if c.isdigit())
    if rng.random() < 0.25:
        return rng.choice(
            [digits, " ".join(digits), digits[:3] + " " + digits[3:6] + " " + digits[6:], "+" + digits.lstrip("0")]
        ), True
    return value, False


def iban(rng: random.Random, fake: Any) -> tuple[str, bool]:
    value = fake.iban()
    spaced = " ".join(value[i : i + 4] for i in range(0, len(value), 4))
    return rng.choice(
        [
            (value, False),
            (spaced, False),
            (spaced.lower(), True),
            (spaced.replace(" ", "-"), True),
            (spaced.replace(" ", "\n", 1), True),
        ]
    )


def card(rng: random.Random, fake: Any) -> tuple[str, bool]:
    value = fake.credit_card_number()
    spaced = " ".join(value[i : i + 4] for i in range(0, len(value), 4))
    return rng.choice(
        [
            (value, False),
            (spaced, False),
            (spaced.replace(" ", "-"), False),
            (spaced.replace(" ", "."), True),
            (" ".join(value), True),
        ]
    )


def ssn(rng: random.Random, fake: Any) -> tuple[str, bool]:
    value = AMERICAN.ssn()
    return rng.choice(
        [
            (value, False),
            (value, False),
            (value.replace("-", " "), True),
            (value.replace("-", ""), True),
            (value.replace("-", "."), True),
        ]
    )


def ip(rng: random.Random, fake: Any) -> tuple[str, bool]:
    value = rng.choice([fake.ipv4_public(), fake.ipv4_public(), fake.ipv4_private(), fake.ipv6()])
    return rng.choice([(value, False), (value, False), (value.upper(), False), (value.replace(".", " . "), True)])


def mac(rng: random.Random, fake: Any) -> tuple[str, bool]:
    value = ":".join(f"{rng.randrange(256) & (0xFE if i == 0 else 0xFF):02x}" for i in range(6))
    bare = value.replace(":", "")
    cisco = f"{bare[:4]}.{bare[4:8]}.{bare[8:]}"
    return rng.choice(
        [(value, False), (value.upper(), False), (value.replace(":", "-"), False), (cisco, True), (bare, True)]
    )


def dob(rng: random.Random, fake: Any) -> tuple[str, bool]:
    day = fake.date_of_birth(minimum_age=18, maximum_age=90)
    easy = [
        f"{day:%Y-%m-%d}",
        f"{day:%d/%m/%Y}",
        f"{day:%d.%m.%Y}",
        f"{day.day} {day:%B %Y}",
        f"{day:%B} {day.day}, {day.year}",
    ]
    hard = [f"{day:%d%m%y}", f"the {day.day}th of {day:%B}, {day.year}", f"{day:%b} '{day:%y}", f"{day:%y%m%d}"]
    return (rng.choice(hard), True) if rng.random() < 0.2 else (rng.choice(easy), False)


def address(rng: random.Random, fake: Any) -> tuple[str, bool]:
    value = fake.street_address()
    return value.replace("\n", ", "), not is_english(fake)


def person(rng: random.Random, fake: Any) -> tuple[str, bool]:
    first, last = fake.first_name(), fake.last_name()
    easy = [f"{first} {last}", f"{first} {last}", first]
    hard = [f"{first} {last}".lower(), f"{first} {last}".upper(), f"{last}, {first}", f"{first[0]}. {last}", last]
    value = (rng.choice(hard), True) if rng.random() < 0.3 else (rng.choice(easy), False)
    WHOLE[value[0]] = f"{first} {last}"
    return value


def place(rng: random.Random, fake: Any) -> tuple[str, bool]:
    city = fake.city()
    WHOLE[city] = city
    return city, not is_english(fake)


def password(rng: random.Random, fake: Any) -> tuple[str, bool]:
    word = fake.password(length=rng.randrange(8, 16), special_chars=rng.random() < 0.5)
    return rng.choice([(word, False), (rng.choice(["sunshine", "letmein", "dragon", "correcthorse"]), True)])


def key(rng: random.Random, fake: Any) -> tuple[str, bool]:
    """A secret that shows by its shape."""
    part = (
        base64.urlsafe_b64encode(json.dumps({"sub": str(rng.randrange(10**9)), "iat": rng.randrange(10**9)}).encode())
        .decode()
        .rstrip("=")
    )
    return rng.choice(
        [
            "sk-proj-" + run(rng, B64, 120),
            "sk-" + run(rng, ALNUM, 48),
            "sk-ant-api03-" + run(rng, B64, 93) + "AA",
            "ghp_" + run(rng, ALNUM, 36),
            "github_pat_" + run(rng, ALNUM, 22) + "_" + run(rng, ALNUM, 59),
            "gho_" + run(rng, ALNUM, 36),
            "AKIA" + run(rng, string.ascii_uppercase + "234567", 16),
            "AIza" + run(rng, B64, 35),
            "ya29." + run(rng, B64, 100),
            "xoxb-" + run(rng, string.digits, 12) + "-" + run(rng, string.digits, 13) + "-" + run(rng, ALNUM, 24),
            "sk_live_" + run(rng, ALNUM, 24),
            "rk_test_" + run(rng, ALNUM, 24),
            "hf_" + run(rng, string.ascii_letters, 34),
            "glpat-" + run(rng, B64, 20),
            "npm_" + run(rng, ALNUM, 36),
            "SG." + run(rng, B64, 22) + "." + run(rng, B64, 43),
            "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9." + part + "." + run(rng, B64, 43),
            "gsk_" + run(rng, ALNUM, 52),
            "pypi-AgEIcHlwaS5vcmc" + run(rng, B64, 120),
            "dop_v1_" + run(rng, HEX, 64),
        ]
    ), False


def opaque(rng: random.Random, fake: Any) -> tuple[str, bool]:
    """A secret that shows only by its name."""
    return rng.choice([run(rng, HEX, 32), run(rng, ALNUM + "/+", 40), run(rng, ALNUM, 24), run(rng, B64, 64)]), False


def pem(rng: random.Random, fake: Any) -> tuple[str, bool]:
    kind = rng.choice(["RSA PRIVATE KEY", "OPENSSH PRIVATE KEY", "PRIVATE KEY", "EC PRIVATE KEY"])
    lines = [run(rng, ALNUM + "+/", 64) for _ in range(rng.randrange(3, 12))]
    cut = rng.random() < 0.2  # a tool's result that was cut off
    return "\n".join([f"-----BEGIN {kind}-----", *lines] + ([] if cut else [f"-----END {kind}-----"])), cut


VALUES: dict[str, Callable[[random.Random, Any], tuple[str, bool]]] = {
    "email": email,
    "phone": phone,
    "iban": iban,
    "card": card,
    "ssn": ssn,
    "ip": ip,
    "mac": mac,
    "dob": dob,
    "address": address,
    "person": person,
    "place": place,
    "password": password,
    "key": key,
    "opaque": opaque,
    "pem": pem,
}
