"""Flags are made from the settings classes."""

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import click
import pytest
from click.testing import CliRunner

from assay.cli.main import group
from assay.commands.compile import Compile
from assay.commands.tune import TuneOrImpact
from assay.datasets import load_tasks
from assay.errors import ConfigError, DataError
from assay.rubrics import SHIPPED
from assay.support.options import options_of


def command_of(name: str) -> click.Command:
    command: Any = group
    for part in name.split():
        command = command.get_command(click.Context(command), part)
    return command


def given(monkeypatch: pytest.MonkeyPatch, kind: Any, *arguments: str) -> Any:
    """The settings that the command line makes of arguments."""
    made: list[Any] = []

    def run(settings: Any) -> None:
        made.append(settings)
        raise ConfigError("enough")

    monkeypatch.setattr(kind, "run", run)
    CliRunner().invoke(group, list(arguments))
    return made[0]


JOB = ["--rubric", "r", "--data", "d"]


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ([], {}),
        (["--max-calls", "3", "--model", "openai/m"], {"max_calls": 3, "model": "openai/m"}),
        (["--no-cache", "--no-preflight"], {"cache": False, "preflight": False}),
        (["--set", "temperature=0.1", "--set", "x=a"], {"parameters": {"temperature": 0.1, "x": "a"}}),
        (["--rename", "a=b"], {"rename": {"a": "b"}}),
        (
            ["--optimizer", "simba", "--optimizer-set", "bsize=4"],
            {"optimizer": "simba", "optimizer_settings": {"bsize": 4}, "max_search_calls": None},
        ),
        (
            ["--val-size", "4", "--test-size", "5"],
            {"val_size": 4, "test_size": 5, "sizes": {"val": 4, "test": 5}},
        ),
        (["--prompt-format", "lean"], {"prompt_format": "lean"}),
    ],
)
def test_flags_become_settings_and_others_keep_their_defaults(
    flags: list[str], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = given(monkeypatch, Compile, "compile", "p.py:P", *JOB, *flags)
    shown = [name for name, option in options_of(Compile).items() if option.flag.shown or name == "sizes"]
    changed = {name: getattr(made, name) for name in made.changed(*shown)}
    job = {"program": "p.py:P", "rubric": "r", "data": "d", "max_search_calls": 300, **settings}  # 300: preset `auto`
    assert changed == {name: value for name, value in job.items() if value is not None}


def test_flags_of_ranges_lists_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [
        "--range",
        "max_steps=1:4",
        "--objective",
        "score, tokens",
        "--also",
        "a",
        "--also",
        "b",
    ]
    expected = {
        "ranges": {"max_steps": (1.0, 4.0)},
        "objectives": ["score", "tokens"],
        "also": ["a", "b"],
    }
    made = given(monkeypatch, TuneOrImpact, "tune", "p.py:P", *JOB, *flags)
    assert {name: getattr(made, name) for name in expected} == expected
    done = CliRunner().invoke(group, ["tune", "p.py:P", *JOB, "--range", "max_steps=1"])
    assert isinstance(done.exception, ConfigError)
    assert done.exception.field == "ranges"


def test_the_default_cap_of_auto_is_in_the_help_of_the_commands_that_have_it() -> None:
    for name in ("compile", "improve", "tune", "judge compile"):
        text = next(
            str(vars(option)["help"]) for option in command_of(name).params if option.name == "max_search_calls"
        )
        assert ("300" in text) == (name in ("compile", "improve")), name


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            yield from _commands(command.get_command(click.Context(command), name), (*path, name))
    else:
        yield path


def test_help_of_every_command_imports_no_heavy_package() -> None:
    code = (
        "import sys\nfrom assay.cli.main import group\n"
        f"for words in {[list(path) for path in _commands(group)]!r}:\n"
        "    try:\n        group([*words, '--help'])\n    except SystemExit as end:\n"
        "        assert not end.code, words\n"
        "print('LOADED', *(name for name in sys.modules if '.' not in name))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.rpartition("LOADED")[2].split()
    assert {"dspy", "torch", "litellm", "sqlalchemy", "optuna", "numpy", "pydantic"} & set(loaded) == set()


def test_the_help_names_every_shipped_rubric_and_kind_of_data() -> None:
    text = " ".join(CliRunner().invoke(group, ["evaluate", "--help"]).output.split())
    rubrics = re.search(r"shipped name \(([^)]*)\)", text)
    data = re.search(r"or a spec \(([^)]*)\)", text)
    assert rubrics is not None
    assert set(rubrics[1].split(", ")) == set(SHIPPED)
    with pytest.raises(DataError) as refused:
        load_tasks("nonsense:size=1")
    assert data is not None
    assert {part.rstrip(":…") for part in data[1].split(", ")} == set(re.findall(r"(\w+):…", str(refused.value)))
