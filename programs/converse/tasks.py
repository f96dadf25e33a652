"""Generated conversations, `conversations:?facts=&changes=&size=&seed=`, for programs with the inputs `service`, `form`
and `user`, such as `converse`: services, fields, wordings, and the tasks made of them.

The user has a goal and facts. A fact is told only when it is asked for. Some facts are told after a second request, and
some are first told wrongly and corrected later. The task is completed if the outcome has the value of every fact, which
code can check. Splits are those of the key, as for any data that names none.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from assay.datasets.specs import number_of, options_of, share_of, span_of
from assay.errors import DataError
from assay.support.names import one_of


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


MEETINGS = ("only", "first", "second")


def rows(spec: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Conversations of a spec, without its `conversations:`.

    The inputs are `service`, `form` (field -> description), `user` (`goal` and `facts`, which the agent must not see),
    `person`, and with two meetings `personal`, the fields of the person, which a memory may keep. Expected is the
    `outcome` (field -> value). `turns` in the metadata is the number of turns, of a message and a reply each, that a
    conversation needs.

    Options: `size`, `seed`, `facts` (`LOW-HIGH`, default `9-11`), `changes` (0.5, the probability that one fact is
    first told wrongly, and the same for one that is told late), `meeting` (`only`, or the `first` or `second` of two
    conversations with the same person about different services; in the second one the person's own facts are not told
    again, and row n of both is the same person).

    Raises:
        DataError: an unknown option, or a value out of range.
    """
    options = options_of(spec.removeprefix("?"), ("facts", "changes", "meeting", "size", "seed"), "conversations")
    size, seed = number_of(options, "size", 500, at_least=1), number_of(options, "seed", 0)
    facts, changes = span_of(options, "facts", "9-11", "conversations"), share_of(options, "changes", 0.5)
    if (meeting := options.get("meeting", "only")) not in MEETINGS:
        raise DataError(f"conversations: meeting={meeting!r} {one_of(meeting, MEETINGS)}")
    if meeting != "only" and facts[0] <= len(OWN):
        raise DataError(
            f"conversations: facts={facts[0]}-{facts[1]} must be above {len(OWN)} for two meetings, since each has the "
            f"{len(OWN)} facts of the person"
        )
    rng = random.Random(f"conversations/{seed}")
    for number in range(1, size + 1):
        own = {name: FIELDS[name].value(rng) for name in OWN}
        services = rng.sample(sorted(SERVICES), 2)
        seeds = rng.random(), rng.random()
        at = 1 if meeting == "second" else 0
        task = _Conversation(random.Random(seeds[at]), services[at], own, facts, changes, meeting)
        yield f"conversations:{number}", {**task.row(), "id": f"{meeting}-{seed}-{number}"}


class _Conversation:
    """One task."""

    def __init__(
        self,
        rng: random.Random,
        service: str,
        own: dict[str, str],
        facts: tuple[int, int],
        changes: float,
        meeting: str,
    ) -> None:
        self.rng, self.service, self.own, self.meeting = rng, SERVICES[service], own, meeting
        count = rng.randint(*facts)
        named = len(OWN) if meeting != "only" else min(len(OWN), max(1, count - len(self.service.fields)))
        mine = list(OWN) if meeting != "only" else rng.sample(OWN, named)
        others = rng.sample(self.service.fields, min(len(self.service.fields), max(1, count - len(mine))))
        self.names = rng.sample([*mine, *others], len(mine) + len(others))
        self.facts = {name: self._fact(name) for name in self.names}
        self.extra = 0
        new = [name for name in self.names if not self.facts[name].get("told_before")]
        if rng.random() < changes and len(new) > 1:
            self._change(rng.choice(new[:-1]))
        if rng.random() < changes:
            self._delay(rng.choice(new))

    def _fact(self, name: str) -> dict[str, Any]:
        field = FIELDS[name]
        value = self.own[name] if name in OWN else field.value(self.rng)
        fact = {"value": value, "says": _sentence(self.rng, field, value), "asked_by": list(field.asked_by)}
        return {**fact, "told_before": True} if self.meeting == "second" and name in OWN else fact

    def _change(self, name: str) -> None:
        """The fact is first told wrongly. The correction takes a turn of its own."""
        field, fact = FIELDS[name], self.facts[name]
        wrong = next(value for value in iter(lambda: field.value(self.rng), None) if value != fact["value"])
        fact["first"] = {"value": wrong, "says": _sentence(self.rng, field, wrong)}
        fact["corrects"] = f"Sorry, the {field.description} should be {fact['value']}, not {wrong}."
        self.extra += 1

    def _delay(self, name: str) -> None:
        """The fact is told at the second request."""
        self.facts[name]["delays"] = "Let me think. Please ask me that again."
        self.extra += 1

    def row(self) -> dict[str, Any]:
        facts_to_tell = sum(not fact.get("told_before") for fact in self.facts.values())
        return {
            "inputs": {
                "service": self.service.text,
                "form": {name: FIELDS[name].description for name in self.names},
                "user": {"goal": self.service.goal, "facts": self.facts},
                "person": self.own["name"],
                **({"personal": [name for name in self.names if name in OWN]} if self.meeting != "only" else {}),
            },
            "expected": {"outcome": {name: fact["value"] for name, fact in self.facts.items()}},
            "task_type": self.service.text.rstrip(".").split(" ", 1)[1],
            "metadata": {"turns": facts_to_tell + self.extra + 1},
        }


def _sentence(rng: random.Random, field: Field, value: str) -> str:
    text = rng.choice(field.says).format(value)
    return text[0].upper() + text[1:]
