"""`assay train`: weights from traces."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from assay.cli.flags import command_settings, is_set, of_project, settings_flags
from assay.cli.options import (
    Decorator,
    json_option,
    key_option,
    min_coverage_option,
    name_option,
    report_option,
    resume_option,
    store_option,
    trust_option,
    with_options,
)
from assay.cli.shared import Console, pop_values, print_json, print_openings, require_coverage
from assay.cli.wording import in_flags
from assay.optimizers.finetuning.settings import PolicySettings, SFTSettings
from assay.reports.markdown import curriculum_lines
from assay.runs.settings import ProgramSettings, TrainSettings
from assay.runs.settings.train import ROLLOUTS_ONLY
from assay.support.numbers import counted, figure
from assay.support.settings import settings_of
from assay.support.terminal import rich_console

if TYPE_CHECKING:
    from assay.optimizers.finetuning.policy_gradient import PolicyReport
    from assay.optimizers.finetuning.sft import SFTReport
    from assay.runs.settings.options import SFTEvaluationOptions

_JUDGE = ("judge_model", "judge_api_base", "judge_api_key_env", "judge_thinking")
_PROGRAM = (
    "rubric",
    "data",
    *_JUDGE,
    "thinking",
    "prompt_format",
    "replace_lms",
    "parameters",
    "salt",
)  # of the program that `train sft` scores before and after
_BEFORE = ("task_timeout", "preflight", "sizes")
_NAME = "The adapter's name; it is served as MODEL+NAME."
_RESUME = "Continue from the last checkpoint."
_HELP = {"judge_model": "Model of the rubric's judges; not the one in training."}


_accelerate_option = click.option(
    "--accelerate-config",
    type=click.Path(exists=True),
    help="Config file of accelerate; training runs in the processes that it describes.",
)


@click.group("train")
def command() -> None:
    """Train a LoRA adapter on exported traces, or on rollouts of a program."""


@command.command("sft")
@click.argument("export", type=click.Path())
@name_option(_NAME)
@settings_flags(SFTSettings, without=("evaluations",))
@click.option(
    "--program", help="Program to score on sealed tasks before and after training; needs --rubric and --data."
)
@settings_flags(
    ProgramSettings,
    only=(*_PROGRAM, *_BEFORE),
    sizes=("test",),
    help={**_HELP, "rubric": "Rubric that scores the program."},
)
@_accelerate_option
@store_option()
@resume_option(_RESUME)
@min_coverage_option()
@trust_option()
@report_option()
@json_option()
def sft(**values: Any) -> None:
    """Supervised fine-tuning on the good rows of `assay export sft` (its folder), or on JSON lines with prompt and
    completion."""
    from assay.api.sft import train_sft
    from assay.optimizers.finetuning.run_folder import rank

    as_json, source, name, resume, program, store, config, page = pop_values(
        values, "as_json", "export", "name", "resume", "program", "store", "accelerate_config", "report"
    )
    if config is not None:
        return _launched(config)
    settings = command_settings(values, SFTSettings)
    measured = _measured(values, program)
    report = train_sft(
        source,
        name=name,
        program=program,
        rubric=measured.pop("rubric", None),
        data=measured.pop("data", None),
        evaluation=cast("SFTEvaluationOptions", measured) or None,
        store=store,
        resume=resume,
        progress=Console(),
        **settings,
    )
    data = report.to_dict()
    if rank():  # the first of the processes that train together is the one that speaks
        return
    if as_json:
        print_json(data)
    else:
        _show(data)
    _write_page(page, report, store)
    require_coverage(data)


def _measured(values: dict[str, Any], program: str | None) -> dict[str, Any]:
    """The settings of the evaluations before and after, from the flags of `train sft`; refused where there is no
    program for them."""
    required = [name for name in ("rubric", "data") if values[name] is None]
    if program is None:
        unused = [name for name in (*_PROGRAM, "task_timeout", "test_size") if is_set(name)]
        if unused:
            flags = ", ".join(
                max(option.opts, key=len)
                for option in click.get_current_context().command.params
                if option.name in unused
            )
            raise click.UsageError(f"{flags} would have no effect: --program, --rubric and --data belong together")
        return {}
    if required:
        raise click.UsageError("--program, --rubric and --data belong together")
    return command_settings(values, ProgramSettings, project=False)


def _show(data: dict[str, Any]) -> None:
    from rich.table import Table

    rich, table = rich_console(), Table("step", "loss", "held out", title="mean loss of a completion's token")
    losses, eval_losses = data["loss"], data["held_out_loss"]
    steps = sorted(eval_losses) or sorted(losses)[:: max(1, len(losses) // 8)]
    for step in steps:
        nearest = max((at for at in losses if at <= step), default=None)
        row = [
            str(step),
            "" if nearest is None else f"{losses[nearest]:.3f}",
            f"{eval_losses[step]:.3f}" if step in eval_losses else "",
        ]
        table.add_row(*row, style="bold" if step == data["best_step"] else None)
    rich.print(table)
    rich.print(
        f"{counted(data['rows'], 'rows')} trained on, {data['held_out_rows']} held out, of "
        f"{counted(data['tasks'], 'tasks')}; "
        f"{counted(data['steps'], 'steps')}, the best is {data['best_step']}"
    )
    for reason, count in data["left_out"].items():
        rich.print(f"{counted(count, 'rows')} left out: {reason}")
    if data["agreement"] is not None:
        rich.print(
            f"llama.cpp, which serves it, writes the same greedy text as torch for "
            f"{100 * data['agreement']:.0f} % of the prompts"
        )
    for note in [*data["notes"], *data["alarms"], *([data["stopped"]] if data["stopped"] else [])]:
        rich.print(f"note: {in_flags(note)}")
    print_validation(rich, data)
    if data["name"]:
        rich.print(f"{data['path']}\nIn any command: --model {data['name']}", soft_wrap=True)
    else:
        rich.print(str(data["path"]), soft_wrap=True)


_NOT_OF_ALL = {
    "gae_lambda": ("ppo",),
    "value": ("ppo",),
    "kl_in_reward": ("reinforce++",),
    "scale": ("grpo", "reinforce++-turn"),
}


def _policy_options(algorithm: str) -> Decorator:
    unsupported = [name for name, algorithms in _NOT_OF_ALL.items() if algorithm not in algorithms]
    options = [
        click.argument("program", required=False),
        name_option(_NAME),
        settings_flags(
            TrainSettings,
            without=("algorithm", "cache", "api_base", "api_key_env", *unsupported),
            sizes=("train", "val", "test"),
            help={
                **_HELP,
                "rubric": "Rubric: a YAML file or a shipped name. Not needed for an export, which has rewards.",
                "data": "Tasks: a file or a spec, as in assay compile. Not needed for an export.",
            },
        ),
        key_option(
            "Key that `assay agent run` sends, or $ASSAY_AGENT_KEY; required for --agent remote, and where "
            "--agent-listen is not loopback.",
            "ASSAY_AGENT_KEY",
            "--agent-key",
        ),
        _accelerate_option,
        store_option(),
        resume_option(_RESUME),
        min_coverage_option(),
        trust_option(),
        report_option(),
        json_option(),
    ]
    return lambda function: with_options(function, options)


def _policy_command(algorithm: str, text: str) -> None:
    def run(**values: Any) -> None:
        _policy(algorithm, values)

    command.command(algorithm, help=text)(_policy_options(algorithm)(run))


def _policy(algorithm: str, values: dict[str, Any]) -> None:
    from assay.api.train import train, train_offline
    from assay.optimizers.finetuning.run_folder import rank
    from assay.traces.export.pipeline import is_export

    as_json, program, name, store, resume, config, key, page = pop_values(
        values, "as_json", "program", "name", "store", "resume", "accelerate_config", "agent_key", "report"
    )
    if config is not None:
        return _launched(config)
    if program is None and values["agent"] is None and "agent" not in of_project():
        raise click.UsageError("give a PROGRAM, or an agent with --agent")
    if program is not None and values["agent"] is not None:
        raise click.UsageError("give either a PROGRAM or --agent")
    console = Console()
    if program is not None and is_export(program):
        report = train_offline(
            program, name=name, algorithm=algorithm, store=store, resume=resume, progress=console, **_offline(values)
        )
    else:
        staged = values["curriculum"] is not None or "curriculum" in of_project()  # the stages may name their data
        needed = [name for name in ("rubric", "data") if values[name] is None and not (staged and name == "data")]
        if missing := [f"--{name}" for name in needed if name not in of_project()]:
            raise click.UsageError(f"a program needs {' and '.join(missing)}")
        settings = command_settings(values, TrainSettings)
        if program is None:
            settings["agent_key"] = key
        else:
            settings.pop("agent", None)  # of the project file
        report = train(
            program, name=name, algorithm=algorithm, store=store, resume=resume, progress=console, **settings
        )
    data = report.to_dict()
    if rank():  # the first of the processes that train together is the one that speaks
        return
    if as_json:
        print_json(data)
    else:
        _show_policy(data)
    _write_page(page, report, store)
    require_coverage(data)


def _write_page(page: str | None, report: "PolicyReport | SFTReport", store: str | None) -> None:
    """Writes the file of `--report`, and again the page next to the adapter: with flags in alarms and notes."""
    if (own := getattr(report, "report", None)) is not None and Path(own).exists():
        report.write_page(in_flags)  # type: ignore[union-attr]  # of a PolicyReport
    if page is not None:
        from assay.api.pages import write_training_page

        write_training_page(page, report, store=store, words=in_flags)


def _offline(values: dict[str, Any]) -> dict[str, Any]:
    """Settings for training on an export. Flags that would have no effect are refused."""
    options = {str(option.name): max(option.opts, key=len) for option in click.get_current_context().command.params}
    applicable = settings_of(PolicySettings).keys() - set(ROLLOUTS_ONLY) | {"no_scale"}
    own_flags = {
        "name", "resume", "as_json", "program", "accelerate_config", "no_preflight", "min_coverage", "trust",
        "agent_key", "report", "store",
    }  # fmt: skip
    ignored = [flag for name, flag in options.items() if name not in applicable | own_flags and is_set(name)]
    if ignored:
        raise click.UsageError(f"{', '.join(ignored)} would have no effect: an export brings its tasks and rewards")
    settings = command_settings({name: value for name, value in values.items() if name in applicable}, PolicySettings)
    unused = {
        *ROLLOUTS_ONLY,
        *(() if is_set("temperature") else ("temperature",)),
    }  # of a project file, which is of all trainings
    return {name: value for name, value in settings.items() if name not in unused}


def _launched(config: str) -> None:
    """Restarts this command in the processes of an accelerate config."""
    import subprocess
    import sys

    at = next(place for place, word in enumerate(sys.argv) if word.startswith("--accelerate-config"))
    arguments = [*sys.argv[1:at], *sys.argv[at + (1 if "=" in sys.argv[at] else 2) :]]
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1)))
    launcher = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        config,
        "--num_cpu_threads_per_process",
        threads,
        "-m",
        "assay",
    ]
    stdout = click.get_current_context().meta.get("stdout")  # with --json, which the first process prints
    raise SystemExit(subprocess.run([*launcher, *arguments], check=False, stdout=stdout).returncode)


def _show_policy(data: Mapping[str, Any]) -> None:

    rich = rich_console()
    print_validation(rich, data)
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in data["seconds"].items())
    rich.print(
        f"{counted(data['steps'], 'steps')}, {counted(data['rollouts'], 'rollouts')}, {data['calls']} calls "
        f"trained on ({seconds}); "
        f"weights of step {data['best_step']}"
    )
    rich.print(_settled(data))
    if data["agreement"] is not None:
        rich.print(
            f"llama.cpp, which serves it, writes the same greedy text as torch for "
            f"{100 * data['agreement']:.0f} % of the prompts"
        )
    for reason, count in data["left_out"].items():
        rich.print(f"{count} left out: {reason}")
    for line in curriculum_lines(data["curriculum"]):
        rich.print(line)
    for note in dict.fromkeys([*data["notes"], *data["alarms"], *([data["stopped"]] if data["stopped"] else [])]):
        rich.print(f"note: {in_flags(note)}")
    if data.get("report"):
        rich.print(f"report: {data['report']}", soft_wrap=True)
    if data["name"]:
        rich.print(f"{data['path']}\nIn any command: --model {data['name']}", soft_wrap=True)
    else:
        rich.print(str(data["path"]), soft_wrap=True)


def _settled(data: Mapping[str, Any]) -> str:
    """Whether the training converged, in words."""
    from assay.reports.training import constant_reward

    if (reward := constant_reward(data["curves"])) is not None:
        return f"nothing was learned: every rollout had the reward {figure(reward)}"
    words = {None: "too few steps to decide whether it converged", True: "converged", False: "not converged"}
    return f"{words[data['converged']]}: the mean reward of the last ten steps, compared with that of the ten before"


def print_validation(rich: Any, data: Mapping[str, Any]) -> None:
    from rich.table import Table

    from assay.reports.training import in_numbers

    for title, modes in data["validation"].items():
        table = Table(
            "",
            "before",
            "after",
            "gain, paired 95 %",
            title=f"{title}: sealed tasks, {next(iter(modes.values()))['before']['n']}",
        )
        for row in in_numbers(modes):
            table.add_row(*row, style="bold" if row[0].endswith(": score") else None)
        rich.print(table)
        print_openings(rich, data["test_openings"].get(title))


_policy_command(
    "grpo", "GRPO: each call's return against its group's mean at the same turn, over the group's deviation."
)
_policy_command("reinforce++", "REINFORCE++: returns normalised over all tokens of the batch; no critic, no groups.")
_policy_command(
    "reinforce++-turn", "Each call's return against the batch's mean at the same turn, over the batch's deviation."
)
_policy_command("ppo", "PPO: generalised advantages over the turns, from a fitted value.")
_policy_command("rloo", "RLOO: each call's return against the mean of the others of its group, unscaled.")
