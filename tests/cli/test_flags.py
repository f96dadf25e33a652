"""The command line that is made from the settings classes: flags, help, and what a value that is wrong is named by."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from assay.cli import command_of
from assay.commands import COMMANDS
from assay.commands.compile import Compile
from assay.commands.judge import Label
from assay.commands.traces import list_rollouts, rate_rollouts
from assay.commands.tune import TuneOrImpact
from assay.datasets import load_tasks
from assay.errors import ConfigError, DataError, RubricError
from assay.rubrics import SHIPPED
from assay.rubrics.loading import import_check
from assay.support.names import MEANT
from assay.support.options import options_of
from assay.traces import Rollout, Store
from rigs.command_line import assay_command, leaves

JOB = ["--rubric", "r", "--data", "d"]


def given(monkeypatch: pytest.MonkeyPatch, kind: Any, *arguments: str) -> Any:
    """The settings that the command line makes of arguments."""
    made: list[Any] = []

    def run(settings: Any) -> None:
        made.append(settings)
        raise ConfigError("enough")

    monkeypatch.setattr(kind, "run", run)
    assay_command(*arguments)
    return made[0]


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
        (["--val-size", "4", "--test-size", "5"], {"val_size": 4, "test_size": 5, "sizes": {"val": 4, "test": 5}}),
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


def test_flags_of_ranges_and_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--range", "max_steps=1:4", "--objective", "score, tokens", "--also", "a", "--also", "b"]
    made = given(monkeypatch, TuneOrImpact, "tune", "p.py:P", *JOB, *flags)
    assert made.ranges == {"max_steps": (1.0, 4.0)}
    assert (made.objectives, made.also) == (["score", "tokens"], ["a", "b"])


def test_each_option_has_a_help_text_and_each_meant_name_is_an_option() -> None:
    commands = dict(leaves())
    assert {f"{words} {item.name}" for words in COMMANDS for item in options(commands[words]) if not item.help} == set()
    known = {item.name for command in commands.values() for item in command.params}
    assert {meant for names in MEANT.values() for meant in names} - known == set()


def options(command: click.Command) -> list[click.Option]:
    return [item for item in command.params if isinstance(item, click.Option)]


def test_help_of_every_command_imports_no_heavy_package() -> None:
    code = (
        "import sys\nfrom assay.cli import group\n"
        f"for words in {['', *(words for words, _ in leaves())]!r}:\n"
        "    try:\n        group([*words.split(), '--help'])\n    except SystemExit as end:\n"
        "        assert not end.code, words\n"
        "print('LOADED', *(name for name in sys.modules if '.' not in name))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.rpartition("LOADED")[2].split()
    assert {"dspy", "torch", "litellm", "sqlalchemy", "optuna", "numpy", "pydantic", "rich"} & set(loaded) == set()


def test_the_help_names_every_shipped_rubric_kind_of_data_and_default_cap() -> None:
    text = " ".join(assay_command("evaluate", "--help").stdout.split())
    rubrics = re.search(r"shipped name \(([^)]*)\)", text)
    data = re.search(r"or a spec \(([^)]*)\)", text)
    assert rubrics is not None
    assert set(rubrics[1].split(", ")) == set(SHIPPED)
    with pytest.raises(DataError) as refused:
        load_tasks("nonsense:size=1")
    assert data is not None
    assert {part.rstrip(":…") for part in data[1].split(", ")} == set(re.findall(r"(\w+):…", str(refused.value)))
    for words in ("compile", "improve", "tune", "judge compile"):  # `auto` is the preset of the first two
        command = command_of(words.split())
        assert command is not None
        (cap,) = [item for item in options(command) if item.name == "max_search_calls"]
        assert ("300" in str(cap.help)) == (words in ("compile", "improve")), words


def test_a_key_of_the_project_file_is_a_default_and_is_named_by_the_file(own_folder: Path) -> None:
    (own_folder / "docs").mkdir()
    (own_folder / "docs" / "a.md").write_text("The pump is on the left.")
    file = own_folder / "assay.toml"
    file.write_text("[index]\nmax_file_mb = 7\n")
    assert "default: 7" in assay_command("index", "--help").stdout
    assert assay_command("index", "docs", "--store", "s.db").code == 0
    file.write_text("[index]\nremove = true\npassage_chars = 500\n")
    done = assay_command("index", "docs")
    assert (done.code, f"passage_chars in {file}" in " ".join(done.stderr.split())) == (2, True)
    file.write_text("[index")
    assert assay_command("index", "--help").code == 0  # help does not depend on a broken file
    assert assay_command("index", "docs").code == 2


def test_a_store_or_a_run_that_does_not_exist_is_named(own_folder: Path) -> None:
    for words in (("runs", "list"), ("runs", "show", "r")):
        done = assay_command(*words, "--store", "none.db")
        assert (done.code, "--store" in done.stderr) == (1, True)
    assert not (own_folder / "none.db").exists()
    with Store("a.db") as store:
        store.put_rollout(Rollout(run_id="abcd"))
        store.flush()
        assert list_rollouts(run_id="abcd", store=store.url).rollouts
        for call in (list_rollouts, rate_rollouts):
            with pytest.raises(DataError, match="there is no run 'gone'; `assay runs list` shows the runs"):
                call(run_id="gone", store=store.url)
        with pytest.raises(DataError, match="there is no run 'gone'"):
            Label("Is it 2?", run_id="gone").waiting(store)


def test_every_listed_check_can_be_named_and_takes_the_listed_arguments() -> None:
    checks = {check["name"]: check for check in assay_command("rubric", "checks", "--json").report["checks"]}
    assert {"exact", "numeric", "tests_pass", "tool_executed", "query_cost"} <= checks.keys()
    for name, check in checks.items():
        parameters = inspect.signature(import_check(name)).parameters
        assert [*parameters] == ["task", "prediction", "rollout", *(each["name"] for each in check["arguments"])]
        assert check["summary"]
    (case,) = [each for each in checks["exact"]["arguments"] if each["name"] == "case"]
    assert (case["default"], case["required"]) == (False, False)
    printed = assay_command("rubric", "checks").stdout
    assert all(name in printed for name in checks)
    assert "\nexact (final): " in printed
    assert "\ntool_executed (step): " in printed
    with pytest.raises(RubricError, match=r"Did you mean 'assay\.rubrics\.steps:tool_executed', or"):
        import_check("assay.rubrics.checks:tool_executed")
