"""Agents in environments, plain and trained on their own good episodes: `game` (Nim) and `yields` (the oven).

The plain agent plays episodes of train tasks at temperature 1, in blocks with a seed each, so that a position that
occurs in several tasks is answered anew. The moves of the episodes with a score of at least `least` are then the rows
of a supervised warm-up. Test tasks are played at temperature 0.1, by the plain and by the trained model.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import assay
from assay.evaluation import Evaluation
from assay.optimizers.finetuning import SFTSettings, train_sft
from assay.traces.export.gates import Gates
from claims.storing import Lines, Measured, Setting


@dataclass(frozen=True, kw_only=True)
class Acting:
    """What is trained, and how much.

    Attributes:
        name: of program and rubric.
        figures: figure of the record -> criterion of the rubric.
        least: score from which an episode is good.
        blocks, block: number of blocks of train episodes, and episodes of each.
        epochs: of the warm-up.
        test: test tasks.
    """

    name: str
    data: str
    figures: Mapping[str, str]
    least: float
    blocks: int
    block: int
    epochs: int
    test: int


def measured(setting: Setting, acting: Acting) -> Measured:
    os.environ["ASSAY_ADAPTERS"] = str(setting.scratch / "adapters")
    store, rows = setting.scratch / f"{acting.name}.db", setting.scratch / f"{acting.name}-rows"
    name = f"{acting.name}-{setting.seed}"
    shared: dict[str, Any] = {
        "rubric": acting.name,
        "prompt_format": "lean",
        "store": store,
        "threads": 1,
        "progress": Lines(),
    }

    def tested(model: str) -> Evaluation:
        return assay.evaluate(
            acting.name,
            data=f"{acting.data}&seed={setting.seed}",
            split="test",
            sizes={"test": acting.test},
            model=model,
            parameters={"temperature": 0.1},
            seed=setting.seed,
            **shared,
        ).evaluation

    for block in range(acting.blocks):
        assay.collect(
            acting.name,
            data=f"{acting.data}&seed={1000 * setting.seed + block + 1}",
            n=1,
            sizes={"train": acting.block},
            model=setting.model,
            parameters={"temperature": 1.0},
            seed=1000 * setting.seed + block,
            **shared,
        )
    exported = assay.export("sft", rows, store=store, min_quality=acting.least, gates=Gates(min_clean=0))
    settings = SFTSettings(
        model=setting.model, epochs=acting.epochs, min_quality=acting.least, learning_rate=5e-4, seed=setting.seed
    )
    train_sft(rows, name, settings, progress=Lines())
    evaluations = {"before": tested(setting.model), "after": tested(f"{setting.model}+{name}")}
    values: dict[str, Any] = {
        figure: {
            side: {task: result.grades.get(criterion, float("nan")) for task, result in evaluation.results.items()}
            for side, evaluation in evaluations.items()
        }
        for figure, criterion in acting.figures.items()
    }
    return Measured(values=values, facts={"episodes": acting.blocks * acting.block, "rows": exported.rows})
