"""Agents in environments, plain and trained: what `game` (Nim) and `yields` (the oven) share.

To be trained on its own good episodes (`measured`), the plain agent plays episodes of train tasks at temperature 1, in
blocks with a seed each, so that a position that occurs in several tasks is answered anew. The moves of the episodes
with a score of at least `least` are then the rows of a supervised warm-up. Test tasks are played at temperature 0.1, by
the plain and by the trained model.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import assay
from assay.optimizers.finetuning import SFTSettings, train_sft
from assay.traces.export.gates import Gates
from claims.storing import Lines, Measured, Setting


@dataclass(frozen=True, kw_only=True)
class Acting:
    """What is trained, and how much.

    Attributes:
        name: of program and rubric.
        figures: figure of the record -> criterion of the rubric.
        test: test tasks.
        least: score from which an own episode is good.
        blocks, block: number of blocks of own train episodes, and episodes of each.
        epochs: of the training on them.
    """

    name: str
    data: str
    figures: Mapping[str, str]
    test: int
    least: float = 0.0
    blocks: int = 0
    block: int = 0
    epochs: int = 0


def measured(setting: Setting, acting: Acting) -> Measured:
    os.environ["ASSAY_ADAPTERS"] = str(setting.scratch / "adapters")
    rows, name = setting.scratch / f"{acting.name}-rows", f"{acting.name}-{setting.seed}"
    play(setting, acting)
    exported = assay.export(
        "sft", rows, store=store_of(setting, acting), min_quality=acting.least, gates=Gates(min_clean=0)
    )
    settings = SFTSettings(
        model=setting.model, epochs=acting.epochs, min_quality=acting.least, learning_rate=5e-4, seed=setting.seed
    )
    train_sft(rows, name, settings, progress=Lines())
    facts = {"episodes": acting.blocks * acting.block, "rows": exported.rows}
    return Measured(values=compared(setting, acting, f"{setting.model}+{name}"), facts=facts)


def store_of(setting: Setting, acting: Acting) -> Path:
    return setting.scratch / f"{acting.name}.db"


def play(setting: Setting, acting: Acting) -> None:
    """Stores episodes of train tasks, played by the plain agent."""
    for block in range(acting.blocks):
        assay.collect(
            acting.name,
            data=f"{acting.data}&seed={1000 * setting.seed + block + 1}",
            n=1,
            sizes={"train": acting.block},
            model=setting.model,
            parameters={"temperature": 1.0},
            seed=1000 * setting.seed + block,
            **shared(setting, acting),
        )


def shared(setting: Setting, acting: Acting) -> dict[str, Any]:
    return {
        "rubric": acting.name,
        "prompt_format": "lean",
        "store": store_of(setting, acting),
        "threads": 1,
        "progress": Lines(),
    }


def compared(setting: Setting, acting: Acting, trained: str) -> dict[str, Any]:
    """The figures of the plain and of a trained model on test tasks."""
    evaluations = {
        side: assay.evaluate(
            acting.name,
            data=f"{acting.data}&seed={setting.seed}",
            split="test",
            sizes={"test": acting.test},
            model=model,
            parameters={"temperature": 0.1},
            seed=setting.seed,
            **shared(setting, acting),
        ).evaluation
        for side, model in {"before": setting.model, "after": trained}.items()
    }
    return {
        figure: {
            side: {task: result.grades.get(criterion, float("nan")) for task, result in evaluation.results.items()}
            for side, evaluation in evaluations.items()
        }
        for figure, criterion in acting.figures.items()
    }
