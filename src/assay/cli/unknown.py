"""Options that do not exist: which one was probably meant, and which other command has it."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches

import click

_INSTEAD = {"--state": "Compile the program with it, and give the artifact to this command."}
_SIZES = ("--train-size", "--val-size", "--gate-size", "--test-size")
_ALIKE = 0.75  # of two names, from 0 to 1
# Names that other tools have, and those that may be meant; of these the first that a command has is named.
MEANT: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(
        ("--limit", "--n", "-n", "--num", "--count", "--num-examples", "--max-examples", "--max-samples", "--sample"),
        ("--size", "--limit", "--trials", *_SIZES),
    ),
    **dict.fromkeys(
        ("--output", "-o", "--output-dir", "--output-file", "--out-dir", "--out-file", "--dest"), ("--out", "--report")
    ),
    **dict.fromkeys(("--html", "--page"), ("--report",)),
    **dict.fromkeys(("--dataset", "--tasks", "--input", "--inputs", "--examples", "-d"), ("--data", "--file")),
    **dict.fromkeys(("--trainset", "--valset", "--devset", "--testset", "--train", "--val"), ("--data",)),
    **dict.fromkeys(("--state",), ()),
    **dict.fromkeys(("--data",), ("--labels", "--file")),
    **dict.fromkeys(("--out", "--directory", "--dir"), ("--report", "--out")),
    **dict.fromkeys(("--metric", "--scorer", "--criteria", "--evaluator"), ("--rubric", "--objective")),
    **dict.fromkeys(("--lm", "--llm", "--model-name", "--engine", "-m"), ("--model",)),
    **dict.fromkeys(
        ("--base-url", "--api-url", "--endpoint", "--openai-base-url", "--api-base"),
        ("--api-base", "--upstream", "--judge-api-base"),
    ),
    **dict.fromkeys(("--upstream",), ("--api-base",)),
    **dict.fromkeys(("--api-key", "--token"), ("--api-key-env", "--key")),
    **dict.fromkeys(("--judge", "--grader", "--grader-model"), ("--judge-model",)),
    **dict.fromkeys(("--teacher", "--prompt-model", "--reflection-lm", "--teacher-model"), ("--reflection-model",)),
    **dict.fromkeys(
        ("--num-threads", "--concurrency", "--parallel", "--num-workers", "--workers", "--jobs", "-j"),
        ("--threads", "--workers"),
    ),
    **dict.fromkeys(("--budget", "--max-cost", "--max-usd", "--max-budget", "--cost"), ("--max-cost-usd",)),
    **dict.fromkeys(("--max-requests", "--max-lm-calls", "--max-metric-calls"), ("--max-search-calls", "--max-calls")),
    **dict.fromkeys(("--max-new-tokens", "--max-completion-tokens", "--max-output-tokens"), ("--max-completion",)),
    **dict.fromkeys(("--timeout", "--time-limit"), ("--task-timeout", "--rollout-timeout-s")),
    **dict.fromkeys(("--db", "--database", "--storage"), ("--store",)),
    **dict.fromkeys(("--adapter", "--format"), ("--prompt-format", "--name")),
    **dict.fromkeys(("--adapter-name", "--output-name"), ("--name",)),
    **dict.fromkeys(("--num-demos", "--max-demos", "--shots", "--few-shot", "--max-bootstrapped-demos"), ("--demos",)),
    **dict.fromkeys(("--param", "--parameter", "--temperature"), ("--set",)),
    **dict.fromkeys(("--n-trials", "--num-trials", "--iterations"), ("--trials", "--steps")),
    **dict.fromkeys(("--lr",), ("--learning-rate",)),
    **dict.fromkeys(("--batch-size", "--train-batch-size"), ("--batch", "--per-device-batch-size")),
    **dict.fromkeys(("--num-epochs", "--num-train-epochs"), ("--epochs",)),
    **dict.fromkeys(("--max-steps", "--num-steps"), ("--steps",)),
    **dict.fromkeys(("--rank", "--lora-rank", "-r"), ("--lora-r",)),
    **dict.fromkeys(("--random-seed", "--random-state"), ("--seed",)),
    **dict.fromkeys(("--min-score", "--fail-below", "--threshold"), ("--fail-under",)),
    **dict.fromkeys(("--run-id",), ("--run",)),
    **dict.fromkeys(("--as-json", "--json-output"), ("--json",)),
    **dict.fromkeys(("--continue", "--resume-from"), ("--resume",)),
}  # fmt: skip


def explained(error: click.NoSuchOption, commands: click.Group) -> click.NoSuchOption:
    """The error with the option that was probably meant, or with the commands that have the one that was given.

    Args:
        commands: all commands. They are loaded only if the option's name resembles none of its own command.
    """
    name, command = error.option_name, error.ctx.command if error.ctx else commands
    own = {option for parameter in command.params for option in parameter.opts}
    meant = [option for option in MEANT.get(name, ()) if option in own]
    if meant:
        likely = [option for option in meant if option in _SIZES] if meant[0] in _SIZES else meant[:1]
    else:  # a name of the table means something else than one that is only spelled alike, as `--max-new-tokens`
        likely = [] if name in MEANT else get_close_matches(name, own, 3, _ALIKE)
    text = f"No such option {name!r}."
    if likely:
        text += f" Did you mean {', '.join(likely)}?"
    elif others := [path for path, other in _walk(commands, "assay") if _has(other, name)]:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        text += f" It belongs to {', '.join(others[:3])}{more}. {_INSTEAD.get(name, '')}".rstrip()
    return click.NoSuchOption(name, text, ctx=error.ctx)


def _has(command: click.Command, name: str) -> bool:
    return any(name in option.opts for option in command.params)


def _walk(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    """Each command below a group with its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _walk(command, f"{path} {name}")
        elif command is not None:
            yield f"{path} {name}", command
