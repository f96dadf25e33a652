"""The command line that is made from the settings classes."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from assay.cli.main import command_of, group
from assay.commands import COMMANDS, GROUPS, command_class
from assay.errors import AssayError
from assay.support.options import options_of

EVERY_OPTION = {name for words in COMMANDS for name in options_of(command_class(words))}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("The pump is on the left.")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ended(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(group, list(words))
    error = done.exception
    if isinstance(error, AssayError):
        return error.exit_code, error.text(error.names)
    return done.exit_code, done.output


@pytest.mark.parametrize("words", [*COMMANDS, *GROUPS])
def test_each_command_and_group_has_help(words: str) -> None:
    code, text = ended(*words.split(), "--help")
    assert (code, text.startswith("Usage: ")) == (0, True)


@pytest.mark.parametrize("words", COMMANDS)
def test_each_option_of_a_command_has_a_help_text(words: str) -> None:
    command = command_of(words.split())
    assert command is not None
    assert [item.name for item in command.params if getattr(item, "help", "text") == ""] == []


@pytest.mark.parametrize("words", COMMANDS)
def test_help_names_settings_as_flags_that_the_command_has(words: str) -> None:
    command, own = command_of(words.split()), options_of(command_class(words))
    texts = [command.help, *(getattr(parameter, "help", "") for parameter in command.params)]
    assert [name for text in texts for name in re.findall(r"`(\w+)`", text or "") if name in own] == []
    named = {name for option in own.values() for name in re.findall(r"`(\w+_\w+)", option.help)}
    assert named & EVERY_OPTION <= own.keys()
    headings = {getattr(parameter, "group", "Output") for parameter in command.params}
    assert [heading for heading in headings if len(heading.split()) > 12 or ". " in heading] == []


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (("--max-file-mb", "0"), "--max-file-mb"),
        (("--max-file-mb", "x"), "--max-file-mb"),
        (("--name", "a/b"), "--name"),
        (("--remove", "--embedder", "m"), "--embedder"),
        (("--passage-charz", "5"), "--passage-chars"),
        ((), "DIR"),
    ],
)
def test_a_wrong_value_is_wrong_usage_and_named_by_its_flag(arguments: tuple[str, ...], flag: str) -> None:
    code, text = ended("index", *(["docs"] if arguments else []), *arguments)
    assert code == 2
    assert flag in text


def test_a_key_of_the_project_file_is_a_default_and_is_named_by_the_file(folder: Path) -> None:
    file = folder / "assay.toml"
    file.write_text("[index]\nmax_file_mb = 7\n")
    assert "default: 7" in ended("index", "--help")[1]
    assert ended("index", "docs", "--store", "s.db")[0] == 0
    file.write_text("[index]\nremove = true\npassage_chars = 500\n")
    code, text = ended("index", "docs")
    assert (code, f"passage_chars in {file}" in text) == (2, True)


def test_help_does_not_depend_on_a_broken_project_file(folder: Path) -> None:
    (folder / "assay.toml").write_text("[index")
    assert ended("index", "--help")[0] == 0
    assert ended("index", "docs")[0] == 2


def test_a_store_that_does_not_exist_is_named_by_its_flag(folder: Path) -> None:
    for words in (("runs", "list"), ("runs", "show", "r")):
        code, text = ended(*words, "--store", "none.db")
        assert (code, "--store" in text) == (1, True)
    assert not (folder / "none.db").exists()
