"""`assay.toml`: the keys of every command, and which value wins."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from contract_files import Contract
from contract_project import Project

import assay
from assay.errors import AssayError, ConfigError
from rigs.command_line import described, keywords, leaves

COMMANDS = {words: described(command) for words, command in leaves()}
# A key is one of the command if its table takes one of these values, or a choice of its flag.
VALUES = {
    "number": ("1", "0.5", "500"),
    "text": ('"x"', '"1,2"', '"score"', '"http://localhost:1/v1"', '"OPENAI_API_KEY"'),
    "boolean": ("true",),
    "list": ('["x"]', '["prompts"]'),
    "table": ('{x = "y"}', "{temperature = [0.1, 0.5]}", '{temperature = "0.1:0.3"}', "{max_calls = 5}"),
}
FUNCTIONS = {  # of which the keywords are keys
    **{f"export {kind}": "export" for kind in ("sft", "grpo", "preferences", "transitions")},
    "train rl": "train", "train sft": "train_sft", "judge compile": "compile_judge",
    **{name: name for name in ("collect", "compare", "compile", "evaluate", "improve", "index", "migrate", "tune")},
}  # fmt: skip


def settings_with(folder: Path, table: str, key: str, value: str, command: str) -> dict[str, Any] | None:
    """Settings of a command from a file with one key; None if the file is refused."""
    (folder / "assay.toml").write_text(f"[{table}]\n{key} = {value}\n")
    try:
        return assay.project_settings(command)
    except AssayError:
        return None


def keys_of(command: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Each key that a command's table may have, with the kind of value that it takes."""
    flags = {
        max(names.split("/")[0].split(), key=len).removeprefix("--").replace("-", "_"): option
        for names, option in COMMANDS[command]["options"].items()
    }
    arguments = (name.split()[0] for name in COMMANDS[command]["arguments"])
    names = {*flags, *arguments, *(f"{name}s" for name, flag in flags.items() if flag.get("many")), "every_minutes"}
    if command in FUNCTIONS:
        names |= set(keywords(getattr(assay, FUNCTIONS[command])))
    table = ".".join(f'"{word}"' for word in command.split())
    for key in sorted(names):
        choices = [f'"{choice}"' for choice in flags.get(key, {}).get("choices", ())]
        for kind, values in {"choice": choices[:1], **VALUES}.items():
            if any(settings_with(folder, table, key, value, command) for value in values):
                yield key, kind
                break


@pytest.mark.parametrize("group", sorted({words.split()[0] for words in COMMANDS}))
def test_keys_of_the_table_of_a_command_are_unchanged(group: str, own_folder: Path, contract: Contract) -> None:
    for command in (words for words in COMMANDS if words.split()[0] == group):
        Path("assay.toml").write_text("")
        try:
            assay.project_settings(command)
        except ConfigError:
            continue  # the file has no table for it
        contract.check("assay_toml", command, dict(keys_of(command, own_folder)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[defaults]\nseed = 3", 3),
        ("[defaults]\nseed = 3\n[train]\nseed = 4", 4),
        ("[defaults]\nseed = 3\n[train]\nseed = 4\n[train.rl]\nseed = 5", 5),
        ("[defaults]\nseed = 3\n[train.rl]\nseed = 4\n[train.ppo]\nseed = 6", 6),
    ],
    ids=["defaults", "group", "command", "short form"],
)
def test_the_narrowest_table_wins(text: str, expected: int, own_folder: Path) -> None:
    Path("assay.toml").write_text(text)
    assert assay.project_settings("train ppo")["seed"] == expected


@pytest.mark.parametrize("method", ["grpo", "ppo", "reinforce++", "reinforce++-turn", "rloo"])
def test_the_table_of_a_method_has_the_keys_of_train_rl(method: str, own_folder: Path, contract: Contract) -> None:
    keys = contract.stored("assay_toml")["train rl"].keys() - {"algorithm"}
    assert [
        key
        for key in keys
        if not any(
            settings_with(own_folder, f'train."{method}"', key, value, f"train {method}")
            for value in (
                '"dapo"',
                '"to_go"',
                '"json"',
                '"none"',
                '"head"',
                *(text for texts in VALUES.values() for text in texts),
            )
        )
    ] == []


def test_models_of_the_roles_are_settings_of_the_commands(own_folder: Path) -> None:
    Path("assay.toml").write_text(
        '[program]\nmodel = "openai/p"\n[judge]\nmodel = "openai/j"\n[reflection]\nmodel = "openai/r"\n'
    )
    assert assay.project_settings("compile") == {
        "model": "openai/p", "judge_model": "openai/j", "reflection_model": "openai/r",
    }  # fmt: skip
    assert assay.project_settings("judge score") == {"model": "openai/j"}


def test_sizes_are_the_keys_of_the_flags(own_folder: Path) -> None:
    Path("assay.toml").write_text("[compile]\nval_size = 5\ntest_size = 6\n")
    assert assay.project_settings("compile") == {"val_size": 5, "test_size": 6}


@pytest.mark.parametrize(
    "text",
    [
        "[compil]\ndemos = 3", "[compile]\ndemo = 3", "[evaluate]\ndemos = 3", "[program]\nmodels = 'x'", "seed = 3",
        "[compile]\nmax_calls = '5'", "[compile]\nthreshold = 2.0", "[evaluate]\nsplit = 'vall'", "[compile",
    ],
)  # fmt: skip
def test_a_file_with_an_unknown_key_or_a_wrong_value_is_refused(text: str, own_folder: Path) -> None:
    Path("assay.toml").write_text(text)
    with pytest.raises(ConfigError):
        assay.project_settings("compile")


def test_a_flag_overrides_the_file_and_the_file_the_default(project: Project) -> None:
    text = (project.folder / "assay.toml").read_text()
    project.write("assay.toml", f'{text}\n[evaluate]\nsplit = "train"\nsize = 3\n')
    from_file = project.report("evaluate", "sums.py:successor")
    from_flags = project.report("evaluate", "sums.py:successor", "--split", "gate", "--size", "2")
    assert [(report["split"], report["tasks"]) for report in (from_file, from_flags)] == [("train", 3), ("gate", 2)]


def test_the_file_of_a_folder_above_counts_and_its_paths_are_found(project: Project) -> None:
    inner = project.folder / "a" / "b"
    inner.mkdir(parents=True)
    (project.folder / ".git").mkdir()
    settings = assay.project_settings("evaluate", inner)
    assert settings["model"] == "openai/m"


def test_a_file_that_sends_data_to_another_host_must_be_trusted(own_folder: Path) -> None:
    Path("assay.toml").write_text('[program]\nmodel = "openai/m"\napi_base = "https://elsewhere.example/v1"\n')
    with pytest.raises(AssayError):
        assay.project_settings("evaluate")
    assert assay.project_settings("evaluate", trust=True)["api_base"] == "https://elsewhere.example/v1"
