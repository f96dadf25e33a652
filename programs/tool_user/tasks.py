"""Generated tasks of tool use, `tools:STAGE?size=&seed=`, for programs with the inputs `question` and `tools`.

Tools are made of an action and a thing, such as `track_parcel`. The things, and with them the names and schemas of the
tools, are divided over the four splits: those of val, gate and test never occur in train, for any stage, size or seed.
The stages are the difficulties of the shipped curriculum `tool_use`.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.datasets.specs import number_of, options_of
from assay.errors import DataError


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


def _text_kind(description: str, values: list[str], phrase: str, *, enum: bool = False) -> Kind:
    schema: dict[str, Any] = {"type": "string", "description": description, **({"enum": values} if enum else {})}
    return Kind(schema, lambda rng: rng.choice(values), phrase.format)


def _number(kind: str, description: str, low: int, high: int, phrase: str) -> Kind:
    def value(rng: random.Random) -> int | float:
        number = rng.randint(low, high)
        return number if kind == "integer" else number + rng.randint(0, 9) / 10

    return Kind({"type": kind, "description": description}, value, phrase.format)


KINDS: Mapping[str, Kind] = {
    "city": _text_kind("City of the place.", _CITIES, "located in {}"),
    "customer": _text_kind("First name of the customer.", _PEOPLE, "of the customer {}"),
    "date": Kind(
        {"type": "string", "description": "Day, as YYYY-MM-DD."},
        lambda rng: f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
        "on {}".format,
    ),
    "quantity": _number("integer", "Number of pieces.", 2, 60, "with a quantity of {}"),
    "max_price": _number("number", "Highest price in euros.", 10, 900, "for at most {} euros"),
    "weight_kg": _number("number", "Weight in kilograms.", 1, 90, "weighing {} kg"),
    "min_rating": _number("integer", "Lowest rating, from 1 to 5.", 1, 5, "rated {} or better"),
    "size": _text_kind("Size.", ["small", "medium", "large"], "of {} size", enum=True),
    "colour": _text_kind("Colour.", ["red", "green", "blue", "black", "white"], "coloured {}", enum=True),
    "urgent": Kind(
        {"type": "boolean", "description": "Whether it is urgent."},
        lambda rng: rng.random() < 0.5,
        lambda value: "which is urgent" if value else "which is not urgent",
    ),
}


_SPLIT_OF_THING = ("train", "train", "val", "gate", "test")  # by position modulo 5: the default shares
_IRRELEVANT = (1, 4, 7)  # of ten tasks of a split: 30 %
_TRIES = 200  # per task, to find one that is new


@dataclass(frozen=True)
class _Tool:
    """A tool, with the arguments of one request for it."""

    name: str
    action: str
    thing: str
    arguments: dict[str, Any]

    @property
    def words(self) -> str:
        return self.thing.replace("_", " ")

    @property
    def a_thing(self) -> str:
        return f"{'an' if self.thing[0] in 'aeio' else 'a'} {self.words}"

    def schema(self, **more: Any) -> dict[str, Any]:
        description = ACTIONS[self.action].format(thing=self.a_thing) + "."
        return _schema(self.name, description, {name: KINDS[name].schema for name in self.arguments}, **more)

    def call(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": self.arguments}

    def request(self) -> str:
        return f"{self.action.capitalize()} the {self.words} {self.conditions()}."

    def conditions(self) -> str:
        return ", ".join(KINDS[name].phrase(value) for name, value in self.arguments.items())


def _schema(name: str, description: str, properties: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": dict(properties), "required": list(properties)}
    return {"name": name, "description": description, "parameters": parameters, **more}


def _things(split: str) -> list[str]:
    return [thing for at, thing in enumerate(THINGS) if _SPLIT_OF_THING[at % 5] == split]


def _tool(rng: random.Random, split: str, *, apart: Sequence[_Tool] = ()) -> _Tool:
    """A tool of a split with another action and thing than those in `apart`."""
    thing = rng.choice([thing for thing in _things(split) if thing not in [other.thing for other in apart]])
    action = rng.choice([name for name in ACTIONS if name not in [other.action for other in apart]])
    own = random.Random(f"{action}_{thing}")  # a tool has the same parameters in all tasks and for all seeds
    names = own.sample(sorted(KINDS), own.randint(1, 3))
    return _Tool(f"{action}_{thing}", action, thing, {name: KINDS[name].value(rng) for name in names})


@dataclass(frozen=True)
class _Task:
    question: str
    tools: list[dict[str, Any]]
    calls: list[dict[str, Any]]


def _with_stated_arguments(rng: random.Random, split: str, number: int) -> _Task:
    tool = _tool(rng, split)
    arguments = ", ".join(f"{name}={json.dumps(value)}" for name, value in tool.arguments.items())
    return _Task(f"Call {tool.name} with {arguments}.", [tool.schema()], [tool.call()])


def _text(rng: random.Random, split: str, number: int) -> _Task:
    tool = _tool(rng, split)
    return _Task(tool.request(), [tool.schema()], [tool.call()])


def _two_tools(rng: random.Random, split: str, number: int) -> _Task:
    first = _tool(rng, split)
    second = _tool(rng, split, apart=[first])
    needed = [first, second] if rng.random() < 0.5 else [first]
    question = " ".join(tool.request() for tool in needed)
    return _Task(question, _shuffled(rng, [first.schema(), second.schema()]), [tool.call() for tool in needed])


def _irrelevant(rng: random.Random, split: str, number: int) -> _Task:
    task = _two_tools(rng, split, number)
    if number % 10 not in _IRRELEVANT:
        return task
    first = _tool(rng, split)
    second = _tool(rng, split, apart=[first])
    question = _tool(rng, split, apart=[first, second]).request()
    if rng.random() < 0.5:
        question = rng.choice(GENERAL).format(rng.choice(_things(split)).replace("_", " ").capitalize())
    return _Task(question, _shuffled(rng, [first.schema(), second.schema()]), [])


def _two_steps(rng: random.Random, split: str, number: int) -> _Task:
    """The second call needs the id that the first one returns."""
    tool = _tool(rng, split)
    key, id_ = f"{tool.thing}_id", f"{tool.thing[:2].upper()}-{rng.randint(1000, 9999)}"
    finder = f"find_{tool.thing}"
    find = _schema(
        finder,
        f"Returns the id of {tool.a_thing}.",
        {name: KINDS[name].schema for name in tool.arguments},
        simulation=[{"arguments": tool.arguments, "result": id_}],
    )
    act = _schema(
        tool.name,
        ACTIONS[tool.action].format(thing=tool.a_thing) + " by its id.",
        {key: {"type": "string", "description": f"Id of the {tool.words}."}},
        simulation=[{"arguments": {key: id_}, "result": "done"}],
    )
    calls = [{"name": finder, "arguments": tool.arguments}, {"name": tool.name, "arguments": {key: id_}}]
    question = f"Find the {tool.words} {tool.conditions()}, and {tool.action} it."
    return _Task(question, _shuffled(rng, [find, act]), calls)


def _errors(rng: random.Random, split: str, number: int) -> _Task:
    """The first call returns an error that says what to do instead: another tool, or another value."""
    tool = _tool(rng, split)
    named = [name for name in ("city", "customer", "date") if name in tool.arguments]
    if not named or rng.random() < 0.4:
        # neither name nor place tells which of the two is out of service; the other is also a right first call
        twin = _Tool(f"{tool.name}_v2", tool.action, tool.thing, tool.arguments)
        gone, works = rng.sample([tool, twin], 2)
        error = f"{gone.name} is out of service: call {works.name} with the same arguments"
        done = works.schema(simulation=[{"arguments": tool.arguments, "result": "done"}])
        tools = _shuffled(rng, [gone.schema(simulation=[{"error": error}]), done])
        return _Task(tool.request(), tools, [works.call()])
    name, value = named[0], tool.arguments[named[0]]
    code = f"{name[:2].upper()}{rng.randint(100, 999)}"
    refused = f"{name}={json.dumps(value)} is not accepted: give the code {code} instead"
    right = {**tool.arguments, name: code}
    cases = [{"arguments": right, "result": "done"}, {"arguments": tool.arguments, "error": refused}]
    schema = tool.schema(simulation=cases)
    schema["parameters"]["properties"][name] = {"type": "string", "description": KINDS[name].schema["description"]}
    return _Task(tool.request(), [schema], [{"name": tool.name, "arguments": right}])


def _shuffled(rng: random.Random, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return rng.sample(items, len(items))


_MAKERS: Mapping[str, Callable[[random.Random, str, int], _Task]] = {
    "given": _with_stated_arguments,
    "text": _text,
    "two_tools": _two_tools,
    "irrelevant": _irrelevant,
    "two_steps": _two_steps,
    "errors": _errors,
}
STAGES = tuple(_MAKERS)


def rows(spec: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Distinct tasks of a spec, without its `tools:`. Each row names its split; of five tasks two are in train, one in
    each other split.

    The inputs are `question` and `tools` (JSON schemas), expected are the `calls`; none if no tool is needed. In the
    stages `two_steps` and `errors` the tools have a `simulation` of their results, see `simulated_result`.

    Raises:
        DataError: unknown stage or option, or fewer distinct tasks than `size`.
    """
    stage, _, query = spec.partition("?")
    options = options_of(query, ("size", "seed"), f"tools:{stage}")
    size, seed = number_of(options, "size", 500, at_least=1), number_of(options, "seed", 0)
    if stage not in _MAKERS:
        raise DataError(f"tools has no stage {stage!r}; the stages are {', '.join(STAGES)}")
    rng, seen = random.Random(f"{stage}/{seed}"), set[str]()
    for at in range(size):
        split = _SPLIT_OF_THING[at % 5]
        number = at // 5 if split != "train" else 2 * (at // 5) + at % 5  # of the task within its split
        for _ in range(_TRIES):
            task = _MAKERS[stage](rng, split, number)
            key = json.dumps([task.question, task.tools], sort_keys=True)
            if key not in seen:
                break
        else:
            raise DataError(f"tools:{stage} has fewer than {size} distinct tasks; lower size={size}")
        seen.add(key)
        yield (
            f"tools:{stage}:{at + 1}",
            {
                "inputs": {"question": task.question, "tools": task.tools},
                "expected": {"calls": task.calls},
                "task_type": stage,
                "split": split,
                "metadata": {"needs_tool": bool(task.calls)},
            },
        )
