"""Agents in environments, plain and trained on good episodes: `game` (Nim) and `yields` (the oven).

The plain agent, or an explorer in place of its model, plays episodes of train tasks at temperature 1, in blocks with a
seed each, so that a position that occurs in several tasks is answered anew. The moves of the episodes with a score of
at least `least` are then the rows of a supervised warm-up. Test tasks are played at temperature 0.1, by the plain and
by the trained model.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import assay
from assay.evaluation import Evaluation
from assay.optimizers.finetuning import SFTSettings, train_sft
from assay.testing.fakes import scripted_lm
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
        explorer: from the seed, what answers in the place of the model in train episodes; None: the plain agent plays.
        only: text in the prompt of the calls that are trained on; "": all of them.
    """

    name: str
    data: str
    figures: Mapping[str, str]
    least: float
    blocks: int
    block: int
    epochs: int
    test: int
    explorer: Callable[[int], Callable[[Any], str]] | None = None
    only: str = ""


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

    player: dict[str, Any] = {"model": setting.model}
    if acting.explorer is not None:
        player = {"lm": scripted_lm(acting.explorer(setting.seed))}
    for block in range(acting.blocks):
        assay.collect(
            acting.name,
            data=f"{acting.data}&seed={1000 * setting.seed + block + 1}",
            n=1,
            sizes={"train": acting.block},
            parameters={"temperature": 1.0},
            seed=1000 * setting.seed + block,
            cache=acting.explorer is None,  # equal prompts of an explorer get plans of their own
            **player,
            **shared,
        )
    exported = assay.export("sft", rows, store=store, min_quality=acting.least, gates=Gates(min_clean=0))
    settings = SFTSettings(
        model=setting.model, epochs=acting.epochs, min_quality=acting.least, learning_rate=5e-4, seed=setting.seed
    )
    trained_on = rows if not acting.only else _chosen(rows / "data.jsonl", acting.only)
    train_sft(trained_on, name, settings, progress=Lines())
    evaluations = {"before": tested(setting.model), "after": tested(f"{setting.model}+{name}")}
    values: dict[str, Any] = {
        figure: {
            side: {task: result.grades.get(criterion, float("nan")) for task, result in evaluation.results.items()}
            for side, evaluation in evaluations.items()
        }
        for figure, criterion in acting.figures.items()
    }
    return Measured(values=values, facts={"episodes": acting.blocks * acting.block, "rows": exported.rows})


def _chosen(rows: Path, text: str) -> Path:
    """A file of the rows whose prompt has this text."""
    path = rows.with_name("chosen.jsonl")
    with rows.open() as lines:
        path.write_text("".join(line for line in lines if text in line))
    return path
