"""Credit by call against credit by episode: the same rollouts, rewards and steps, on an agent that makes four calls.

    python benchmarks/credit.py [--seeds 0 1 2 3 4] [--steps 16]

A message is sorted by four decisions, each a call and each worth a quarter: topic, kind of thing, tone, urgency. `step` credits a call with
its own reward, `to_go` with its own and the later ones, `episode` with all four. One line a run: score on sealed messages before and after,
greedily and sampled, and the area under the curve of the training scores (the mean over the steps).
"""

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import dspy
import numpy as np

import assay
from assay.cli.shared import Console
from assay.programs import Agent

TOPICS = {
    "billing": ["I was charged twice for the {}", "The invoice of my {} is wrong"],
    "delivery": ["The {} has not arrived", "Where is the parcel with my {}"],
    "returns": ["I want to send the {} back", "Can I exchange my {}"],
}
THINGS = {"furniture": ["desk", "lamp", "sofa"], "clothes": ["coat", "shirt", "dress"], "electronics": ["phone", "camera", "laptop"]}
TONES = {"angry": ["This is outrageous!", "I am furious."], "calm": ["Hello.", "Good day."], "happy": ["I love your shop!", "You are wonderful!"]}
URGENCIES = {"today": ["I need it today.", "It cannot wait a day."], "later": ["Take your time.", "There is no hurry."]}
DECISIONS = {"topic": TOPICS, "thing": THINGS, "tone": TONES, "when": URGENCIES}
RUBRIC = """name: triage
criteria:
  - {name: right, weight: 1, check: "credit.py:right"}
  - {name: decided, scope: step, weight: 0.25, check: "credit.py:decided"}
"""


class Triage(Agent):
    """Four decisions on a message, a call each."""

    input_names = ("text",)

    def __init__(self, parameters: Any = None, adapter: str = "lean") -> None:
        super().__init__(parameters, adapter)
        for name, choices in DECISIONS.items():
            fields = {"text": (str, dspy.InputField()), name: (Literal[tuple(choices)], dspy.OutputField())}
            setattr(self, name, dspy.Predict(dspy.Signature(fields, f"Which {name}? {', '.join(choices)}.")))

    def solve(self, **inputs: Any) -> dspy.Prediction:
        return dspy.Prediction(**{name: getattr(self, name)(**inputs)[name] for name in DECISIONS})


def right(task: Any, prediction: dict[str, Any], rollout: Any) -> Any:
    """The share of right decisions."""
    return sum(prediction.get(name) == task.expected[name] for name in DECISIONS) / len(DECISIONS)


def decided(task: Any, prediction: dict[str, Any], rollout: Any) -> Any:
    """Whether this call's decision was right."""
    name, _, said = prediction["transition"].output.partition(":")
    return float(said.strip() == task.expected.get(name.strip()))


def messages(seed: int, count: int = 300) -> list[dict[str, Any]]:
    chosen, found = random.Random(seed), dict[str, dict[str, Any]]()
    while len(found) < count:
        labels = {name: chosen.choice(list(choices)) for name, choices in DECISIONS.items()}
        thing, topic = chosen.choice(THINGS[labels["thing"]]), chosen.choice(TOPICS[labels["topic"]])
        text = f"{chosen.choice(TONES[labels['tone']])} {topic.format(thing)}. {chosen.choice(URGENCIES[labels['when']])}"
        found[text] = {"inputs": {"text": text}, "expected": labels}
    return list(found.values())


def one(scheme: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    os.environ["ASSAY_ADAPTERS"] = str(folder / "adapters")
    (folder / "rubric.yaml").write_text(RUBRIC.replace("credit.py", __file__))
    (folder / "messages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in messages(seed)))
    clock = time.perf_counter()
    report = assay.train(
        f"{__file__}:Triage", rubric=str(folder / "rubric.yaml"), data=str(folder / "messages.jsonl"), name=f"{scheme.replace('_', '-')}-{seed}",
        returns=scheme, seed=seed, steps=steps, tasks=4, group=4, learning_rate=3e-4, beta=0.0, outcome_weight=0.0, max_completion=12,
        evaluate_every=0, sizes={"test": 40, "val": 2}, store=folder / "a.db", progress=Console(),
    )  # fmt: skip
    seconds, scores = time.perf_counter() - clock, list(report.curves["score"].values())
    ends = {
        mode: {"before": told["before"]["score"], "after": told["after"]["score"], "gain": told["gain"]}
        for mode, told in next(iter(report.validation.values())).items()
    }
    return {
        "returns": scheme,
        "seed": seed,
        "seconds": round(seconds),
        "area": float(np.mean(scores)),
        "scores": [round(s, 3) for s in scores],
        **ends,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--schemes", nargs="+", default=["to_go", "episode", "step"])
    parser.add_argument("--steps", type=int, default=16)
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        for scheme in arguments.schemes:
            with tempfile.TemporaryDirectory() as folder:
                print(json.dumps(one(scheme, seed, arguments.steps, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
