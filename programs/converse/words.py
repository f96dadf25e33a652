"""Services, fields and wordings of the generated conversations."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    """A field of a form.

    Attributes:
        description: as the agent sees it.
        asked_by: words by which a reply asks for it.
        says: how the user tells the value, with `{}` for it.
        value: draws a value.
    """

    description: str
    asked_by: tuple[str, ...]
    says: tuple[str, ...]
    value: Callable[[random.Random], str]


@dataclass(frozen=True)
class Service:
    """A service that a simulated user asks for: its name, the user's goal as a sentence, and the form's fields."""

    text: str
    goal: str
    fields: tuple[str, ...]


def _of(*choices: str) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(choices)


def _number(low: int, high: int) -> Callable[[random.Random], str]:
    return lambda rng: str(rng.randint(low, high))


def _name(rng: random.Random) -> str:
    first = ("Anna", "Bela", "Carla", "Dario", "Emil", "Fatima", "Greta", "Hugo", "Ines", "Jonas", "Karim", "Lena")
    last = ("Berg", "Costa", "Dahl", "Ekker", "Fonda", "Graf", "Horn", "Ilic", "Jensen", "Kato", "Lund", "Meyer")
    return f"{rng.choice(first)} {rng.choice(last)}"


def _street(rng: random.Random) -> str:
    return f"{rng.randint(1, 99)} {rng.choice(('Oak', 'Mill', 'Lake', 'Hill', 'Park', 'Rose', 'King'))} Street"


_CITIES = ("Oslo", "Turin", "Ghent", "Porto", "Basel", "Lyon", "Graz", "Malaga", "Gdansk", "Bergen", "Leipzig")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_PLAIN = ("{}, please.", "I would like {}.", "{} is fine.")

FIELDS: Mapping[str, Field] = {
    "day": Field("day", ("day", "date"), ("On {}, please.", "{} would be best.", "It is for {}."), _of(*_DAYS)),
    "time": Field(
        "time",
        ("time", "hour", "clock"),
        ("At {}.", "{} would suit me.", "Around {}, please."),
        lambda rng: f"{rng.randint(1, 11)} {rng.choice(('am', 'pm'))}",
    ),
    "people": Field(
        "number of people", ("people", "persons", "guests"), ("There will be {} of us.", "{} people."), _number(2, 9)
    ),
    "nights": Field("number of nights", ("nights", "long"), ("For {} nights.", "We stay {} nights."), _number(2, 9)),
    "pieces": Field("number of pieces", ("pieces", "many"), ("{} of them, please.", "I need {}."), _number(2, 9)),
    "origin": Field(
        "city of departure", ("departure", "from", "origin"), ("I start in {}.", "From {}."), _of(*_CITIES)
    ),
    "destination": Field(
        "city of arrival", ("arrival", "destination", "where to"), ("I want to go to {}.", "To {}."), _of(*_CITIES)
    ),
    "seating": Field("place to sit", ("sit", "place", "table"), _PLAIN, _of("inside", "outside", "by the window")),
    "menu": Field(
        "menu", ("menu", "food", "eat"), ("The {} menu.", "{}, please."), _of("vegan", "fish", "meat", "cheese")
    ),
    "occasion": Field(
        "occasion",
        ("occasion", "celebrate"),
        ("It is a {}.", "We celebrate a {}."),
        _of("birthday", "wedding", "jubilee"),
    ),
    "room": Field("kind of room", ("room",), ("A {} room.", "A {} one, please."), _of("single", "double", "family")),
    "meals": Field("meals", ("meal", "meals", "breakfast"), _PLAIN, _of("breakfast", "half board", "full board")),
    "floor": Field("floor", ("floor",), ("On floor {}.", "Floor {} if possible."), _number(1, 9)),
    "class": Field(
        "class of travel", ("class",), ("{} class.", "I travel {} class."), _of("first", "second", "business")
    ),
    "seat": Field("kind of seat", ("seat",), ("A {} seat.", "{}, please."), _of("window", "aisle", "middle")),
    "luggage": Field("number of bags", ("bags", "luggage"), ("I have {} bags.", "{} bags."), _number(2, 6)),
    "flower": Field(
        "kind of flower", ("flower", "flowers"), ("{}, please.", "I like {}."), _of("roses", "tulips", "lilies")
    ),
    "color": Field("color", ("color", "colour"), ("In {}.", "{} ones."), _of("red", "white", "yellow", "pink", "blue")),
    "wrapping": Field("wrapping", ("wrapping", "wrapped", "wrap"), _PLAIN, _of("paper", "a box", "a basket")),
    "film": Field(
        "title of the film",
        ("film", "movie", "title"),
        ("We want to see {}.", "{}."),
        _of("Blue Hour", "Night Ferry", "Salt"),
    ),
    "row": Field("row", ("row",), ("Row {}.", "In row {}, please."), _number(1, 20)),
    "snack": Field("snack", ("snack",), ("{} for us.", "{}, please."), _of("popcorn", "nachos", "ice cream")),
    "name": Field("name of the customer", ("name",), ("It is under {}.", "My name is {}.", "I am {}."), _name),
    "phone": Field(
        "phone number",
        ("phone", "telephone"),
        ("My number is {}.", "You can reach me at {}."),
        lambda rng: f"555-{rng.randint(1000, 9999)}",
    ),
    "street": Field("street and house number", ("street", "address", "house"), ("I live at {}.", "{}."), _street),
    "language": Field("language", ("language",), ("{}.", "I speak {}."), _of("English", "Polish", "Italian", "German")),
    "payment": Field(
        "way of payment", ("payment", "pay"), ("I pay {}.", "{}."), _of("in cash", "by card", "by invoice")
    ),
    "code": Field(
        "customer code",
        ("code",),
        ("My code is {}.", "It is {}."),
        lambda rng: f"{rng.choice('ABKM')}{rng.randint(100, 999)}",
    ),
}

OWN = ("name", "phone", "street", "language", "payment", "code")
"""Fields that belong to the person and stay the same in each conversation of theirs."""

SERVICES: Mapping[str, Service] = {
    "restaurant": Service(
        "You take bookings for a restaurant.",
        "Hello, I would like to book a table.",
        ("day", "time", "people", "seating", "menu", "occasion"),
    ),
    "hotel": Service(
        "You take bookings for a hotel.",
        "Good morning, I need a hotel booking.",
        ("day", "nights", "people", "room", "meals", "floor"),
    ),
    "train": Service(
        "You sell train tickets.",
        "Hi, I want to buy a train ticket.",
        ("day", "time", "origin", "destination", "class", "seat", "luggage"),
    ),
    "flowers": Service(
        "You take orders for a flower shop.",
        "Hello, I want to order flowers.",
        ("day", "time", "pieces", "flower", "color", "wrapping"),
    ),
    "cinema": Service(
        "You sell cinema tickets.",
        "Hi, I would like to reserve cinema tickets.",
        ("day", "time", "people", "film", "row", "snack"),
    ),
}
