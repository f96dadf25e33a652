"""Turn-level compared with episode-level credit on ten calls whose effects show three calls later.

Ten decisions on a greenhouse are a call each, with three choices. A rule, another one for every seed, says which choice
is right; only the reward depends on it. The reward of a decision comes with the call three calls later, that of the
last ones with the last call. `to_go` credits a call with its own reward and the later ones, `episode` with those of the
whole episode. Both start from the same model, with the same tasks, rollouts and steps; it has seen plants with choices
drawn at random, so that the choices are its own and not the grammar's. Sealed plants are sampled once at temperature 1.
"""

import json
import random
from typing import Any, Literal

import dspy

from assay.programs import Agent
from claims.storing import Measured, Setting, held_out
from claims.trained import train, use_scratch_adapters, warmed_up

DECISIONS = {
    "soil": ("sand", "clay", "peat"),
    "pot": ("small", "wide", "deep"),
    "place": ("north", "south", "west"),
    "light": ("sun", "lamp", "shade"),
    "water": ("rain", "tap", "mist"),
    "food": ("bone", "ash", "fish"),
    "air": ("open", "shut", "fan"),
    "heat": ("cool", "warm", "hot"),
    "cover": ("glass", "straw", "net"),
    "harvest": ("early", "late", "never"),
}
DELAY = 3
PLANTS = ("fern", "rose", "basil", "tomato", "orchid", "ivy", "pepper", "melon", "fig", "lemon", "mint", "lily")
PEOPLE = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas")
PROGRAM = f"{__file__}:Greenhouse"
WARM, WARM_RATE, TEST = 16, 2e-4, 20
STEPS, GROUP, PROMPTS, RATE = 8, 6, 2, 3e-4
WEIGHT = 0.2  # a call is graded by quarters of it, so that an episode of right decisions has 10 / 4 * 0.2 = 0.5
RUBRIC = f"""name: grown
criteria:
  - {{name: right, weight: 1, check: "{__file__}:right"}}
  - {{name: grown, scope: step, weight: {WEIGHT}, check: "{__file__}:grown"}}
"""
ANY = """name: any
criteria:
  - {name: ended, weight: 1, check: "claims.edit_agent:ended"}
"""


class Greenhouse(Agent):
    """Ten decisions on a plant, a call each."""

    input_names = ("plant",)

    def __init__(self, parameters: Any = None, prompt_format: str = "lean") -> None:
        super().__init__(parameters, prompt_format)
        for name, choices in DECISIONS.items():
            fields = {"plant": (str, dspy.InputField()), name: (Literal[choices], dspy.OutputField())}
            setattr(self, name, dspy.Predict(dspy.Signature(fields, f"Which {name}? {', '.join(choices)}.")))

    def solve(self, **inputs: Any) -> dspy.Prediction:
        return dspy.Prediction(**{name: getattr(self, name)(**inputs)[name] for name in DECISIONS})


def right(task: Any, prediction: dict[str, Any], rollout: Any) -> float:
    """The share of right decisions."""
    return sum(prediction.get(name) == task.expected[name] for name in DECISIONS) / len(DECISIONS)


def grown(task: Any, prediction: dict[str, Any], rollout: Any) -> float:
    """Quarters: whether the decision three calls ago was right; with the last call also the later ones."""
    calls, at = rollout.transitions, prediction["transition"].t
    visible = range(max(0, at - DELAY), len(DECISIONS) if at == len(DECISIONS) - 1 else max(0, at - DELAY + 1))
    return sum(_decided(calls[t].output, task.expected) for t in visible) / (DELAY + 1)


def _decided(output: str, expected: Any) -> bool:
    name, _, choice = output.partition(":")
    return bool(choice.strip() == expected.get(name.strip()))


def measure(setting: Setting) -> Measured:
    use_scratch_adapters(setting)
    warm = prepared(setting)
    curves = {
        returns: train(
            setting,
            PROGRAM,
            returns.replace("_", "-"),
            rubric=str(setting.scratch / "rubric.yaml"),
            data=str(setting.scratch / "plants.jsonl"),
            model=warm,
            returns=returns,
            outcome_weight=0.0,
            steps=STEPS,
            test=TEST,
            num_generations=GROUP,
            prompts_per_step=PROMPTS,
            learning_rate=RATE,
            max_completion=12,
            per_device_batch_size=GROUP,
        )
        for returns in ("episode", "to_go")
    }
    models = {"start": warm, "before": f"{warm}+episode", "after": f"{warm}+to-go"}
    values = {"right": {side: sampled(setting, model) for side, model in models.items()}}
    facts = {"curves": curves, "steps": STEPS, "rollouts": STEPS * GROUP * PROMPTS, "calls": len(DECISIONS)}
    return Measured(values=values, facts=facts)


def prepared(setting: Setting) -> str:
    """Writes rubric and tasks, and warms the model up on decisions drawn at random; its name."""
    folder, rng = setting.scratch, random.Random(setting.seed)
    (folder / "rubric.yaml").write_text(RUBRIC)
    (folder / "any.yaml").write_text(ANY)
    rule = {name: rng.choice(choices) for name, choices in DECISIONS.items()}
    plants = [f"{plant} of {person}" for plant in PLANTS for person in PEOPLE]
    lines = [json.dumps({"inputs": {"plant": plant}, "expected": rule}) + "\n" for plant in plants]
    (folder / "plants.jsonl").write_text("".join(lines))

    def answer(request: Any) -> str:
        name = next(name for name in DECISIONS if f"Which {name}?" in str(request.system))
        return f"{name}: {rng.choice(DECISIONS[name])}"

    return warmed_up(
        setting,
        PROGRAM,
        answer,
        rows=WARM,
        learning_rate=WARM_RATE,
        rubric=str(folder / "any.yaml"),
        data=str(folder / "plants.jsonl"),
    )


def sampled(setting: Setting, model: str) -> dict[str, float]:
    """The share of right decisions by sealed plant."""
    evaluation = held_out(
        setting,
        PROGRAM,
        rubric=str(setting.scratch / "rubric.yaml"),
        data=str(setting.scratch / "plants.jsonl"),
        test=TEST,
        model=model,
        parameters={"temperature": 1.0},
    )
    return dict(evaluation.scores)
