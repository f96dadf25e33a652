"""Nim against an opponent that makes the best move half of the time: games won, plain and trained on its own wins.

The plain agent plays games of train tasks at temperature 1, in blocks with a seed each, so that a position that occurs
in several tasks is answered anew. The moves of the games that it won are then the rows of a supervised warm-up. Test
tasks are played at temperature 0.1, by the plain and by the trained model.
"""

from typing import Any

import assay
from assay.optimizers.finetuning import SFTSettings, train_sft
from assay.traces.export.pipeline import ExportReport
from assay.traces.export.settings import Gates
from claims.conversations import grades
from claims.storing import Lines, Measured, Setting
from claims.trained import use_scratch_adapters

DATA = "nim:size=400&sticks=5-11&seed={seed}"
BLOCKS, BLOCK = 20, 12  # blocks of games to learn from, and games of each
EPOCHS, RATE = 3, 5e-4
TEST = 60


def measure(setting: Setting) -> Measured:
    use_scratch_adapters(setting)
    shared: dict[str, Any] = {
        "rubric": "nim",
        "prompt_format": "lean",
        "store": setting.scratch / "nim.db",
        "threads": 1,
        "progress": Lines(),
    }
    rows = own_wins(setting, shared)
    settings = SFTSettings(model=setting.model, epochs=EPOCHS, min_quality=1.0, learning_rate=RATE, seed=setting.seed)
    models = {"before": setting.model, "after": str(train_sft(rows.path, "nim", settings, progress=Lines()).name)}
    evaluations = {
        side: assay.evaluate(
            "nim",
            data=DATA.format(seed=setting.seed),
            split="test",
            sizes={"test": TEST},
            model=model,
            parameters={"temperature": 0.1},
            seed=setting.seed,
            **shared,
        ).evaluation
        for side, model in models.items()
    }
    won = {side: grades(evaluation, "won") for side, evaluation in evaluations.items()}
    return Measured(values={"won": won}, facts={"episodes": BLOCKS * BLOCK, "rows": rows.rows})


def own_wins(setting: Setting, shared: dict[str, Any]) -> ExportReport:
    """The exported moves of the games that the plain agent won."""
    for block in range(BLOCKS):
        assay.collect(
            "nim",
            data=DATA.format(seed=1000 * setting.seed + block + 1),
            n=1,
            sizes={"train": BLOCK},
            model=setting.model,
            parameters={"temperature": 1.0},
            seed=1000 * setting.seed + block,
            **shared,
        )
    out = setting.scratch / "rows"
    return assay.export("sft", out, store=shared["store"], min_quality=1.0, gates=Gates(min_clean=0))
