"""A task that the training is not about: name the city of a sentence, from four demonstrations.

Has no code, numbers to compute or checkers. `before` is the embedded model as it comes, `after` the model of
`hacking.py` that was trained with the criteria: that of the scratch folder (ASSAY_FIGURES_SCRATCH) if it has one, else
one that is trained here. The score is the share of exact answers. One call a task, nearly greedy.
"""

import random

import dspy

from assay.datasets import Task
from assay.programs import Agent
from assay.rubrics import Criterion, Rubric
from claims import hacking
from claims.storing import Measured, Setting, held_out
from claims.trained import use_scratch_adapters

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Karla", "Leo")
CITIES = ("Athens", "Berlin", "Boston", "Cairo", "Chicago", "Delhi", "Dublin", "Geneva", "Havana", "Lima", "Lisbon")
CITIES += ("London", "Madrid", "Oslo", "Paris", "Prague", "Rome", "Seoul", "Sydney", "Tokyo", "Toronto", "Vienna")
SENTENCES = (
    "{name} sent a parcel from {city} to a friend in June.",
    "The train that {name} takes to {city} was late again.",
    "In {city}, {name} bought a blue coat for the winter.",
    "{name} wrote that the hotel in {city} was full.",
    "A letter from {city} arrived, and {name} read it twice.",
)
DEMONSTRATED, TEST = 4, 40


class City(Agent):
    """Names the city."""

    input_names = ("text",)

    def __init__(self, demos: list[dict[str, str]]) -> None:
        super().__init__(prompt_format="lean")
        self.name = dspy.Predict("text -> city")
        self.name.demos = demos

    def solve(self, **inputs: str) -> dspy.Prediction:
        return dspy.Prediction(city=self.name(**inputs).city)


def right(task: Task, prediction: dict[str, str], rollout: object) -> float:
    return float(prediction["city"].strip() == task.expected["city"])


def measure(setting: Setting) -> Measured:
    adapters = setting.scratch / "adapters"
    use_scratch_adapters(setting)
    is_trained = (adapters / "criteria").is_dir()
    if not is_trained:
        hacking.write_files(setting.scratch, setting.seed)
        hacking.trained(setting, hacking.random_edits(setting), "criteria")
    sides = {"before": setting.model, "after": f"{setting.model}+warm+criteria"}
    values = {"other": {side: scores(setting, model) for side, model in sides.items()}}
    return Measured(values=values, facts={"trained before": is_trained})


def scores(setting: Setting, model: str) -> dict[str, float]:
    """Score by task."""
    rng = random.Random(setting.seed)
    kinds = [(sentence, name, city) for sentence in SENTENCES for name in NAMES for city in CITIES]
    rows = [
        {"text": sentence.format(name=name, city=city), "city": city}
        for sentence, name, city in rng.sample(kinds, DEMONSTRATED + TEST)
    ]
    program = City(rows[:DEMONSTRATED])
    program.set_parameters({"temperature": 0.1})
    evaluation = held_out(
        setting,
        program,
        rubric=Rubric("cities", [Criterion(name="right", check=right)]),
        data=[{**row, "split": "test"} for row in rows[DEMONSTRATED:]],
        model=model,
    )
    return dict(evaluation.scores)
