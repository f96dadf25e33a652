"""Generated tasks of answering from documents, `documents:facts?size=&seed=&passages=&removed=`.

Each task brings the passages of its own small collection: facts about invented places. Other passages are of the same
place, or have the same kind of fact of another place, so that words alone do not tell which one answers. In a share of
the tasks the passage with the answer is removed: the right answer is that the documents do not say it.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from assay.datasets.specs import Row, number_of, options_of, share_of
from assay.errors import DataError


def _words(text: str) -> list[str]:
    return text.split()


_NAMES = _words(
    "Aldermoor Brindle Carrow Dunleigh Elmscar Farthing Garnock Hollin Ivelet Jarrow Kelmarsh Lorton Marlow "
    "Nettlebed Orrest Penhale Quarley Ravenby Selside Tarnbeck Ulverley Varden Wastdale Yarrowby Ashgill "
    "Birkrigg Coldbeck Dacrefell Eskmere Foxfield Grasby Haverthwaite"
)
_KINDS = _words(
    "mill lighthouse weir observatory quarry foundry orchard chapel bridge granary brewery windmill ferry "
    "station library museum tower harbour inn"
)
_PEOPLE = _words("Agnes Bertram Cora Desmond Edith Fergus Greta Hector Ines Jonas Klara Lionel Mabel Norris Olga Percy")
_FAMILIES = _words("Ash Blythe Crane Dale Ember Flint Gale Heath Irwin Joyce Kerr Lowe Marsh North Oakley Pike")
_MATERIALS = ["slate", "granite", "oak", "brick", "limestone", "sandstone", "flint", "cedar", "copper", "basalt"]
_COLOURS = ["green", "crimson", "yellow", "violet", "white", "black", "orange", "turquoise", "grey", "maroon"]
_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
_PRODUCTS = ["rope", "candles", "cider", "paper", "barrels", "honey", "wool", "nails", "sailcloth", "mustard"]
_FILLERS = (
    "Visitors often ask about this.",
    "A sign at the gate says the same.",
    "The parish records confirm it.",
    "It has been so for a long time.",
    "Few people outside the valley know it.",
    "A local guide mentions it on every tour.",
)


def _number(low: int, high: int, unit: str) -> Callable[[random.Random], str]:
    return lambda rng: f"{rng.randint(low, high)} {unit}".strip()


@dataclass(frozen=True)
class _Attribute:
    """A kind of fact.

    Attributes:
        statements, questions: wordings with `{place}`, and `{value}` in statements.
        value: draws a value; the answer.
    """

    statements: tuple[str, ...]
    questions: tuple[str, ...]
    value: Callable[[random.Random], str]


_ATTRIBUTES: dict[str, _Attribute] = {
    "height": _Attribute(
        ("{place} stands {value} high.", "From the ground to its top, {place} measures {value}."),
        ("How high is {place}?", "What height does {place} have?"),
        _number(6, 95, "metres"),
    ),
    "year": _Attribute(
        ("{place} was opened in {value}.", "The doors of {place} were first opened in {value}."),
        ("In which year was {place} opened?", "When was {place} opened?"),
        _number(1610, 1989, ""),
    ),
    "keeper": _Attribute(
        ("The keeper of {place} is {value}.", "{place} is kept by {value}."),
        ("Who is the keeper of {place}?", "Who keeps {place}?"),
        lambda rng: f"{rng.choice(_PEOPLE)} {rng.choice(_FAMILIES)}",
    ),
    "material": _Attribute(
        ("The walls of {place} are built of {value}.", "{place} has walls made of {value}."),
        ("What are the walls of {place} made of?", "Of which material are the walls of {place} built?"),
        lambda rng: rng.choice(_MATERIALS),
    ),
    "colour": _Attribute(
        ("The shutters of {place} are painted {value}.", "{place} has {value} shutters."),
        ("What colour are the shutters of {place}?", "In which colour are the shutters of {place} painted?"),
        lambda rng: rng.choice(_COLOURS),
    ),
    "fee": _Attribute(
        ("A visit to {place} costs {value}.", "Visitors of {place} pay {value} at the entrance."),
        ("How much does a visit to {place} cost?", "What do visitors of {place} pay?"),
        _number(2, 60, "crowns"),
    ),
    "day": _Attribute(
        ("{place} is closed on {value}.", "On {value} {place} stays closed."),
        ("On which day is {place} closed?", "Which day of the week is {place} closed?"),
        lambda rng: rng.choice(_DAYS),
    ),
    "staff": _Attribute(
        ("{value} work at {place}.", "{place} employs {value}."),
        ("How many people work at {place}?", "How many people does {place} employ?"),
        _number(3, 240, "people"),
    ),
    "product": _Attribute(
        ("{place} is known for its {value}.", "People come to {place} to buy {value}."),
        ("What is {place} known for?", "What do people buy at {place}?"),
        lambda rng: rng.choice(_PRODUCTS),
    ),
    "distance": _Attribute(
        ("{place} lies {value} from the next town.", "The next town is {value} away from {place}."),
        ("How far is {place} from the next town?", "How far away from {place} is the next town?"),
        _number(2, 70, "kilometres"),
    ),
}


@dataclass(frozen=True)
class _Fact:
    place: str
    attribute: str
    value: str

    def text(self, rng: random.Random) -> str:
        statement = rng.choice(_ATTRIBUTES[self.attribute].statements).format(place=self.place, value=self.value)
        return f"{statement[0].upper()}{statement[1:]} {rng.choice(_FILLERS)}"


def rows(spec: str) -> Iterator[Row]:
    """Distinct tasks of a spec, without its `documents:`, with the inputs `question` and `documents` (mappings with
    `source` and `text`).

    Expected are `answer` and `passages`, the texts of the passages that have it; for a removed passage `passages` is
    empty and there is no answer. The share `removed` (0.3) of the tasks is of that kind, spread evenly. The split is by
    hash.

    Raises:
        DataError: another stage than `facts`, or an option that does not fit.
    """
    stage, _, query = spec.partition("?")
    if stage != "facts":
        raise DataError(f"documents has no kind {stage!r}; there is facts, as in documents:facts?size=100")
    options = options_of(query, ("size", "seed", "passages", "removed"), f"documents:{stage}")
    size, seed = number_of(options, "size", 500, at_least=1), number_of(options, "seed", 0)
    passages, removed = number_of(options, "passages", 20, at_least=2), share_of(options, "removed", 0.3)
    rng, seen = random.Random(f"documents/{seed}"), set[str]()
    for at in range(size):
        # Without the small addend, 0.29 * 100 = 28.999… would lose a task.
        absent = int((at + 1) * removed + 1e-9) > int(at * removed + 1e-9)
        while True:
            question, documents, answer, text = _task(rng, passages, absent)
            key = json.dumps([question, documents])
            if key not in seen:
                break
        seen.add(key)
        expected = {"passages": []} if absent else {"answer": answer, "passages": [text]}
        yield (
            f"documents:facts:{at + 1}",
            {
                "inputs": {"question": question, "documents": documents},
                "expected": expected,
                "task_type": "removed" if absent else "answerable",
                "metadata": {"answerable": not absent},
            },
        )


def _task(rng: random.Random, passages: int, absent: bool) -> tuple[str, list[dict[str, str]], str, str]:
    """Question, documents, answer, and the text that has it."""
    places = [f"{name} {kind}" for name, kind in zip(rng.sample(_NAMES, 12), rng.sample(_KINDS, 12), strict=True)]
    target, asked = f"the {places[0]}", rng.choice(list(_ATTRIBUTES))
    fact = _Fact(target, asked, _ATTRIBUTES[asked].value(rng))
    text = fact.text(rng)
    facts = [
        _Fact(place, attribute, _ATTRIBUTES[attribute].value(rng))
        for place in (f"the {place}" for place in places)
        for attribute in _ATTRIBUTES
        if (place, attribute) != (target, asked)
    ]
    own = [other for other in facts if other.place == target]
    alike = [other for other in facts if other.attribute == asked]
    # Always included: passages that share the place or the kind of fact with the question, so that neither alone
    # identifies the answer.
    near = [*rng.sample(own, min(4, passages // 4 + 1)), *rng.sample(alike, min(4, passages // 4 + 1))]
    rest = [other for other in facts if other not in near]
    others = [*near, *rng.sample(rest, len(rest))][: passages - (not absent)]
    texts = [(other.place, other.text(rng)) for other in others] + ([] if absent else [(target, text)])
    documents = [
        {"source": f"{place.removeprefix('the ').replace(' ', '_').lower()}.txt", "text": words}
        for place, words in rng.sample(texts, len(texts))
    ]
    question = rng.choice(_ATTRIBUTES[asked].questions).format(place=target)
    return question, documents, fact.value, text
