"""The tasks of `benchmarks/peers.py`: program, data and model of each."""

import csv
import importlib.util
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dspy

from assay.datasets import Task, iter_rows
from assay.models import LanguageModel, Meter, ResponseCache, get_lm
from assay.programs import MathQA
from assay.shipped.programs.classify.program import Classify
from assay.shipped.programs.extract.program import Extract
from assay.testing import scripted_lm

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from rigs.learner import InContextLearner

TRAIN, VAL, TEST, SCRIPTED_TEST = 80, 40, 64, 2000
INTENTS = (
    "card_arrival",
    "lost_or_stolen_card",
    "exchange_rate",
    "top_up_failed",
    "pending_transfer",
    "declined_card_payment",
    "change_pin",
    "verify_my_identity",
)


@dataclass
class Setting:
    """One task with its data and model. `calls` is how many LM calls a run of the program takes."""

    program: Callable[[], Any]
    rubric: str
    train: list[Task]
    val: list[Task]
    test: list[Task]
    lm: LanguageModel
    model: str
    calls: int = 1
    spare: list[dict[str, Any]] = field(
        default_factory=list
    )  # gate and test rows of a compile, which are not what is reported

    def examples(self, tasks: Sequence[Task]) -> list[Any]:
        return [dspy.Example(**task.inputs, **task.expected).with_inputs(*task.inputs) for task in tasks]

    def metric(self, example: Any, prediction: Any, trace: Any = None) -> bool:
        return all(
            _plain(getattr(prediction, name, None)) == _plain(value)
            for name, value in example.labels().toDict().items()
        )

    def right(self, program: Any, task: Task) -> bool:
        with dspy.context(lm=self.lm, disable_history=True):
            try:
                return self.metric(self.examples([task])[0], program(**dict(task.inputs)))
            except Exception:  # an answer that cannot be read is wrong, for all alike
                return False


def _plain(value: Any) -> str:
    return " ".join(str(value).casefold().split())


def setting(name: str, seed: int, *, model: str, temperature: float) -> Setting:
    """The task `name` with the data of `seed`."""
    kind, _, rest = name.partition(":")
    meter, cache = Meter(), ResponseCache()
    if kind == "learner":
        learner = InContextLearner(rest, seed=seed)
        lm = scripted_lm(learner, meter=meter, cache=cache).copy(temperature=temperature)
        tasks = learner.tasks(TRAIN + VAL + SCRIPTED_TEST + 2, seed=1)
        return _split(learner.program, "classify", tasks, SCRIPTED_TEST, lm, "learner")
    lm = get_lm(model, meter=meter, cache=cache, temperature=temperature, seed=seed)
    rows = {"chain": _chain, "banking77": _banking, "dates": _dates, "orders": _orders}[kind](rest, seed)
    tasks = [Task(id=str(i), inputs=inputs, expected=expected) for i, (inputs, expected) in enumerate(rows)]
    if kind == "chain":
        return _split(MathQA, "math_qa", tasks, TEST, lm, model, calls=4)
    if kind == "banking77":
        return _split(lambda: Classify(sorted(INTENTS)), "classify", tasks, TEST, lm, model)
    return _split(lambda: Extract.from_tasks(tasks), "extract", tasks, TEST, lm, model)


def _split(
    program: Any, rubric: str, tasks: list[Task], test: int, lm: LanguageModel, model: str, calls: int = 1
) -> Setting:
    spare = [
        {"inputs": dict(task.inputs), "expected": dict(task.expected), "split": split}
        for split, task in zip(("gate", "test"), tasks[:2], strict=True)
    ]
    tasks = tasks[2:]
    return Setting(
        program,
        rubric,
        tasks[:TRAIN],
        tasks[TRAIN : TRAIN + VAL],
        tasks[TRAIN + VAL : TRAIN + VAL + test],
        lm,
        model,
        calls,
        spare,
    )


Rows = list[tuple[dict[str, Any], dict[str, Any]]]
_ALL = TRAIN + VAL + TEST + 2


def _chain(rest: str, seed: int) -> Rows:
    """Sums and differences of two or three numbers of two or three digits."""
    rows = {
        row["inputs"]["question"]: row["expected"]["answer"]
        for _, row in iter_rows(f"arithmetic:size={2 * _ALL}&seed={9000 + seed}")
    }
    return [({"question": question}, {"answer": answer}) for question, answer in list(rows.items())[:_ALL]]


def _banking(path: str, seed: int) -> Rows:
    """Eight intents of banking77 (CC-BY-4.0), a CSV file with `text` and `category`."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["category"] in INTENTS]
    random.Random(seed).shuffle(rows)
    return [({"text": row["text"]}, {"label": row["category"]}) for row in rows[:_ALL]]


def _dates(rest: str, seed: int) -> Rows:
    """The date strings of this machine's Debian changelogs, as `examples/changelog_dates.py` reads them: the date as
    YYYY-MM-DD."""
    path = Path(__file__).parents[1] / "examples" / "changelog_dates.py"
    spec = importlib.util.spec_from_file_location("changelog_dates", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    dated = sorted(module.dates(Path(rest or "/usr/share/doc")).items())
    return [({"text": text}, {"date": date}) for text, date in random.Random(seed).sample(dated, _ALL)]


def _orders(rest: str, seed: int) -> Rows:
    """Orders in a sentence: article and city."""
    rng = random.Random(f"orders {seed}")
    articles = (
        "desk lamp",
        "coffee mill",
        "rain coat",
        "bicycle bell",
        "wool blanket",
        "garden hose",
        "tea pot",
        "wall clock",
        "steel pan",
    )
    cities = ("Lisbon", "Oslo", "Vienna", "Dublin", "Porto", "Turin", "Ghent", "Bergen", "Krakow", "Malaga")
    names = ("Ms Lindqvist", "Mr Okafor", "Dr Petrova", "Mrs Tanaka", "Mr Almeida")
    orders: dict[str, dict[str, str]] = {}
    while len(orders) < _ALL:
        article, city, count = rng.choice(articles), rng.choice(cities), rng.randint(2, 40)
        who = rng.choice(names)
        text = rng.choice((
            f"{who} from {city} wants {count} pieces of the {article}.",
            f"Please ship a {article} to {who} in {city}, order {rng.randint(100, 999)}.",
            f"We are out of the {article} again, writes {who}; our shop is in {city}.",
            f"To {city}: one {article}, paid by {who} in Rome.",
        ))  # fmt: skip
        orders[text] = {"article": article, "city": city}
    return [({"text": text}, expected) for text, expected in orders.items()]
