"""`assay train`: weights from traces."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import click

from assay.cli.shared import (
    Console,
    cap_options,
    endpoint_options,
    json_option,
    json_or_text,
    keep,
    min_coverage_option,
    no_preflight_option,
    pairs,
    print_json,
    require_coverage,
    say_openings,
    task_timeout_option,
    trust_option,
    with_options,
)
from assay.cli.wording import counted, in_flags

__all__ = ["command"]


_JUDGE = [click.option("--judge-model", help="Model of the rubric's judges; not the one in training."), *endpoint_options("the judges", "judge")]


def _judge_options(function: Callable[..., Any]) -> Callable[..., Any]:
    return with_options(function, _JUDGE)


@click.group("train")
def command() -> None:
    """Train a LoRA adapter on exported traces, or on rollouts of a program."""


@command.command("sft")
@click.argument("export", type=click.Path())
@click.option("--name", required=True, help="The adapter's name; it is served as MODEL+NAME.")
@click.option(
    "--model",
    default="embedded/smollm2-135m",
    show_default=True,
    help="Model to train, embedded or of the hub; adapters in its name are merged first.",
)
@click.option("--min-quality", type=click.FloatRange(0, 1), default=0.8, show_default=True)
@click.option("--epochs", type=click.IntRange(1), default=3, show_default=True, help="Largest number of epochs.")
@click.option("--learning-rate", type=float, default=2e-4, show_default=True)
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="Rows per optimizer step.")
@click.option("--rank", type=click.IntRange(1), default=16, show_default=True, help="Rank of the LoRA matrices.")
@click.option("--max-length", type=click.IntRange(16), default=2048, show_default=True, help="Tokens of a row; longer rows are left out.")
@click.option("--held-out", type=click.FloatRange(0, 0.5), default=0.1, show_default=True, help="Share of the tasks held out for early stopping.")
@click.option(
    "--patience", type=click.IntRange(1), default=2, show_default=True, help="Evaluations without a lower held-out loss after which training stops."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--report-to", default="none", show_default=True, help="Where to report the curves: tensorboard, trackio or wandb.")
@click.option("--resume", is_flag=True, help="Continue from the last checkpoint.")
@click.option("--program", help="Program to score on sealed tasks before and after training; needs --rubric and --data.")
@click.option("--rubric", metavar="R", help="Rubric that scores the program.")
@click.option("--data", metavar="D", help="Tasks of the program.")
@click.option("--adapter", type=click.Choice(["json", "lean", "chat"]), help="How the program's fields become messages (prompt format).")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="An agent parameter of the program, e.g. max_steps=4.")
@_judge_options
@click.option("--salt", help="Salt of the program's splits.")
@click.option("--test-size", type=click.IntRange(1), help="Largest number of sealed test tasks.")
@click.option("--store", help="Database of traces; by default .assay/assay.db or $ASSAY_STORE.")
@click.option(
    "--accelerate-config", type=click.Path(exists=True), help="Config file of accelerate; training runs in the processes that it describes."
)
@task_timeout_option()
@no_preflight_option()
@min_coverage_option()
@trust_option()
@json_option()
def sft(**values: Any) -> None:
    """Supervised fine-tuning on the good rows of `assay export sft` (its folder), or on JSON lines with prompt and completion."""
    from assay.optimizers.weights import SFTConfig, train_sft
    from assay.optimizers.weights.data import read_sft
    from assay.optimizers.weights.work import rank
    from assay.training import check_comparison, compare, independent

    as_json, source, name, resume, program, size, config, no_preflight, task_timeout = keep(
        values, "as_json", "export", "name", "resume", "program", "test_size", "accelerate_config", "no_preflight", "task_timeout"
    )
    preflight = not no_preflight
    if config is not None:
        return _launched(config)
    judged = ("judge_model", "judge_api_base", "judge_api_key_env")
    measured = {key: value for key in ("rubric", "data", "adapter", *judged, "salt", "store") if (value := values.pop(key)) is not None}
    if program is not None:
        measured["task_timeout"] = task_timeout
    elif _is_given("task_timeout"):
        raise click.UsageError("--task-timeout would have no effect: it is a limit of the runs of a --program")
    if settings := pairs(values.pop("settings"), "--set"):
        measured["parameters"] = {key: json_or_text(text) for key, text in settings.items()}
    if (program is None and measured) or (program is not None and not {"rubric", "data"} <= measured.keys()):
        raise click.UsageError("--program, --rubric and --data belong together")
    shown = Console()
    sizes = {"test": size} if size else {}
    if program is not None and not rank():
        independent(measured["rubric"], measured.get("judge_model"), values["model"])
        read_sft(source, min_quality=values["min_quality"], held_out=values["held_out"], seed=values["seed"])  # refused before a model is asked
        check_comparison(program, model=values["model"], seed=values["seed"], progress=shown, sizes=sizes, preflight=preflight, **measured)  # type: ignore[arg-type]
    data = train_sft(source, name, SFTConfig(**values), resume=resume, progress=shown).to_dict()  # type: ignore[arg-type]
    if rank():  # the first of the processes that train together is the one that speaks
        return
    data["validation"], data["test_openings"] = {}, {}
    if program is not None and data["name"]:
        models = (values["model"], data["name"])
        told = data["test_openings"]
        data["validation"][program] = compare(
            program, models=models, sizes=sizes, seed=values["seed"], progress=shown,  # type: ignore[arg-type]
            on_open=lambda opened: told.update({program: opened.to_dict()}), **measured,
        )  # fmt: skip
    if as_json:
        print_json(data)
    else:
        _show(data)
    require_coverage(data)


def _show(data: dict[str, Any]) -> None:
    from rich.console import Console as Rich
    from rich.table import Table

    rich, table = Rich(highlight=False), Table("step", "loss", "held out", title="mean loss of a completion's token")
    losses, held_out = data["loss"], data["held_out_loss"]
    steps = sorted(held_out) or sorted(losses)[:: max(1, len(losses) // 8)]
    for step in steps:
        near = max((at for at in losses if at <= step), default=None)
        row = [str(step), "" if near is None else f"{losses[near]:.3f}", f"{held_out[step]:.3f}" if step in held_out else ""]
        table.add_row(*row, style="bold" if step == data["best_step"] else None)
    rich.print(table)
    rich.print(
        f"{counted(data['rows'], 'rows')} of {data['tasks']} tasks, {data['held_out_rows']} held out; "
        f"{counted(data['steps'], 'steps')}, the best is {data['best_step']}"
    )
    for why, count in data["left_out"].items():
        rich.print(f"{counted(count, 'rows')} left out: {why}", markup=False)
    if data["agreement"] is not None:
        rich.print(f"served beside torch: {100 * data['agreement']:.0f} % of greedy texts are the same")
    for note in [*data["notes"], *([data["stopped"]] if data["stopped"] else [])]:
        rich.print(f"note: {in_flags(note)}", markup=False)
    _show_validation(rich, data)
    if data["name"]:
        rich.print(f"{data['path']}\nIn any command: --model {data['name']}", markup=False, soft_wrap=True)
    else:
        rich.print(str(data["path"]), markup=False, soft_wrap=True)


_LOSSES = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
_RETURNS = ("to_go", "episode", "step", "uniform")
_NUMBERS: tuple[tuple[str, Any, Any, str], ...] = (
    ("--steps", int, 30, "Optimizer steps."),
    ("--tasks", int, 4, "Tasks a step."),
    ("--num-generations", int, 6, "Rollouts of a task; reinforce++ takes 1 too."),
    ("--iterations", int, 1, "Steps on the same rollouts."),
    ("--learning-rate", float, 2e-4, "Constant; of AdamW."),
    ("--rank", int, 16, "Rank of the LoRA matrices."),
    ("--temperature", float, 1.0, "Sampling temperature of the rollouts."),
    ("--epsilon", float, None, "The ratio is clipped below at 1 less this: 0.2."),
    ("--epsilon-high", float, None, "The ratio is clipped above at 1 and this: 0.28; of cispo, at this: 5."),
    ("--beta", float, 0.01, "Weight of the KL to the model as it was; 0 leaves it out, and a forward pass with it."),
    ("--discount", float, 1.0, "Discount factor of later rewards."),
    ("--step-weight", float, 1.0, "Weight of step rewards in the return."),
    ("--outcome-weight", float, 1.0, "Weight of the rubric's score in the return."),
    ("--micro", int, 0, "Rollouts whose calls go through the model at once in a process; 0: two."),
    ("--max-length", int, 2048, "Tokens of a call; longer ones are not trained on."),
    ("--max-completion", int, 128, "Tokens of an answer."),
    ("--rollout-timeout-s", float, 120.0, "Seconds after which a rollout is given up."),
    ("--evaluate-every", int, 10, "Steps between looks at held-out tasks; 0: none."),
    ("--held-out", int, 16, "Tasks of val that are looked at."),
    ("--save-every", int, 5, "Steps between checkpoints."),
    ("--samples-every", int, 10, "Steps between sample rollouts in the report."),
    ("--forget", float, 0.1, "Score that a retained task type may lose."),
    ("--seed", int, 0, ""),
)


def _policy_options(function: Callable[..., Any]) -> Callable[..., Any]:
    options = [
        click.argument("program"),
        click.option("--name", required=True, help="The adapter's name; it is served as MODEL+NAME."),
        click.option("--rubric", metavar="R", help="A YAML file or a shipped rubric; an export brings its rewards."),
        click.option("--data", metavar="D", help="The tasks; an export brings its own."),
        click.option("--model", default="embedded/smollm2-135m", show_default=True, help="Model to train; adapters in its name are merged first."),
        *_JUDGE,
        click.option("--judged-by-itself", is_flag=True, help="Allow the model in training to judge its own rollouts."),
        click.option("--watch", metavar="R", help="Monitor rubric: scores the rollouts and is not trained on."),
        click.option("--retain", multiple=True, metavar="PROGRAM,RUBRIC,DATA", help="Retention task: a program whose score must not fall."),
        click.option("--adapter", type=click.Choice(["json", "lean", "chat"]), help="How fields become messages (prompt format)."),
        click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="An agent parameter, e.g. max_steps=4."),
        click.option("--loss", type=click.Choice(_LOSSES), default="dapo", show_default=True, help="TRL's loss_type."),
        click.option(
            "--returns", type=click.Choice(_RETURNS), default="to_go", show_default=True, help="How the reward of a rollout is credited to its calls."
        ),
        click.option(
            "--vllm",
            type=click.Choice(["none", "colocate", "server"]),
            default="none",
            show_default=True,
            help="Generate rollouts with vLLM on a GPU.",
        ),
        *(click.option(flag, type=kind, default=value, show_default=True, help=text or None) for flag, kind, value, text in _NUMBERS),
        *(click.option(f"--{split}-size", type=click.IntRange(1), help=f"Largest number of {split} tasks.") for split in ("train", "val", "test")),
        click.option("--salt", help="Salt of the splits; by default the store's own (a new store: the artifact's, else assay)."),
        click.option("--threads", type=click.IntRange(1), help="Number of concurrent rollouts."),
        task_timeout_option(),
        *cap_options(),
        click.option("--report-to", default="none", show_default=True, help="Where to report the curves: tensorboard, trackio or wandb."),
        click.option(
            "--accelerate-config", type=click.Path(exists=True), help="Config file of accelerate; training runs in the processes that it describes."
        ),
        click.option("--store", help="Database of traces; by default .assay/assay.db or $ASSAY_STORE."),
        click.option("--resume", is_flag=True, help="Continue from the last checkpoint."),
        no_preflight_option(),
        min_coverage_option(),
        trust_option(),
        json_option(),
    ]
    return with_options(function, options)


_OWN_OPTIONS = {
    "ppo": [
        click.option("--gae-lambda", type=float, default=0.95, show_default=True, help="Decay of the generalised advantages over turns."),
        click.option(
            "--value", type=click.Choice(["features", "head"]), default="features", show_default=True,
            help="Value function: a regression on features of the rollout, or a linear head on the model's hidden state.",
        ),
    ],
    "reinforce++": [
        click.option("--kl-in-reward", is_flag=True, default=False, help="Put the KL penalty (beta) into each token's reward, not into the loss."),
    ],
}  # fmt: skip


def _policy_command(algorithm: str, text: str) -> None:
    def run(**values: Any) -> None:
        _policy(algorithm, values)

    command.command(algorithm, help=text)(_policy_options(with_options(run, _OWN_OPTIONS.get(algorithm, []))))


def _policy(algorithm: str, values: dict[str, Any]) -> None:
    from assay.optimizers.weights.work import rank
    from assay.traces.export import is_export
    from assay.training import train, train_offline

    as_json, program, config = keep(values, "as_json", "program", "accelerate_config")
    if config is not None:
        return _launched(config)
    sizes = {name: size for name in ("train", "val", "test") if (size := values.pop(f"{name}_size")) is not None}
    shown, settings = Console(), pairs(values.pop("settings"), "--set")
    values = {key: value for key, value in values.items() if value is not None}
    preflight = not values.pop("no_preflight")
    if is_export(program):
        if settings or sizes:
            raise click.UsageError("--set and the sizes of splits would have no effect: an export brings its tasks")
        report = train_offline(program, algorithm=algorithm, progress=shown, **_offline(values))  # type: ignore[arg-type]
    else:
        if missing := [f"--{name}" for name in ("rubric", "data") if name not in values]:
            raise click.UsageError(f"a program needs {' and '.join(missing)}")
        parameters = {name: json_or_text(text) for name, text in settings.items()}
        report = train(program, algorithm=algorithm, sizes=sizes, parameters=parameters, preflight=preflight, progress=shown, **values)  # type: ignore[arg-type]
    data = report.to_dict()
    if rank():  # the first of the processes that train together is the one that speaks
        return
    if as_json:
        print_json(data)
    else:
        _show_policy(data)
    require_coverage(data)


_ONLINE = (
    "rubric",
    "data",
    "judge_model",
    "judge_api_base",
    "judge_api_key_env",
    "judged_by_itself",
    "watch",
    "retain",
    "adapter",
    "salt",
    "threads",
    "task_timeout",
    "store",
)


def _is_given(name: str) -> bool:
    """Whether an option stands on the command line."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _offline(values: dict[str, Any]) -> dict[str, Any]:
    """Flags that an export leaves a meaning; those that it would ignore are refused where they were given."""
    from assay.training import ROLLOUTS_ONLY

    given = [name for name in values if _is_given(name)]
    online = {*_ONLINE, *ROLLOUTS_ONLY, "max_calls", "max_tokens", "max_cost_usd"}
    if ignored := [f"--{name.replace('_', '-')}" for name in given if name in online]:
        raise click.UsageError(f"{', '.join(ignored)} would have no effect: an export brings its tasks and rewards")
    kept = {name: value for name, value in values.items() if name not in online}
    if "temperature" not in given:
        kept.pop("temperature")
    return kept


def _launched(config: str) -> None:
    """The same command in the processes of an accelerate config."""
    import subprocess
    import sys

    at = next(place for place, word in enumerate(sys.argv) if word.startswith("--accelerate-config"))
    left = [*sys.argv[1:at], *sys.argv[at + (1 if "=" in sys.argv[at] else 2) :]]
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1)))
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--num_cpu_threads_per_process", threads, "-m", "assay"]
    raise SystemExit(subprocess.run([*words, *left], check=False).returncode)


def _show_policy(data: Mapping[str, Any]) -> None:
    from rich.console import Console as Rich

    rich = Rich(highlight=False)
    _show_validation(rich, data)
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in data["seconds"].items())
    rich.print(
        f"{counted(data['steps'], 'steps')}, {counted(data['rollouts'], 'rollouts')}, {data['calls']} calls trained on ({seconds}); "
        f"weights of step {data['best_step']}"
    )
    settled = {None: "too few steps to tell whether it converged", True: "converged", False: "not converged"}[data["converged"]]
    rich.print(f"{settled}: the mean reward of the last ten steps beside that of the ten before", markup=False)
    if data["agreement"] is not None:
        rich.print(f"served beside torch: {100 * data['agreement']:.0f} % of greedy texts are the same")
    for why, count in data["left_out"].items():
        rich.print(f"{count} left out: {why}", markup=False)
    for note in dict.fromkeys([*data["notes"], *data["alarms"], *([data["stopped"]] if data["stopped"] else [])]):
        rich.print(f"note: {in_flags(note)}", markup=False)
    if data.get("report"):
        rich.print(f"report: {data['report']}", markup=False, soft_wrap=True)
    if data["name"]:
        rich.print(f"{data['path']}\nIn any command: --model {data['name']}", markup=False, soft_wrap=True)
    else:
        rich.print(str(data["path"]), markup=False, soft_wrap=True)


def _show_validation(rich: Any, data: Mapping[str, Any]) -> None:
    from rich.table import Table

    from assay.optimizers.weights.page import in_numbers

    for bench, modes in data["validation"].items():
        table = Table("", "before", "after", "gain, paired 95 %", title=f"{bench}: sealed tasks, {next(iter(modes.values()))['before']['n']}")
        for row in in_numbers(modes):
            table.add_row(*row, style="bold" if row[0].endswith(": score") else None)
        rich.print(table)
        say_openings(rich, data["test_openings"].get(bench))


_policy_command("grpo", "GRPO: each call's return against its group's mean at the same turn, over the group's deviation.")
_policy_command("reinforce++", "REINFORCE++: returns normalised over all tokens of the batch; no critic, no groups.")
_policy_command("reinforce++-turn", "Each call's return against the batch's mean at the same turn, over the batch's deviation.")
_policy_command("ppo", "PPO: generalised advantages over the turns, from a fitted value.")
_policy_command("rloo", "RLOO: each call's return against the mean of the others of its group, unscaled.")
