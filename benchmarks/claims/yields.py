"""The oven with noisy outcomes: yield of the last plan, plain and trained on the best plans of random experiments.

Plans are drawn at random in experiments of train tasks. Of each material, the plan whose experiments have the highest
mean score is chosen, and calls that wrote it are the rows of a supervised warm-up, as many after no, one and two
trials. Test tasks are answered at temperature 0.1, by the plain and by the trained model.
"""

import json
import random
from collections import defaultdict
from statistics import fmean
from typing import Any

import assay
from assay.evaluation import Evaluation
from assay.optimizers.finetuning import SFTSettings, train_sft
from assay.shipped.programs.experiment.tasks import HEATS, HOURS
from assay.testing.fakes import scripted_lm
from assay.traces.export.settings import Gates
from claims.conversations import grades
from claims.storing import Lines, Measured, Setting, held_out
from claims.trained import use_scratch_adapters

TRIALS = 3
DATA = f"experiment:size=400&trials={TRIALS}" + "&seed={seed}"
TASKS, EXPERIMENTS = 140, 16  # train tasks, and random experiments of each
CALLS = 5  # to train on, of each material and number of trials before
EPOCHS, RATE = 12, 1e-3
TEST = 30
FIGURES = {"yield": "yield_share", "feasible": "feasible"}
Row = dict[str, Any]


def measure(setting: Setting) -> Measured:
    use_scratch_adapters(setting)
    rows = random_experiments(setting)
    plans = best_plans(rows)
    chosen = [row for material, plan in plans.items() for row in calls(rows, material, plan)]
    models = {"before": setting.model, "after": trained(setting, chosen)}
    evaluations = {side: evaluated(setting, model) for side, model in models.items()}
    values: dict[str, Any] = {
        figure: {side: grades(evaluation, criterion) for side, evaluation in evaluations.items()}
        for figure, criterion in FIGURES.items()
    }
    return Measured(values=values, facts={"experiments": TASKS * EXPERIMENTS, "rows": len(chosen), "plans": plans})


def random_experiments(setting: Setting) -> list[Row]:
    """The exported calls of experiments whose plans are drawn at random; some of them fail."""
    store, rng = setting.scratch / "random.db", random.Random(setting.seed)
    assay.collect(
        "experiment",
        lm=scripted_lm(lambda _: f"action: heat {rng.choice(HEATS)}, hours {rng.choice(HOURS)}"),
        n=EXPERIMENTS,
        rubric="experiment",
        data=DATA.format(seed=setting.seed),
        sizes={"train": TASKS},
        prompt_format="lean",
        seed=setting.seed,
        store=store,
        threads=1,
    )
    assay.export("sft", setting.scratch / "rows", store=store, min_quality=0.0, gates=Gates(min_clean=0))
    return [json.loads(line) for line in (setting.scratch / "rows" / "data.jsonl").read_text().splitlines()]


def best_plans(rows: list[Row]) -> dict[str, str]:
    """Material -> the plan with the highest mean score where it was the last one, which counts."""
    scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["t"] == TRIALS - 1:
            scores[row["task_type"]][plan_of(row)].append(row["quality"])
    means = {material: {plan: fmean(of) for plan, of in plans.items()} for material, plans in sorted(scores.items())}
    return {material: max(of, key=of.__getitem__) for material, of in means.items()}


def calls(rows: list[Row], material: str, plan: str) -> list[Row]:
    written = [row for row in rows if row["task_type"] == material and plan_of(row) == plan]
    return [row for before in range(TRIALS) for row in [one for one in written if one["t"] == before][:CALLS]]


def plan_of(row: Row) -> str:
    return str(row["completion"][-1]["content"])


def trained(setting: Setting, rows: list[Row]) -> str:
    """The model after training on these calls; its name."""
    file = setting.scratch / "chosen.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = SFTSettings(
        model=setting.model, epochs=EPOCHS, learning_rate=RATE, eval_fraction=0.0, min_quality=0.0, seed=setting.seed
    )
    return str(train_sft(file, "experiment", settings, progress=Lines()).name)


def evaluated(setting: Setting, model: str) -> Evaluation:
    return held_out(
        setting,
        "experiment",
        rubric="experiment",
        data=DATA.format(seed=setting.seed),
        test=TEST,
        model=model,
        prompt_format="lean",
        parameters={"temperature": 0.1},
    )
