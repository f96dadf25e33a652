"""The oven with noisy outcomes: yield of the last plan, plain and trained on the best plans of an explorer.

The plain agent tries few plans, and none near the best ones of some materials, so it cannot learn them from its own
experiments. An explorer takes the place of the model in experiments of train tasks: it draws feasible plans at random.
The reward of an experiment is the yield of its last plan alone, but each plan has an outcome of its own, so what is
trained on is chosen plan by plan: of each material the calls that wrote the plans with the highest mean yields. Test
tasks are other samples, whose best plans differ a little.
"""

import json
import random
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

import assay
from assay.datasets.experiments import ENERGY, HEATS, HOURS, MATERIALS
from assay.optimizers.finetuning import SFTSettings, train_sft
from assay.testing.fakes import scripted_lm
from assay.traces import Store
from assay.traces.export.gates import Gates
from claims.acting import Acting, compared, shared, store_of
from claims.storing import Lines, Measured, Setting
from claims.trained import use_scratch_adapters

OVEN = Acting(
    name="experiment",
    data="experiment:size=400&trials=3",
    figures={"yield": "yield_share", "feasible": "feasible"},
    test=30,
)
EXPLORED, EACH = 24, 16  # train tasks, and experiments of each: equal prompts of one number get the same answer
PLANS, TRIES, ROWS = 2, 3, 16  # of each material: plans to learn, trials that each of them needs, calls to train on
RATE, EPOCHS = 1e-3, 2


def measure(setting: Setting) -> Measured:
    use_scratch_adapters(setting)
    assay.collect(
        OVEN.name,
        data=f"{OVEN.data}&seed={setting.seed}",
        lm=scripted_lm(explorer(setting.seed)),
        n=EACH,
        sizes={"train": EXPLORED},
        preflight=False,
        seed=setting.seed,
        **shared(setting, OVEN),
    )
    rows, share = best_plans(setting)
    settings = SFTSettings(
        model=setting.model, epochs=EPOCHS, learning_rate=RATE, eval_fraction=0.0, min_quality=0.0, seed=setting.seed
    )
    path = setting.scratch / "best.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    model = train_sft(path, "oven", settings, progress=Lines()).name
    facts = {"experiments": EXPLORED * EACH, "rows": len(rows), "mean yield of the rows": round(share, 3)}
    return Measured(values=compared(setting, OVEN, str(model)), facts=facts)


def explorer(seed: int) -> Callable[[Any], str]:
    """Answers each request with a random feasible plan."""
    rng = random.Random(seed)
    plans = [(heat, hours) for heat in HEATS for hours in HOURS if heat * hours <= ENERGY]

    def answer(request: Any) -> str:
        heat, hours = rng.choice(plans)
        return f"action: heat {heat}, hours {hours}"

    return answer


def best_plans(setting: Setting) -> tuple[list[dict[str, Any]], float]:
    """The calls to train on, as rows, and the mean yield of their plans."""
    folder, store = setting.scratch / "rows", store_of(setting, OVEN)
    assay.export("sft", folder, store=store, min_quality=0.0, gates=Gates(min_clean=0))
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    with Store(store) as opened:
        yields = {
            (rollout.id, step["call"]): step["info"]["share"]
            for rollout in opened.rollouts()
            for step in (rollout.prediction or {}).get("steps", ())
        }
    rows = [{**row, "yield": yields[row["rollout"], row["t"]]} for row in rows]
    best = [row for material in MATERIALS for row in best_of([row for row in rows if row["task_type"] == material])]
    return best, mean(row["yield"] for row in best)


def best_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the calls for one material, those that wrote the plans with the highest mean yields."""
    calls: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        calls.setdefault(row["completion"][0]["content"], []).append(row)
    means = {plan: mean(row["yield"] for row in own) for plan, own in calls.items() if len(own) >= TRIES}
    best = sorted(means, key=lambda plan: -means[plan])[:PLANS]
    return sorted((row for plan in best for row in calls[plan]), key=lambda row: -row["yield"])[:ROWS]
