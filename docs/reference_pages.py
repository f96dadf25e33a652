"""The pages under `reference/`, written from the code at each build. Nothing is written to disk.

`pages()` is used by `hooks.py`, and by the tests to know which pages there are.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import click
import pydantic
from assay.errors import spoken
from assay.support.options import Settings, options_of
from pydantic_core import PydanticUndefined

from reference_json import json_page
from reference_metrics import metrics_page
from reference_shipped import shipped_page
from reference_text import cell, coded, descriptions, docstring, plain, type_name

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "assay"
PACKAGES = (
    *("assay.rubrics", "assay.rubrics.code", "assay.judges", "assay.programs", "assay.programs.sandbox"),
    "assay.programs.retrieval",
    "assay.datasets",
    *(
        "assay.models",
        "assay.models.loops",
        "assay.traces",
        "assay.evaluation",
        "assay.optimizers",
        "assay.testing",
        "assay.testing.contracts",
        "assay.errors",
    ),
)
SETTINGS_IN = ("assay.commands", "assay.jobs", "assay.optimizers", "assay.traces")
SETTINGS_CLASS = re.compile(r"^class ([A-Z]\w*(?:Config|Settings))\b", re.MULTILINE)
EXIT_CODES = {
    "0": "Success.",
    "1": "A failure: of a store, a model, a program, a gate, or a cap without a result; `--fail-under` not reached, or "
    "the score partial; criteria below `--min-coverage`, rows that the store did not take, a full disk, an alarm of "
    "`judge audit` or `judge drift`, failed lines of `run --file`.",
    "2": "Wrong usage: an unknown flag or value; data, a rubric, a program, an artifact, a model or a run that is "
    "not there or cannot be read; a store that is not a database; a file that cannot be written or would replace one "
    "that is read. Nothing was run.",
    "130": "Stopped by Ctrl-C, SIGTERM or SIGHUP. `--resume` continues where the command has it.",
}


@cache
def pages() -> dict[str, str]:
    """Path below `docs/` -> Markdown."""
    result = {"reference/index.md": _index()}
    result |= {f"reference/cli/{name}.md": _command_page(name, command) for name, command in _commands()}
    result |= {
        "reference/settings.md": _settings_page(),
        "reference/checks.md": _checks_page(),
        "reference/shipped.md": shipped_page(),
        "reference/rubric-file.md": _rubric_page(),
        "reference/judge-file.md": _judge_page(),
        "reference/json-output.md": json_page(SOURCE),
        "reference/exit-codes.md": _exit_page(),
        "reference/metrics.md": metrics_page(),
        "reference/python/assay.md": _python_page("assay"),
    }
    result |= {f"reference/python/{package}.md": _python_page(package) for package in PACKAGES}
    results = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    return result | {f"results/{path.name}": path.read_text(encoding="utf-8") for path in results}


def _index() -> str:
    commands = [
        f"- [`assay {name}`](cli/{name}.md): {command.get_short_help_str(200)}" for name, command in _commands()
    ]
    packages = [f"- [`{package}`](python/{package}.md)" for package in ("assay", *PACKAGES)]
    files = [
        *("- [Settings](settings.md) of the Python functions", "- [Checks](checks.md)"),
        "- [Shipped names](shipped.md): programs, rubrics, judges, data",
        *("- [Rubric files](rubric-file.md)", "- [Judge files](judge-file.md)"),
        *("- [JSON output](json-output.md)", "- [Exit codes](exit-codes.md)"),
        "- [Metrics](metrics.md) of `assay serve`",
    ]
    head = ["# Reference", "", "These pages are generated from the code.", "", *files]
    return "\n".join([*head, "", "## Commands", "", *commands, "", "## Python packages", "", *packages, ""])


# Commands


def _commands() -> Iterator[tuple[str, click.Command]]:
    from assay.cli import group

    context = click.Context(group, info_name="assay")
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield name, command


def _command_page(name: str, command: click.Command) -> str:
    return "\n".join(_command(command, click.Context(command, info_name=f"assay {name}"), level=1))


def _command(command: click.Command, context: click.Context, *, level: int) -> Iterator[str]:
    yield f"{'#' * level} {context.command_path}\n"
    yield f"{plain(inspect.cleandoc(command.help or '').replace(chr(8), ''))}\n"
    if not isinstance(command, click.Group):
        yield f"```text\n{' '.join([context.command_path, *command.collect_usage_pieces(context)])}\n```\n"
    options = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    if options:
        rows = [_option(option, context) for option in options]
        yield "\n".join(["| flag | default | meaning |", "|---|---|---|", *rows, ""])
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _command(inner, click.Context(inner, info_name=name, parent=context), level=level + 1)


def _option(option: click.Option, context: click.Context) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    value = "" if option.is_flag else f" {option.make_metavar(context)}"
    preset, rule = getattr(option, "shown_default", ""), getattr(option, "rule", "")
    default = "required" if option.required else f"`{preset}`" if preset else ""
    meaning = getattr(option, "meaning", option.help or "") + (f" ({rule})" if rule else "")
    return f"| {names}{cell(value)} | {default} | {cell(meaning)} |"


# Settings


def _settings_page() -> str:
    parts = ["# Settings\n\nThe keywords of the Python functions. The command line makes its flags from them.\n"]
    for owner in sorted(_settings_classes(), key=lambda kind: kind.__name__):
        texts = descriptions(owner)
        if issubclass(owner, Settings):
            texts = {name: spoken(option.help, str) for name, option in options_of(owner).items()}
        items = [item for item in dataclasses.fields(owner) if item.init and not item.name.startswith("_")]
        declared = [
            item for item in items if "setting" in item.metadata
        ]  # of settings classes; their other fields are internal
        texts = {
            **texts,
            **{item.name: item.metadata["setting"].help for item in declared if item.metadata["setting"].help},
        }
        rows = [_setting(item, texts) for item in declared or items]
        parts += [f"## {owner.__name__}\n", f"`{owner.__module__}`. {docstring(owner)}\n"]
        parts.append("\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def _settings_classes() -> set[type]:
    result = set()
    for package in SETTINGS_IN:
        root = importlib.import_module(package)
        for entry in pkgutil.walk_packages(root.__path__, f"{package}."):
            path = Path(SOURCE.parent, *entry.name.split("."))
            path = path / "__init__.py" if entry.ispkg else path.with_suffix(".py")
            for name in SETTINGS_CLASS.findall(path.read_text(encoding="utf-8")):
                owner = getattr(importlib.import_module(entry.name), name)
                if dataclasses.is_dataclass(owner):
                    result.add(owner)
    return result


def _setting(item: "dataclasses.Field[Any]", texts: Mapping[str, str]) -> str:
    if item.default is not dataclasses.MISSING:
        default = coded(repr(item.default))
    else:
        default = "required" if item.default_factory is dataclasses.MISSING else "empty"
    meaning = (item.metadata.get("help") or texts.get(item.name, "")).replace("{split} tasks", "tasks, by split")
    return f"| `{item.name}` | {coded(type_name(item.type))} | {default} | {cell(str(meaning))} |"


# Checks


def _checks_page() -> str:
    from assay.rubrics import checks, conversations, documents, environments, steps, tools
    from assay.rubrics.code import checks as code_checks, checks as tested
    from assay.shipped.programs.experiment import checks as experiment
    from assay.shipped.programs.nim import checks as nim
    from assay.shipped.programs.text_to_sql import checks as sql

    return f"""# Checks

A check is called as `check(task, prediction, rollout, **with)`. In a rubric file:
`check: "assay.rubrics.checks:numeric"`, with its arguments under `with`. `field` is the output field that is read: by
default the one that the task expects.

## Checks of the result

{_check_list(checks)}
## Checks that run code

{docstring(tested)}

{_check_list(tested)}
## Checks of edited code

{docstring(code_checks)}

{_check_list(code_checks)}
## Checks of tool use

{_check_list(tools)}
## Checks of answers from documents

{docstring(documents)}

{_check_list(documents)}
## Checks of episodes in an environment

{docstring(environments)}

{_check_list(environments)}
{_check_list(experiment)}
{_check_list(nim)}
## Checks of SQL queries

{docstring(sql)}

{_check_list(sql)}
## Checks of conversations

{docstring(conversations)}

{_check_list(conversations)}
## Checks of a step

For criteria with `scope: step`: the grade is of one LM call.

{_check_list(steps)}"""


def _check_list(module: Any) -> str:
    parts = []
    for name in module.__all__:
        function = getattr(module, name)
        parameters = list(inspect.signature(function).parameters.values())
        arguments = ", ".join(f"`{value.name}`{_of_default(value)}" for value in parameters[3:])
        use = f"arguments: {arguments}" if arguments else "no arguments"
        if parameters[0].name != "task":
            use = f"makes a check, in Python: `{name}({', '.join(value.name for value in parameters)})`"
        parts.append(f"### {name}\n\n`{module.__name__}:{name}`; {use}.\n\n{docstring(function)}\n")
    return "\n".join(parts)


def _of_default(value: inspect.Parameter) -> str:
    return " (required)" if value.default is value.empty else f" (`{value.default!r}`)"


# File formats


def _rubric_page() -> str:
    from assay.rubrics import loading as files

    models = {
        **{"A rubric": files.RubricFile, "A criterion": files.CriterionFile},
        **{"essential": files.EssentialFile, "judge": files.JudgeFile},
    }
    tables = "\n".join(_model(title, model) for title, model in models.items())
    return f"""# Rubric files

A YAML file. Unknown keys are errors; all problems of a file are reported together, with their lines.
`assay.rubrics.rubric_schema()` is the JSON schema for editors. How the score is computed:
[rubrics and scores](../explanation/rubrics.md).

{tables}"""


def _judge_page() -> str:
    from assay.judges import loading

    models = {"A judge": loading._JudgeDefinition, "jury": loading._JuryFile, "cascade": loading._CascadeFile}
    tables = "\n".join(_model(title, model) for title, model in models.items())
    return f"""# Judge files

A YAML file with a question and a scale, or a `jury` or `cascade` of other judges. How a judge is read and calibrated:
[judges](../explanation/judges.md).

{tables}"""


def _model(title: str, model: type[pydantic.BaseModel]) -> str:
    texts, rows = descriptions(model), []
    for name, field in model.model_fields.items():
        owner = next(parent for parent in model.__mro__ if name in parent.__annotations__)
        kind = coded(type_name(owner.__annotations__[name])) + _limits(model, field.alias or name)
        default = "required" if field.default is PydanticUndefined else coded(repr(field.default))
        rows.append(f"| `{field.alias or name}` | {kind} | {default} | {cell(texts.get(name, ''))} |")
    return "\n".join([f"## {title}", "", "| key | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def _limits(model: type[pydantic.BaseModel], key: str) -> str:
    """Constraints of a field, after its type."""
    words = {
        **{"minimum": "at least", "maximum": "at most", "minItems": "items: at least"},
        **{"exclusiveMinimum": "above", "exclusiveMaximum": "below"},
    }
    schema = model.model_json_schema(by_alias=True)["properties"][key]
    return "".join(f", {text} {schema[name]}" for name, text in words.items() if name in schema)


# Exit codes


def _exit_page() -> str:
    from assay.errors import FailureKind

    codes = "\n".join(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())
    kinds = re.findall(r'= "(\w+)"  # (.+)', inspect.getsource(FailureKind))
    rows = "\n".join(f"| `{kind}` | {cell(meaning)} |" for kind, meaning in kinds)
    return f"""# Exit codes

| code | meaning |
|---|---|
{codes}

Errors are written to standard error, as `assay: MESSAGE`. With `ASSAY_DEBUG=1` an unexpected exception is shown with
its traceback.

## Failure kinds

The `failure` of a call, a rollout or a verdict.

| kind | meaning |
|---|---|
{rows}
"""


# Python


def _entry(package: str, name: str, value: Any) -> str:
    """A name of a package. Griffe does not find shipped programs, which are outside of `src`; their docstrings do."""
    folder = str(value.__module__).removeprefix("assay.shipped.").rpartition(".")[0].replace(".", "/")
    if not folder.startswith("programs/"):
        return f"::: {package}.{name}\n"
    return f"## {name}\n\n{docstring(value)}\n\nIts code is in `{folder}`.\n"


def _python_page(package: str) -> str:
    module = importlib.import_module(package)
    names = [name for name in module.__all__ if not name.startswith("__")]
    entries = [_entry(package, name, getattr(module, name)) for name in names if callable(getattr(module, name))]
    return "\n".join([f"# {package}\n", f"{docstring(module)}\n", *entries])
