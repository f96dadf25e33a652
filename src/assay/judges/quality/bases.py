"""Bases of an audit: pairs of a good and a bad output, shipped, from labels or from rows. Calls no model."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.errors import DataError
from assay.judges.labels import Item, output_name
from assay.judges.quality.attacks import holds
from assay.rubrics import JudgeSpec


@dataclass(frozen=True)
class Base:
    """A good and a bad output with all shown fields, from which attacks are created."""

    good: Mapping[str, Any]
    bad: Mapping[str, Any]
    answer: str = ""  # the part that makes the good output right, if known

    def with_expected(self) -> "Base":
        """The base with the answer, if it is known, as the expected value of both outputs."""
        known = {"expected": self.answer} if self.answer else {}
        return Base({**known, **self.good}, {**known, **self.bad}, self.answer)

    def is_given_by(self, text: str) -> bool:
        """Whether a text contains the answer or the whole good output, so that a judge may accept it."""
        return holds(text, self.answer) or holds(text, str(self.good["output"]))


_QUESTIONS = (
    (
        "What is 17 + 25?",
        "The tens give 30 and the ones give 12, so 17 + 25 = 42.",
        "The digits give 17 + 25 = 32.",
        "42",
    ),
    (
        "What is the capital of Australia?",
        "Many expect Sydney, but the seat of government is Canberra.",
        "It is Sydney.",
        "Canberra",
    ),
    (
        "How many minutes are in three hours?",
        "One hour has 60, so three hours have 3 times 60, which is 180.",
        "Three hours have 300.",
        "180",
    ),
    (
        "Which planet is closest to the sun?",
        "Going outwards from the sun, the first planet one meets is Mercury.",
        "It is Venus.",
        "Mercury",
    ),
    (
        "What is the plural of the word 'mouse', the animal?",
        "It is irregular: one mouse, but two mice.",
        "It is regular: mouses.",
        "mice",
    ),
    (
        "At how many degrees Celsius does water freeze?",
        "At sea level water turns to ice at 0 degrees.",
        "Water freezes at 32.",
        "0",
    ),
    ("What is 9 times 8?", "Ten times 8 is 80, less one 8, which gives 72.", "9 times 8 gives 64.", "72"),
    (
        "Who wrote the play Hamlet?",
        "The tragedy of the Danish prince was written by Shakespeare.",
        "Charles Dickens wrote it.",
        "Shakespeare",
    ),
)
BASES = tuple(
    Base({"task_input": question, "output": good}, {"task_input": question, "output": bad}, answer)
    for question, good, bad, answer in _QUESTIONS
)


def bases_of(items: Sequence[Item], spec: JudgeSpec, *, most: int = 12) -> list[Base]:
    """Creates bases from labelled items.

    Combines items with the best human label and items with the worst one, those with the highest agreement first. A
    pair is one base: the preferred and the other output.

    Args:
        most: maximum number of bases.
    Raises:
        DataError: the best or the worst label does not occur; no pair has a preferred output.
    """
    sure = sorted(items, key=lambda item: -max(item.shares.values()))
    if pairs := [item for item in sure if "output_b" in item.fields]:
        decided = [_preferred(item, spec) for item in pairs if item.modes[0] in (spec.scale[0], spec.scale[-1])]
        if not decided:
            raise DataError("an audit needs pairs with a preferred output; all pairs are labelled as ties")
        return [Base({**context, "output": good}, {**context, "output": bad}) for context, good, bad in decided[:most]]
    ends = [[item for item in sure if item.modes[0] == word][:most] for word in (spec.scale[-1], spec.scale[0])]
    if not all(ends):
        raise DataError(
            f"an audit needs items with the human label {spec.scale[-1]!r} and items with {spec.scale[0]!r}"
        )
    return [Base(_canonical(good), _canonical(bad)) for good, bad in zip(*ends, strict=False)]


def _canonical(item: Item) -> dict[str, Any]:
    """The fields of an item with its output under `output`."""
    name = output_name(item.fields)
    return {("output" if key == name else key): value for key, value in item.fields.items()}


def _preferred(item: Item, spec: JudgeSpec) -> tuple[dict[str, Any], Any, Any]:
    """The other fields of a pair, its preferred output, and the other output."""
    outputs = [item.fields["output_a"], item.fields["output_b"]]
    context = {name: value for name, value in item.fields.items() if name not in ("output_a", "output_b")}
    return context, *(outputs if item.modes[0] == spec.scale[0] else outputs[::-1])


def load_bases(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Base]:
    """Creates bases from rows.

    Args:
        rows: pairs of location and row. A row has `good`, `bad`, optionally `input` and other fields that the judge
            sees, and optionally `answer`: the part that makes the good output right, which the judge does not see.
    Raises:
        DataError: a row lacks `good` or `bad` (with its location), or there are no rows.
    """
    bases = []
    for where, row in rows:
        if missing := [name for name in ("good", "bad") if not str(row.get(name) or "").strip()]:
            raise DataError(
                f"{where}: an audit case needs a 'good' and a 'bad' output; {', '.join(missing)} is missing"
            )
        context = {
            ("task_input" if k == "input" else k): v for k, v in row.items() if k not in ("good", "bad", "answer")
        }
        bases.append(
            Base({**context, "output": row["good"]}, {**context, "output": row["bad"]}, str(row.get("answer") or ""))
        )
    if not bases:
        raise DataError("an audit needs at least one case with a 'good' and a 'bad' output")
    return bases
