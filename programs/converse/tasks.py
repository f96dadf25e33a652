"""Generated conversations, `conversations:?facts=&changes=&size=&seed=`, for programs with the inputs `service`,
`form` and `user`, such as `converse`.

The user has a goal and facts. A fact is told only when it is asked for. Some facts are told after a second request, and
some are first told wrongly and corrected later. The task is completed if the outcome has the value of every fact, which
code can check. Splits are those of the key, as for any data that names none.
"""

import random
from collections.abc import Iterator
from typing import Any

from assay.datasets.specs import number_of, options_of, share_of, span_of
from assay.errors import DataError
from assay.support.names import one_of

from .words import FIELDS, OWN, SERVICES, Field

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
