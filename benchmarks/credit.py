"""Turn-level compared with episode-level credit: same rollouts, rewards and steps, on an agent that makes four calls.

    python benchmarks/credit.py [--seeds 0 1 2 3 4] [--steps 10]

A letter is set by four decisions, each a call of its own with three choices. A style, another one for every
seed, says which is right; only the reward depends on it. Before, the model is warmed up on letters of any style,
so that the choices are its own and not the grammar's. A right decision earns an eighth, as step rewards of a rollout
add up to a half at most. `step` credits a call with its own reward, `to_go` with its own and the later ones,
`episode` with all four. One line a run: score on sealed letters before and after, greedily and sampled, and the area
under the curve of the training scores (the mean over the steps). The last line has the differences to `episode`,
paired over the seeds.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import dspy
import numpy as np
from scipy import stats

import assay
from assay.cli import Console
from assay.optimizers.finetuning import SFTSettings, train_sft
from assay.programs import Agent
from assay.testing.fakes import scripted_lm
from assay.traces.export.settings import Gates

MODEL = "embedded/smollm2-135m"
DECISIONS = {
    "greeting": ("Hello", "Dear", "Welcome"),
    "tone": ("formal", "warm", "funny"),
    "length": ("short", "medium", "long"),
    "closing": ("Thanks", "Yours", "Regards"),
}
TOPICS = (
    "a late parcel",
    "a wrong invoice",
    "a broken lamp",
    "a new sofa",
    "an order of shirts",
    "a lost camera",
    "a returned coat",
    "a refund",
)
PEOPLE = (
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Greta",
    "Hugo",
    "Ida",
    "Jonas",
    "Karla",
    "Leo",
    "Mia",
    "Nils",
    "Olga",
    "Paul",
)
RUBRIC = """name: style
criteria:
  - {name: right, weight: 1, check: "credit.py:right"}
  - {name: decided, scope: step, weight: 0.125, check: "credit.py:decided"}
"""


class Letter(Agent):
    """Four decisions on a letter, a call each."""

    input_names = ("text",)

    def __init__(self, parameters: Any = None, prompt_format: str = "lean") -> None:
        super().__init__(parameters, prompt_format)
        for name, choices in DECISIONS.items():
            fields = {"text": (str, dspy.InputField()), name: (Literal[choices], dspy.OutputField())}
            setattr(self, name, dspy.Predict(dspy.Signature(fields, f"Which {name}? {', '.join(choices)}.")))

    def solve(self, **inputs: Any) -> dspy.Prediction:
        return dspy.Prediction(**{name: getattr(self, name)(**inputs)[name] for name in DECISIONS})


def right(task: Any, prediction: dict[str, Any], rollout: Any) -> Any:
    """The share of right decisions."""
    return sum(prediction.get(name) == task.expected[name] for name in DECISIONS) / len(DECISIONS)


def decided(task: Any, prediction: dict[str, Any], rollout: Any) -> Any:
    """Whether this call's decision was right."""
    name, _, decision = prediction["transition"].output.partition(":")
    return float(decision.strip() == task.expected.get(name.strip()))


def prepared(seed: int, count: int, folder: Path) -> str:
    """Writes rubric and letters, and warms the model up on so many letters of any style; its name."""
    (folder / "rubric.yaml").write_text(RUBRIC.replace("credit.py", __file__))
    chosen = random.Random(seed)

    def style() -> dict[str, str]:
        return {name: chosen.choice(choices) for name, choices in DECISIONS.items()}

    house, texts = style(), [f"To {person}, about {topic}." for person in PEOPLE for topic in TOPICS]
    asked = {text: style() for text in texts}
    for file, wanted in (("letters", dict.fromkeys(texts, house)), ("any", asked)):
        lines = [json.dumps({"inputs": {"text": text}, "expected": wanted[text]}) + "\n" for text in texts]
        (folder / f"{file}.jsonl").write_text("".join(lines))

    def answer(request: Any) -> str:
        name = next(name for name in DECISIONS if f"Which {name}?" in str(request.system))
        return f"{name}: {asked[request.messages[-1].parts[0].text.removeprefix('text: ')][name]}"

    assay.collect(
        f"{__file__}:Letter",
        rubric=str(folder / "rubric.yaml"),
        data=str(folder / "any.jsonl"),
        lm=scripted_lm(answer),
        n=1,
        sizes={"train": count},
        store=folder / "any.db",
    )
    assay.export("sft", folder / "rows", store=folder / "any.db", gates=Gates(min_clean=0))
    report = train_sft(
        folder / "rows", "warm", SFTSettings(model=MODEL, epochs=1, eval_fraction=0.0, seed=seed), progress=Console()
    )
    return str(report.name)


def one(scheme: str, seed: int, model: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    clock = time.perf_counter()
    options = {
        "steps": arguments.steps,
        "num_generations": arguments.group,
        "learning_rate": arguments.rate,
        "sizes": {"test": arguments.test_size, "val": 2},
    }
    report = assay.train(
        f"{__file__}:Letter",
        rubric=str(folder / "rubric.yaml"),
        data=str(folder / "letters.jsonl"),
        name=scheme.replace("_", "-"),
        model=model,
        returns=scheme,
        seed=seed,
        prompts_per_step=2,
        beta=0.0,
        outcome_weight=0.0,
        max_completion=12,
        evaluate_every=0,
        store=folder / f"{scheme}.db",
        progress=Console(),
        **options,
    )
    seconds, scores = time.perf_counter() - clock, list(report.curves["score"].values())
    ends = {
        mode: {"before": side["before"]["score"], "after": side["after"]["score"], "gain": side["gain"]}
        for mode, side in next(iter(report.validation.values())).items()
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
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--group", type=int, default=8, help="Rollouts of a task, two tasks a step.")
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--warm-up", type=int, default=16, help="Letters, four rows each.")
    parser.add_argument("--test-size", type=int, default=12)
    arguments = parser.parse_args()
    runs_of: dict[str, list[dict[str, Any]]] = {scheme: [] for scheme in arguments.schemes}
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            os.environ["ASSAY_ADAPTERS"] = str(folder / "adapters")
            model = prepared(seed, arguments.warm_up, folder)
            for scheme in arguments.schemes:
                runs_of[scheme].append(one(scheme, seed, model, arguments, folder))
                print(json.dumps(runs_of[scheme][-1]), flush=True)
    comparisons = {
        f"{scheme} against episode": {
            name: compared([of(one) for one in runs_of["episode"]], [of(one) for one in runs])
            for name, of in MEASURES.items()
        }
        for scheme, runs in runs_of.items()
        if scheme != "episode" and "episode" in runs_of and len(runs) > 1
    }
    print(json.dumps(comparisons))


MEASURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "area": lambda run: run["area"],
    "greedy": lambda run: run["greedy"]["after"],
    "sampled": lambda run: run["sampled"]["after"],
}


def compared(before: list[float], after: list[float]) -> dict[str, float]:
    """The mean difference over seeds, with its interval by Student's t; none where all seeds differ alike."""
    apart = np.array(after) - np.array(before)
    difference = {"mean": float(apart.mean()), "seeds": len(apart)}
    if not np.ptp(apart):
        return difference
    low, high = stats.t.interval(0.95, len(apart) - 1, loc=apart.mean(), scale=stats.sem(apart))
    return {**difference, "low": float(low), "high": float(high)}


if __name__ == "__main__":
    main()
