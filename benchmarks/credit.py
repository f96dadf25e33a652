"""Credit by call against credit by episode: the same rollouts, rewards and steps, on an agent that makes four calls.

    python benchmarks/credit.py [--seeds 0 1 2 3 4] [--steps 12] [--warm-up 8]

A message is sorted by four decisions, each a call and each worth a quarter: topic, kind of thing, tone, urgency. `step` credits a call with
its own reward, `to_go` with its own and the later ones, `episode` with all four. All schemes of a seed begin from one warm-up on so many
right messages. One line a run: score on sealed messages before and after, greedily and sampled, and the area under the curve of the
training scores (the mean over the steps).
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
from assay.optimizers.weights import SFTConfig, train_sft
from assay.programs import Agent
from assay.testing.fakes import scripted_lm

MODEL = "embedded/smollm2-135m"
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


def prepared(seed: int, count: int, folder: Path) -> str:
    """Writes rubric and messages, and warms the model up on so many of them; its name."""
    (folder / "rubric.yaml").write_text(RUBRIC.replace("credit.py", __file__))
    rows = messages(seed)
    (folder / "messages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not count:
        return MODEL
    labels = {row["inputs"]["text"]: row["expected"] for row in rows}

    def answer(request: Any) -> str:
        asked, system = request.messages[-1].parts[0].text, str(request.system)
        name = next(name for name in DECISIONS if f"Which {name}?" in system)
        return f"{name}: {labels[asked.removeprefix('text: ')][name]}"

    assay.collect(f"{__file__}:Triage", rubric=str(folder / "rubric.yaml"), data=str(folder / "messages.jsonl"), lm=scripted_lm(answer), n=1,
                  sizes={"train": count}, store=folder / "warm.db")  # fmt: skip
    assay.export("sft", folder / "rows", store=folder / "warm.db", allow_ungated=True)
    told = train_sft(folder / "rows", "warm", SFTConfig(model=MODEL, epochs=1, held_out=0.0, seed=seed), progress=Console())
    return str(told.name)


def one(scheme: str, seed: int, steps: int, model: str, tests: int, folder: Path) -> dict[str, Any]:
    clock = time.perf_counter()
    report = assay.train(
        f"{__file__}:Triage", rubric=str(folder / "rubric.yaml"), data=str(folder / "messages.jsonl"), name=scheme.replace("_", "-"), model=model,
        returns=scheme, seed=seed, steps=steps, tasks=4, group=4, learning_rate=3e-4, beta=0.0, outcome_weight=0.0, max_completion=12,
        evaluate_every=0, sizes={"test": tests, "val": 2}, store=folder / f"{scheme}.db", progress=Console(),
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
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=8, help="Right messages, four rows each; 0: none.")
    parser.add_argument("--test-size", type=int, default=24)
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            os.environ["ASSAY_ADAPTERS"] = str(folder / "adapters")
            model = prepared(seed, arguments.warm_up, folder)
            for scheme in arguments.schemes:
                print(json.dumps(one(scheme, seed, arguments.steps, model, arguments.test_size, folder)), flush=True)


if __name__ == "__main__":
    main()
