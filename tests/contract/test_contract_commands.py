"""Every command with its arguments, options, defaults and choices, and the public names with their keywords."""

import ast
from importlib import import_module
from pathlib import Path

import pytest
from contract_files import Contract

import assay
from rigs.command_line import assay_command, described, keywords, leaves

COMMANDS = {words: described(command) for words, command in leaves()}
FACES = (
    "assay", "assay.datasets", "assay.evaluation", "assay.judges", "assay.models", "assay.optimizers",
    "assay.programs", "assay.rubrics", "assay.rubrics.checks", "assay.testing", "assay.testing.contracts",
    "assay.traces",
)  # fmt: skip
FUNCTIONS = (
    "collect", "compare", "compile", "compile_judge", "deployed", "evaluate", "export", "get_lm", "improve", "index",
    "join_tune", "load", "load_judge", "load_rubric", "load_tasks", "load_verifier", "migrate",
    "parameter_impact", "project_settings", "record", "recorded", "run", "side_effects", "train", "train_sft", "tune",
)  # fmt: skip


def test_no_command_came_or_went(contract: Contract) -> None:
    contract.check("commands", "all", sorted(COMMANDS))


@pytest.mark.parametrize("group", sorted({words.split()[0] for words in COMMANDS}))
def test_the_options_of_a_command_are_unchanged(group: str, contract: Contract) -> None:
    for words in (words for words in COMMANDS if words.split()[0] == group):
        contract.check("commands", words, COMMANDS[words])


def test_an_option_that_commands_share_has_one_kind_of_value() -> None:
    """A flag here and a text there under the same name would be two things to learn."""
    kinds: dict[str, set[bool]] = {}
    for command in COMMANDS.values():
        for names, option in command["options"].items():
            kinds.setdefault(names.split()[0], set()).add(option.get("flag", False))
    assert [name for name, found in kinds.items() if len(found) > 1] == []


@pytest.mark.parametrize("words", ["", "judge", "compile", "deploy start"])
def test_help_of_groups_and_commands_ends_with_0(words: str) -> None:
    done = assay_command(*words.split(), "--help")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: ")


def test_the_version_is_printed() -> None:
    done = assay_command("--version")
    assert (done.code, assay.__version__ in done.stdout) == (0, True)


@pytest.mark.parametrize("face", FACES)
def test_public_names_are_unchanged_and_load(face: str, contract: Contract) -> None:
    module = import_module(face)
    assert [name for name in module.__all__ if getattr(module, name, None) is None] == []
    contract.check("python", face, sorted(module.__all__))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_keywords_of_public_functions_are_unchanged(name: str, contract: Contract) -> None:
    contract.check("python", f"assay.{name}()", keywords(getattr(assay, name)))


def test_this_suite_imports_public_names_only() -> None:
    """So that it outlives every move of a module."""
    modules = {
        node.module
        for path in Path(__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("assay.")
    }
    assert modules - set(FACES) == {"assay.errors"}  # the exception tree
