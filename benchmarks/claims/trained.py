"""A warm-up by SFT and a policy gradient training, as the measurements of trained agents make them."""

import os
from collections.abc import Callable
from typing import Any

import assay
from assay.optimizers.finetuning import PolicyReport, SFTSettings, train_sft
from assay.testing.fakes import scripted_lm
from assay.traces.export.settings import Gates
from claims.storing import Lines, Setting


def use_scratch_adapters(setting: Setting) -> None:
    """Stores and finds adapters in the scratch folder of this run."""
    os.environ["ASSAY_ADAPTERS"] = str(setting.scratch / "adapters")


def warmed_up(
    setting: Setting,
    program: str,
    answer: Callable[[Any], str],
    *,
    rows: int,
    learning_rate: float,
    epochs: int = 1,
    **options: Any,
) -> str:
    """Trains on runs in which `answer` takes the place of the model. Returns the name of the trained model.

    Args:
        options: of `assay.collect`.
    """
    folder = setting.scratch
    assay.collect(
        program, lm=scripted_lm(answer), n=1, sizes={"train": rows}, store=folder / "any.db", threads=1, **options
    )
    assay.export("sft", folder / "rows", store=folder / "any.db", gates=Gates(min_clean=0))
    settings = SFTSettings(
        model=setting.model, epochs=epochs, learning_rate=learning_rate, eval_fraction=0.0, seed=setting.seed
    )
    return str(train_sft(folder / "rows", "warm", settings, progress=Lines()).name)


def train(setting: Setting, program: str, name: str, *, steps: int, test: int, **options: Any) -> list[float]:
    """Trains the adapter `name` by GRPO, without evaluations in between. Returns the mean scores by step.

    Args:
        test: size of the test split, which the training leaves out.
        options: of `assay.train`.
    """
    return curve(trained(setting, program, name, steps=steps, sizes={"test": test, "val": 2}, test=False, **options))


def curve(report: PolicyReport) -> list[float]:
    """The mean scores by step."""
    return [round(score, 3) for score in report.curves["score"].values()]


def trained(setting: Setting, program: str | None, name: str, *, steps: int, **options: Any) -> PolicyReport:
    """Trains the adapter `name` by GRPO, without evaluations in between. `options` are those of `assay.train`."""
    return assay.train(
        program,
        name=name,
        seed=setting.seed,
        steps=steps,
        beta=0.0,
        preflight=False,
        samples_every=0,
        save_every=steps,
        evaluate_every=0,
        store=setting.scratch / f"{name}.db",
        progress=Lines(),
        **options,
    )
