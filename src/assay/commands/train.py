"""`assay train`: weights from rollouts of a program, or from an export.

`rl` trains by reward, `sft` is supervised fine-tuning on an export, as a run of the store, which also scores a program
with the old and the new weights. `assay.optimizers.finetuning` trains.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from assay.commands.evaluate import evaluate
from assay.commands.groups import InStore, JobOutput, Reported, Trusting, WithPage
from assay.errors import ConfigError
from assay.jobs.groups import Budget, JudgeModel, ProgramExecution, ProgramJob, Source, Task
from assay.jobs.rl_settings import RLSettings, is_export
from assay.optimizers.finetuning.report import PolicyReport, SFTReport
from assay.optimizers.finetuning.settings import SFTSettings
from assay.support.names import check_name
from assay.support.options import Flag, Positive, function_of, options_of

if TYPE_CHECKING:
    from assay.evaluation import Progress


class TrainingOutput(WithPage, JobOutput):
    """Output."""

    accelerate_config: Annotated[str | None, Flag(metavar="FILE")] = None
    """Config file of accelerate; training runs in the processes that it describes."""

    @property
    def speaks(self) -> bool:
        """Of processes that train together, the first one does."""
        return os.environ.get("RANK", "0") == "0"

    def begin(self, stdout: Any) -> None:
        """Restarts the command in the processes of an accelerate config."""
        if self.accelerate_config is None:
            return
        if not os.path.exists(self.accelerate_config):
            raise ConfigError(f"{self.accelerate_config} does not exist", field="accelerate_config")
        at = next(place for place, word in enumerate(sys.argv) if word.startswith("--accelerate-config"))
        arguments = [*sys.argv[1:at], *sys.argv[at + (1 if "=" in sys.argv[at] else 2) :]]
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1)))
        launcher = [
            sys.executable, "-m", "accelerate.commands.launch", "--config_file", self.accelerate_config,
            "--num_cpu_threads_per_process", threads, "-m", "assay",
        ]  # fmt: skip
        raise SystemExit(subprocess.run([*launcher, *arguments], check=False, stdout=stdout).returncode)


class TrainRL(Reported, Trusting, InStore, RLSettings):
    """Train an adapter by reward: by policy gradient on rollouts of PROGRAM, or on an export of transitions.

    Trains on `train`, evaluates on `val`, and compares old and new weights on the sealed `test`, greedy and sampled.
    The adapter is served as MODEL+NAME. With a curriculum, steps take train tasks of its stages, and evaluations val
    tasks of the current stage. An export brings its tasks and rewards: no program runs, and importance ratios are
    relative to the weights that made the calls.

    Raises:
        AssayError: what was wrong, which rule, what to do.
        Cancelled: a signal came; call again with `resume`.
    """

    OUTPUT: ClassVar[Any] = TrainingOutput

    def run(self) -> PolicyReport:
        from assay.jobs.trainings import train_on_export, train_on_rollouts

        run = train_on_export if is_export(self.program) else train_on_rollouts
        return run(self, store=self.store, progress=self.reporter)


train = function_of(TrainRL, "train")


class _Comparison(ProgramJob):
    """The check of an evaluation before a training."""

    kind: ClassVar[str] = "preflight"


class TrainSFT(Reported, Trusting, InStore, SFTSettings, JudgeModel, ProgramExecution, Task):
    """Train an adapter by supervised fine-tuning on the good rows of EXPORT: a folder of `assay export sft`, or JSON
    lines with prompt and completion.

    The adapter is served as MODEL+NAME. While it trains, `assay view` shows the curves of the run. A program, with
    rubric and data, is scored on the sealed test tasks with the old and the new weights.

    Raises:
        AssayError: what was wrong, which rule, what to do.
        Cancelled: a signal came; call again with `resume`.
    """

    OUTPUT: ClassVar[Any] = TrainingOutput
    executor: ClassVar[str] = "threads"  # type: ignore[misc]

    export: Annotated[str | Path, Flag(key=False)] = field(kw_only=False)
    """Folder of `assay export sft`, or JSON lines with prompt and completion."""
    name: Annotated[str, Flag(key=False)]
    """The adapter's name; it is served as MODEL+NAME."""
    program: Annotated[str | None, Flag(path=True)] = None
    """Program to score on sealed tasks before and after training; needs `rubric` and `data`."""
    rubric: Annotated[Source, Flag(metavar="R", path=True)] = None
    """Rubric that scores the program."""
    data: Annotated[Source, Flag(metavar="D", path=True)] = None
    """Tasks of the program: a file or a spec, as in assay compile."""
    test_size: Positive | None = None
    """Maximum number of test tasks."""
    thinking: Budget = None
    """How much the program may think in a call: a number of tokens, minimal, low, medium, high, xhigh, max, off or
    auto (no limit)."""
    evaluation: Annotated[Mapping[str, Any] | None, Flag(key=False, shown=False)] = None
    """Settings of the evaluations before and after, as one mapping."""

    @classmethod
    def of_file(cls, stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """What the project file sets; that of a program only if one was given."""
        kept = options_of(cls if "program" in given else SFTSettings)
        return {name: value for name, value in stored.items() if name in kept}

    def check(self) -> None:
        check_name(self.name, plain=True)
        if not (self.program is None) == (self.rubric is None) == (self.data is None):
            raise ConfigError("`program`, `rubric` and `data` belong together: give all three, or none")
        unused = [*self.changed(*_OF_PROGRAM), *(["evaluation"] if self.evaluation else [])]
        if self.program is None and unused:
            raise ConfigError("would have no effect without `program`, `rubric` and `data`", field=unused[0])

    @property
    def measured(self) -> dict[str, Any]:
        """The settings of the evaluations before and after."""
        sizes = {**self.sizes, **({} if self.test_size is None else {"test": self.test_size})}
        given = {name: getattr(self, name) for name in self.changed("preflight", "threads", *_OF_PROGRAM)}
        given.pop("test_size", None)
        return {**given, **({"sizes": sizes} if sizes else {}), **(self.evaluation or {}),
                "rubric": self.rubric, "data": self.data, "store": self.store}  # fmt: skip

    def run(self) -> SFTReport:
        from assay.jobs.checks import independent
        from assay.jobs.trainings import open_training
        from assay.optimizers.finetuning import sft
        from assay.optimizers.finetuning.base import check_trainable
        from assay.optimizers.finetuning.data import read_sft
        from assay.optimizers.finetuning.run_folder import check_free, rank

        settings, measured, progress = self.part(SFTSettings), self.measured, self.reporter
        if not rank():
            check_trainable(self.model)
            if not self.resume:
                check_free(self.name)
            if self.program is not None:
                independent(self.rubric, measured.get("judge_model"), self.model)
            # refused before a run is stored or a model is asked
            read_sft(self.export, min_quality=self.min_quality, eval_fraction=self.eval_fraction, seed=self.seed)
            if self.program is not None:
                settings_before = {**measured, "model": self.model, "seed": self.seed}
                check_comparison(self.program, settings_before, progress=progress)
        named = {name: None if getattr(self, name) is None else str(getattr(self, name)) for name in _NAMES}
        stored = {name: value for name, value in measured.items() if name != "store"}
        config = {**asdict(settings), **stored, **named, "algorithm": "sft"}
        with open_training(config, name=self.name, progress=progress, store=self.store, resume=self.resume) as run:
            report = sft.train_sft(self.export, self.name, settings, resume=self.resume, progress=progress, log=run.log)
            if self.program is not None and report.name and not rank():
                report.validation[self.program] = compare_models(
                    self.program, (self.model, report.name),
                    {**measured, "seed": self.seed, "progress": progress, "preflight": True,
                     "opens_as": f"compare-{run.run_id}"},
                    on_open=lambda opened: report.test_openings.update({str(self.program): dict(opened)}),
                )  # fmt: skip
            run.report = report.to_dict()
        return report


_NAMES = ("export", "program", "rubric", "data")
_OF_PROGRAM = (
    *("judge_model", "judge_api_base", "judge_api_key_env", "judge_thinking", "thinking", "prompt_format"),
    *("replace_lms", "parameters", "task_timeout", "cache", "rename", "salt", "test_size"),
)


def check_comparison(program: str, settings: Mapping[str, Any], *, progress: "Progress | None" = None) -> None:
    """Checks before a training what `compare_models` needs after it: data, rubric, program, and each model once.

    Raises:
        AssayError: what was wrong, which rule, what to do.
    """
    from assay.evaluation import default_progress
    from assay.jobs.arguments import program_settings
    from assay.jobs.checks import independent, unused_settings
    from assay.jobs.job import open_job
    from assay.jobs.preflight import checked
    from assay.programs.loading import full_name

    rubric, data, store = settings["rubric"], settings["data"], settings.get("store")
    options = {name: value for name, value in settings.items() if name in options_of(_Comparison)}
    config = program_settings(_Comparison, full_name(program), rubric, data, None, options)
    independent(rubric, config.judge_model, config.model_name)
    with open_job(
        config, program=config.program, rubric=rubric, progress=default_progress(progress), store=store,
        need=("train", "test"),
    ) as job:  # fmt: skip
        unused_settings(job)
        checked(job, job.splits.train)


def compare_models(
    program: str, models: tuple[str, str], settings: Mapping[str, Any], *,
    on_open: "Callable[[Mapping[str, int]], Any] | None" = None,
) -> dict[str, Any]:  # fmt: skip
    """Compares a program under two models on the sealed test split.

    `greedy` is at temperature 0.1, the minimum of an agent; `sampled` at the program's own. Each has `before`, `after`,
    the paired `gain`, the shares of valid tool calls and of parsed answers, and the ids of both `runs`.

    Args:
        models: before and after, by name.
        settings: the other settings of `evaluate`; with `opens_as`, all runs are one job that opens the test.
        on_open: called after each run with the number of openings of the test split.
    """
    from assay.jobs.checks import independent
    from assay.optimizers.finetuning.comparison import MODES, compared

    independent(settings["rubric"], settings.get("judge_model"), models[1])
    results, common = {}, {"split": "test", **settings}
    for mode in MODES:
        common["parameters"] = {**settings.get("parameters", {}), **({"temperature": 0.1} if mode == "greedy" else {})}
        before, after = (evaluate(program, model=model, **common) for model in models)
        if on_open is not None and after.test_openings is not None:
            on_open(after.test_openings)
        results[mode] = {**compared(before.evaluation, after.evaluation), "runs": [before.run_id, after.run_id]}
    return results


train_sft = function_of(TrainSFT, "train_sft")
