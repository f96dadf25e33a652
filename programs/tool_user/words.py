"""Words of the generated tools of `tasks.py`: things, actions, and kinds of parameters."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


def _words(text: str) -> list[str]:
    return text.split()


# Position modulo 5 decides the split: 0 and 1 train, 2 val, 3 gate, 4 test. Append only, in groups of five.
THINGS = _words(
    "parcel invoice meeting flight recipe "
    "ticket hotel_room article painting guitar "
    "contract vehicle concert lesson garden "
    "sensor bicycle report wallet museum "
    "shipment printer holiday camera orchard "
    "order apartment podcast insurance telescope "
    "passport boat seminar medicine bakery "
    "refund laptop webinar mortgage vineyard "
    "delivery tractor festival vaccine library "
    "voucher scooter rehearsal pension aquarium "
    "receipt truck workshop loan bridge "
    "claim ferry interview grant castle"
)
ACTIONS: Mapping[str, str] = {
    "track": "Tracks {thing}",
    "cancel": "Cancels {thing}",
    "reserve": "Reserves {thing}",
    "price": "Calculates the price of {thing}",
    "inspect": "Inspects {thing}",
    "register": "Registers {thing}",
    "archive": "Archives {thing}",
    "compare": "Compares {thing} with others of its kind",
}
GENERAL = (
    "Who wrote the novel {0}?",
    "What does the word {0} mean?",
    "Write a greeting for a person called {0}.",
    "Translate the word {0} into Spanish.",
    "Spell the word {0} backwards.",
    "Is {0} a common name?",
)
_CITIES = _words("Oslo Lima Cairo Turin Quito Dakar Osaka Perth Lyon Riga Accra Boston Delhi Hanoi Malmo Porto")
_PEOPLE = _words("Amara Bruno Chen Dalia Emil Farah Goran Hana Ivo Jaya Kofi Lena Marco Nadia Oskar Priya")


@dataclass(frozen=True)
class Kind:
    """A kind of parameter: its schema, a value, and how a sentence says the value."""

    schema: Mapping[str, Any]
    value: Callable[[random.Random], Any]
    phrase: Callable[[Any], str]


def _text(description: str, values: list[str], phrase: str, *, enum: bool = False) -> Kind:
    schema: dict[str, Any] = {"type": "string", "description": description, **({"enum": values} if enum else {})}
    return Kind(schema, lambda rng: rng.choice(values), phrase.format)


def _number(kind: str, description: str, low: int, high: int, phrase: str) -> Kind:
    def value(rng: random.Random) -> int | float:
        number = rng.randint(low, high)
        return number if kind == "integer" else number + rng.randint(0, 9) / 10

    return Kind({"type": kind, "description": description}, value, phrase.format)


KINDS: Mapping[str, Kind] = {
    "city": _text("City of the place.", _CITIES, "located in {}"),
    "customer": _text("First name of the customer.", _PEOPLE, "of the customer {}"),
    "date": Kind(
        {"type": "string", "description": "Day, as YYYY-MM-DD."},
        lambda rng: f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
        "on {}".format,
    ),
    "quantity": _number("integer", "Number of pieces.", 2, 60, "with a quantity of {}"),
    "max_price": _number("number", "Highest price in euros.", 10, 900, "for at most {} euros"),
    "weight_kg": _number("number", "Weight in kilograms.", 1, 90, "weighing {} kg"),
    "min_rating": _number("integer", "Lowest rating, from 1 to 5.", 1, 5, "rated {} or better"),
    "size": _text("Size.", ["small", "medium", "large"], "of {} size", enum=True),
    "colour": _text("Colour.", ["red", "green", "blue", "black", "white"], "coloured {}", enum=True),
    "urgent": Kind(
        {"type": "boolean", "description": "Whether it is urgent."},
        lambda rng: rng.random() < 0.5,
        lambda value: "which is urgent" if value else "which is not urgent",
    ),
}
