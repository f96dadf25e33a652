"""Public API for `assay train sft`: `assay.train_sft`.

Opens the run, and scores a program with the old and the new weights. Does not implement the training:
`assay.optimizers.finetuning` does.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

from assay.api.model_comparison import check_comparison, compare
from assay.errors import ConfigError
from assay.evaluation import Progress, default_progress
from assay.optimizers.finetuning import sft
from assay.optimizers.finetuning.data import read_sft
from assay.optimizers.finetuning.run_folder import rank
from assay.optimizers.finetuning.settings import SFTSettings
from assay.optimizers.finetuning.sft import SFTReport
from assay.runs.independence import independent
from assay.runs.settings.options import SFTEvaluationOptions, SFTOptions
from assay.runs.trainings import open_training
from assay.sources.trust import trusts
from assay.support.keywords import takes


@takes(SFTSettings)
@trusts
def train_sft(
    export: str | Path,
    *,
    name: str,
    program: str | None = None,
    rubric: str | Path | None = None,
    data: str | None = None,
    evaluation: SFTEvaluationOptions | None = None,
    store: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    **options: Unpack[SFTOptions],
) -> SFTReport:
    """Trains an adapter by supervised fine-tuning on the good rows of an export, as a run of the store.

    The adapter is served as `MODEL+NAME`. While it trains, `assay view` shows the curves of the run.

    Args:
        export: folder of `assay export sft`, or JSON lines with prompt and completion.
        program: scored on the sealed test tasks with the old and the new weights, for `validation`; with `rubric` and
            `data`.
        evaluation: settings of these evaluations.
        options: the fields of `assay.optimizers.finetuning.SFTSettings`.
    Raises:
        AssayError: what was wrong, which rule, what to do.
        Cancelled: a signal came; call again with `resume=True`.
    """
    values: dict[str, Any] = {**options}  # `trust` is read by the decorator
    settings, measured = SFTSettings(**values), _measured(program, rubric, data, evaluation, store)
    progress = default_progress(progress)
    if not rank():
        if program is not None:
            independent(measured["rubric"], measured.get("judge_model"), settings.model)
        # refused before a run is stored or a model is asked
        read_sft(export, min_quality=settings.min_quality, eval_fraction=settings.eval_fraction, seed=settings.seed)
        if program is not None:
            check_comparison(program, model=settings.model, seed=settings.seed, progress=progress, **measured)
    config = {
        **asdict(settings), "algorithm": "sft", "export": str(export), **(evaluation or {}),
        "program": program, "rubric": None if rubric is None else str(rubric), "data": data,
    }  # fmt: skip
    with open_training(config, name=name, progress=progress, store=store, resume=resume) as run:
        report = sft.train_sft(export, name, settings, resume=resume, progress=progress, log=run.log)
        if program is not None and report.name and not rank():
            _validate(report, program, settings, measured, progress)
        run.keep(report.to_dict())
    return report


def _measured(
    program: str | None, rubric: str | Path | None, data: str | None, evaluation: SFTEvaluationOptions | None,
    store: str | Path | None,
) -> dict[str, Any]:  # fmt: skip
    """The keywords of the evaluations before and after; refused where there is no program for them."""
    if not isinstance(evaluation, Mapping | None):
        raise ConfigError(f"evaluation={evaluation!r} must be a mapping of settings of the evaluations, or None")
    if (program is None) != (rubric is None) or (program is None) != (data is None):
        raise ConfigError("program, rubric and data belong together: give all three, or none")
    if program is None:
        if evaluation:
            raise ConfigError(f"evaluation={dict(evaluation)!r} would have no effect without program, rubric and data")
        return {}
    return {**(evaluation or {}), "rubric": rubric, "data": data, "store": store}


def _validate(
    report: SFTReport, program: str, settings: SFTSettings, measured: dict[str, Any], progress: Progress
) -> None:
    """Adds the scores of the program before and after to the report."""
    report.validation[program] = compare(
        program, models=(settings.model, str(report.name)), seed=settings.seed, progress=progress,
        on_open=lambda opened: report.test_openings.update({program: opened.to_dict()}),
        **{key: value for key, value in measured.items() if key != "preflight"},
    )  # fmt: skip
