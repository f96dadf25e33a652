"""Recall of anonymisation by type on generated texts of several countries, the share of clean texts that change, and
processor time.

Values come from Faker, sentences from templates. `tune` is what the patterns were written against, `check` what was
read as a whole while they were; `held-out` has templates and seeds of its own, written afterwards, and is what
is reported; `stored` has prompts and outputs of programs as they are stored, by the author of the rules for them. A
value counts as found where none of its letters and digits is left.

    python benchmarks/privacy_recall.py --set held-out --seed 2000 --size 1500 --engine patterns
    python benchmarks/privacy_recall.py --clean 'arithmetic:size=3000&terms=2-4&digits=2-4&ops=-'

The second form counts what is found in the texts of a data set, for one without personal data: false positives.
"""

import argparse
import json
import random
import string
import time
from collections import Counter, defaultdict
from typing import Any

import numpy as np
from faker import Faker

from assay.datasets.splits import load_tasks
from assay.traces.privacy.anonymizer import Anonymizer
from assay.traces.privacy.names import KnownValue

COUNTRIES: dict[str, list[str]] = {
    "tune": ["en_US", "de_DE", "fr_FR", "es_ES", "nl_NL", "pl_PL", "en_IN"],
    "check": ["en_US", "en_GB", "de_AT", "it_IT", "pt_BR", "sv_SE", "cs_CZ", "en_AU", "es_MX", "fr_CH"],
    "held-out": [
        "en_US",
        "en_GB",
        "en_CA",
        "de_CH",
        "de_DE",
        "fr_FR",
        "es_ES",
        "it_IT",
        "nl_BE",
        "da_DK",
        "pt_PT",
        "pl_PL",
        "sv_SE",
        "en_NZ",
    ],
}
COUNTRIES["stored"] = COUNTRIES["held-out"]
TEMPLATES = {
    "tune": [
        "Hello, my name is {person} and I live at {street}, {place}.",
        "Please call me back on {phone} before Friday.",
        "My number is {phone}, ask for {person}.",
        "The parcel for {person} goes to {street}.",
        "I was born on {date} in {place}.",
        "Appointment for {person}: {date}, 10:30, phone {phone}.",
        "Invoice to {person}, {street}, {place}. Due {date}.",
        "{person} wrote from {email}: the payment of {iban} has not arrived.",
        "Patient {person}, admitted on {date}, insurance {ssn}.",
        "Can {person} visit us in {place} on {date}?",
        "Contact: {person}, tel. {phone}, {email}",
        "I moved from {place} to {place} on {date}.",
        "User: I am {person}. Reset the password for {email}.",
        "The login from {ip} on {date} was not me.",
        "Dear {person}, your order ships to {street}, {place}.",
        '{{"customer": "{person}", "phone": "{phone}", "city": "{place}"}}',
    ],
    "check": [
        "Good morning! This is {person} speaking, could you ring {phone}?",
        "I'd like to change my delivery address to {street} in {place}.",
        "Booking: {person}, arrives {date}, mobile {phone}",
        "Our neighbour {person} at {street} saw it on {date}.",
        "Reach {person} under {phone} or {email}.",
        "We met {person} in {place} on {date}.",
        "Sender: {person}\\n{street}\\n{place}\\n{phone}",
        "Kind regards,\\n{person}\\n{phone}",
        "The contract of {date} between {person} and the landlord of {street} ends.",
        "Transfer it to {iban}, account holder {person}.",
        "SSN {ssn}, date of birth {date}, resident of {place}",
        "[[ ## question ## ]]\\nWho lives at {street}? I think it is {person}.",
        '{{"name": "{person}", "address": "{street}", "town": "{place}", "joined": "{date}"}}',
        "She works in {place}; her office line is {phone}.",
        "Connection from {ip}, user {email}, at {date}",
        "Mr. {person} flew from {place} to {place}.",
        "fax: {phone}, attn. {person}",
    ],
    "held-out": [  # written after the patterns, and not read since
        "The tenant, {person}, moved into {street} last spring.",
        "Could somebody phone {person}? The number on file is {phone}.",
        "Lost: passport of {person}, issued {date}.",
        "Our branch in {place} closed on {date} after the flood.",
        "Please forward all letters for {person} to {street}, {place}",
        "{person} (born {date}) asked for a refund.",
        "Text {phone} when you get to {place}.",
        "Meeting notes, {date}: {person} presented the budget.",
        "From {place} it takes an hour to {street}.",
        "Emergency contact {person}, {phone}, or by mail to {email}.",
        "The doctor saw {person} twice, on {date} and a week later.",
        "My sister {person} has lived in {place} since {date}.",
        "Deliver to: {person}, {street}, {place}, telephone {phone}",
        "The car was seen near {street} around midnight.",
        '{{"role": "user", "content": "I am {person} from {place}, my cell is {phone}"}}',
        "Question: When did {person} sign? Answer: on {date}, at the office in {place}.",
    ],
    "stored": [  # as programs' prompts and outputs are stored: DSPy's chat and JSON forms, lean lines, tool calls
        "[[ ## question ## ]]\\nWhen was the customer born?\\n\\n"
        "[[ ## answer ## ]]\\n{date}\\n\\n[[ ## completed ## ]]",
        "[[ ## date ## ]]\\n{date}\\n",
        '{{"answer": "{date}"}}',
        "Due: {date}",
        "{date}",
        "the {longdate}",
        "The reply was due {shortdate} says the office.",
        "We met on {shortdate}, as agreed before.",
        '{{"customer": "{first}", "joined": "{date}"}}',
        '{{"name": "{first}"}}',
        '{{"patient": "{person}", "city": "{place}", "birthday": "{date}"}}',
        '{{"tool": "book", "args": {{"passenger": "{person}", "day": "{date}"}}}}',
        "[[ ## message ## ]]\\nMy name is {person}, I live in {place}.\\n\\n"
        "[[ ## reply ## ]]\\nDear {person}, thank you.",
        "[[ ## notes ## ]]\\n{person} called from {phone} on {date}.\\n",
        "Message: I am {person}, call me on {phone}\\nCategory: complaint",
        '{{"messages": [{{"role": "user", "content": "Send it to {street}, {place}"}}]}}',
    ],
}
CLEAN = {
    "tune": [
        "Solve {n2} * {n2} + {n3}.",
        "The train leaves at 10:{n2} and arrives at 11:{n2}.",
        "Upgrade to version {v} of the package.",
        "Summarise the following paragraph in two sentences.",
        "def add(a, b):\n    return a + b  # {n3}",
        "What is the capital of a country with {n6} people?",
        "Error {n4}: the index {n2} is out of range.",
        "Order {n7} has {n2} items.",
        "Python {v} and Rust are fast.",
        "Table {n2} shows {n3} rows.",
    ],
    "check": [
        "Release {v} fixes the bug; {v2} did not.",
        "Compute the mean of {n3}, {n3} and {n4}.",
        "In chapter {n2} the author explains photosynthesis.",
        "Set batch_size={n3} and learning_rate=0.{n3}.",
        "We support app {v2} and above, driver {v} too.",
        "Water boils at {n3} degrees under pressure.",
        "Ticket {n7} was closed after {n2} days.",
        "Which of these {n2} words rhyme with orange?",
        "SELECT name FROM items WHERE id = {n6};",
        "The March release of Django needs Redis.",
        "Monday is followed by Tuesday.",
        "Total: {n4}.{n2} EUR for {n2} units.",
        "Hash {hex} does not match.",
        "May I use the Great Library of functions here?",
        "The Pythagorean theorem: a^2 + b^2 = c^2.",
        "Step 1. Read the file. Step 2. Parse JSON.",
    ],
    "held-out": [
        "The new firmware {v} is slower than {v2}.",
        "Divide {n4} by {n2} and round to {n2} digits.",
        "Paragraph {n2} of the novel is about the sea.",
        "for i in range({n3}):\n    total += values[i] * {n2}",
        "Is {n7} a prime number?",
        "The request took {n3} ms, the limit is {n4} ms.",
        "Explain recursion to a child in {n2} words.",
        "pip install numpy=={v2} torch=={v2}",
        "Figure {n2} compares TCP and UDP.",
        "GET /api/items/{n6} 200 {n4}",
        "A recipe for {n2} people needs {n3} grams of flour.",
        "Write a haiku about Winter and the Moon.",
        "The Supreme Court and the Senate disagree in general.",
        "Use Kubernetes in Production and Terraform in Staging.",
        "He scored {n2} to {n2} in the final.",
        "Why do cats purr? Answer in one sentence.",
    ],
    "stored": [
        "[[ ## question ## ]]\nWhat is {n2} + {n3}?\n\n[[ ## answer ## ]]\n{n3}\n\n[[ ## completed ## ]]",
        '{{"answer": "{n3}", "reasoning": "because {n2}"}}',
        '{{"name": "search", "arguments": {{"query": "best of {n2}"}}}}',
        '{{"name": "Calculator", "description": "adds {n2} numbers", "parameters": {{}}}}',
        '{{"name": "Widget", "price": {n2}, "sku": "{n6}"}}',
        "[[ ## ratio ## ]]\n{n2}/{n2}\n",
        "Answer: {v2}",
        '{{"version": "{v2}", "build": {n4}}}',
        "{n2}-{n2}-{n3}",
        "{n2}/{n2}/{n2}",
        "[[ ## category ## ]]\nbilling\n",
        '{{"created_at": "2024-05-03", "score": 0.{n2}}}',
        '{{"title": "Summary", "author_count": {n2}}}',
        "Category: Shipping\nPriority: {n2}",
        '{{"kind": "Test", "name": "Build", "runs-on": "ubuntu"}}',
        "[[ ## plan ## ]]\nStep 1: read. Step 2: divide {n4} by {n2}.",
    ],
}
DATES = [
    "%d.%m.%Y",
    "%Y-%m-%d",
    "%d/%m/%Y",
    "%m/%d/%Y",
    "%B %d, %Y",
    "%d %B %Y",
    "%b %d %Y",
    "%d-%m-%Y",
    "%A, %d %B %Y",
]


def ordinal(day: Any) -> str:
    suffix = "th" if 10 < day.day < 20 else {1: "st", 2: "nd", 3: "rd"}.get(day.day % 10, "th")
    return f"{day.day}{suffix} of {day:%B}, {day.year}"


def values(fake: Any, rng: random.Random) -> dict[str, Any]:
    day = fake.date_between(start_date="-60y", end_date="today")
    return {
        "person": lambda: f"{fake.first_name()} {fake.last_name()}",
        "place": lambda: fake.city(),
        "phone": lambda: fake.phone_number(),
        "street": lambda: fake.street_address().split("\n")[0],
        "date": lambda: f"{day:{rng.choice(DATES)}}",
        "email": lambda: fake.email(domain="mail.net"),
        "longdate": lambda: ordinal(day),
        "shortdate": lambda: f"{day.day}/{day.month}/{day:%y}",
        "first": lambda: fake.first_name(),
        "iban": lambda: fake.iban(),
        "ssn": lambda: Faker("en_US").ssn(),
        "ip": lambda: fake.ipv4_public(),
    }


def personal(which: str, size: int, seed: int) -> list[tuple[str, list[tuple[str, int, int]], tuple[KnownValue, ...]]]:
    rng, rows = random.Random(seed), []
    Faker.seed(seed)
    fakes = {name: Faker(name) for name in COUNTRIES[which]}
    for provider in (provider for fake in fakes.values() for provider in fake.providers):
        if hasattr(provider, "cities"):
            provider.cities = sorted(provider.cities)  # the Italian ones come from a set
    for at in range(size):
        template = TEMPLATES[which][at % len(TEMPLATES[which])].replace("\\n", "\n")
        make = values(fakes[rng.choice(COUNTRIES[which])], rng)
        text, gold = "", []
        for literal, field, _, _ in string.Formatter().parse(template):
            text += literal
            if field:
                value = make[field]()
                gold.append((field, len(text), len(text) + len(value)))
                text += value
        subject = next((text[s:e] for kind, s, e in gold if kind == "person"), None)
        rows.append((text, gold, (KnownValue("person", subject),) if subject else ()))
    return rows


def clean(which: str, size: int, seed: int) -> list[str]:
    rng, rows = random.Random(seed), []
    for at in range(size):
        fill = {f"n{k}": str(rng.randrange(10 ** (k - 1), 10**k)) for k in range(2, 8)}
        fill["v"] = ".".join(str(rng.randrange(1, 20)) for _ in range(4))
        fill["v2"] = ".".join(str(rng.randrange(0, 30)) for _ in range(3))
        fill["hex"] = "".join(rng.choices("0123456789abcdef", k=32))
        rows.append(CLEAN[which][at % len(CLEAN[which])].format(**fill))
    return rows


def measure(which: str, size: int, seed: int, engine: str, *, subject: bool) -> dict[str, Any]:
    anonymizer, counts, missed = Anonymizer(b"0" * 32, engine=engine), defaultdict(Counter[str]), defaultdict(list)
    texts, others = personal(which, size, seed), clean(which, size // 2, seed)
    clock = time.process_time()
    for text, gold, known in texts:
        covered = {at for span in anonymizer.find(text, known if subject else ()) for at in range(span.start, span.end)}
        for kind, start, end in gold:
            hidden = all(at in covered for at in range(start, end) if text[at].isalnum())
            counts[kind].update(n=1, found=hidden)
            if not hidden:
                missed[kind].append(
                    text[max(0, start - 20) : start] + "<" + text[start:end] + ">" + text[end : end + 10]
                )
    changed = [text for text in others if anonymizer.find(text)]
    rows = {
        kind: {
            "n": c["n"],
            "found": c["found"],
            "recall": round(c["found"] / c["n"], 4),
            "interval": wilson(c["found"], c["n"]),
        }
        for kind, c in sorted(counts.items())
    }
    return {
        "set": which,
        "seed": seed,
        "engine": anonymizer.engine_name,
        "known_subject": subject,
        "types": rows,
        "clean": len(others),
        "clean_changed": len(changed),
        "cpu_ms_a_text": round(1000 * (time.process_time() - clock) / (len(texts) + len(others)), 4),
        "missed": {kind: texts_[:12] for kind, texts_ in missed.items()},
        "changed": changed[:10],
    }


def findings(spec: str, engine: str) -> dict[str, Any]:
    """Texts of a data set, inputs and expected outputs of a task as one text, in which something is found, by type."""
    anonymizer = Anonymizer(b"0" * 32, engine=engine)
    texts = ["\n".join(map(str, [*task.inputs.values(), *task.expected.values()])) for task in load_tasks(spec)]
    kinds = [{match.type for match in anonymizer.find(text)} for text in texts]
    by_type = Counter(kind for types in kinds for kind in types)
    return {"data": spec, "texts": len(texts), "with_findings": sum(map(bool, kinds)), "types": dict(by_type)}


def wilson(hits: int, n: int) -> list[float]:
    """95 % interval of a share (Wilson 1927, JASA 22:209)."""
    z, p = 1.96, hits / n
    mid, reach = (
        (p + z * z / (2 * n)) / (1 + z * z / n),
        z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n),
    )
    return [round(float(mid - reach), 3), round(float(mid + reach), 3)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--set", choices=list(TEMPLATES), default="held-out")
    parser.add_argument("--size", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=2000)
    parser.add_argument("--engine", default="patterns")
    parser.add_argument("--subject", action="store_true", help="the rollout's own data subject is known")
    parser.add_argument("--missed", action="store_true", help="show what was missed (of the tuning set only)")
    parser.add_argument("--clean", metavar="SPEC", help="a data set without personal data, in place of the set")
    arguments = parser.parse_args()
    if arguments.clean:
        print(json.dumps(findings(arguments.clean, arguments.engine), indent=1))
        return
    report = measure(arguments.set, arguments.size, arguments.seed, arguments.engine, subject=arguments.subject)
    if not arguments.missed or arguments.set == "held-out":
        del report["missed"]
        report["changed"] = report["changed"] if arguments.set == "tune" else len(report["changed"])
    print(json.dumps(report, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
