"""Compares a program under two models on the sealed test split, for `assay train sft`; and what that needs before."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Unpack

from assay.commands.evaluate import evaluate
from assay.evaluation import Progress, default_progress
from assay.optimizers.finetuning.comparison import MODES, compared
from assay.programs.loading import full_name
from assay.runs.arguments import program_settings
from assay.runs.independence import independent
from assay.runs.jobs import open_job
from assay.runs.preflight import checked
from assay.runs.settings.options import ComparisonOptions
from assay.runs.settings.shared import ExecutorSettings
from assay.runs.unused import unused_settings
from assay.sources.trust import trusts
from assay.traces.records import new_id
from assay.traces.store.sealing import Openings


def check_comparison(
    program: str, *, rubric: str | Path, data: str, progress: Progress | None = None, store: str | Path | None = None,
    model: str, parameters: Mapping[str, Any] | None = None, **options: Unpack[ComparisonOptions],
) -> None:  # fmt: skip
    """Checks before a training what `compare` needs after it: data, rubric, program, and each model once.

    Raises:
        AssayError: what was wrong, which rule, what to do.
    """
    settings = {name: value for name, value in options.items() if name not in ("samples", "trust")}
    settings |= {"model": model, "parameters": parameters or {}, "kind": "preflight"}
    config = program_settings(ExecutorSettings, full_name(program), rubric, data, None, settings)
    independent(rubric, config.judge_model, config.model)
    with open_job(
        config,
        program=config.program,
        rubric=rubric,
        progress=default_progress(progress),
        store=store,
        need=("train", "test"),
    ) as job:
        unused_settings(job)
        checked(job, job.splits.train, split="train")


@trusts
def compare(
    program: str, *, rubric: str | Path, data: str, models: tuple[str, str], progress: Progress | None = None,
    store: str | Path | None = None,
    parameters: Mapping[str, Any] | None = None, on_open: Callable[[Openings], Any] | None = None,
    **options: Unpack[ComparisonOptions],
) -> dict[str, Any]:  # fmt: skip
    """Compares a program under two models on the sealed test split.

    `greedy` is at temperature 0.1, the minimum of an agent; `sampled` at the program's own. Each has `before`, `after`,
    the paired `gain`, the shares of valid tool calls and of parsed answers, and the ids of both `runs`.

    Args:
        models: before and after, by name.
        on_open: called after each run with the number of openings of the test split.
        options: the other settings of `evaluate`.
    """
    independent(rubric, options.get("judge_model"), models[1])
    results, opened = {}, f"compare-{new_id()[:12]}"
    for mode in MODES:
        mode_parameters = {**(parameters or {}), **({"temperature": 0.1} if mode == "greedy" else {})}
        common: dict[str, Any] = {
            "rubric": rubric, "data": data, "split": "test", "parameters": mode_parameters, "store": store,
            "progress": progress, "opens_as": opened, **options,
        }  # fmt: skip
        before, after = (evaluate(program, model=model, **common) for model in models)
        if on_open is not None and after.openings is not None:
            on_open(after.openings)
        results[mode] = {**compared(before.evaluation, after.evaluation), "runs": [before.run_id, after.run_id]}
    return results
