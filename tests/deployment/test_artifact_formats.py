"""An artifact of another format is refused, however it is named, with the way to make it again; nothing of it runs."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from trusted_artifacts import shipped, trust_list as trust_list, with_source

import assay
from assay.cli.main import group
from assay.deployment import FORMAT, load_artifact
from assay.errors import ArtifactError, AssayError
from assay.runs.loading import load_judge
from assay.sources.modules import load_source
from assay.sources.trust import trusting

TASKS = ("--rubric", "math_qa", "--data", "arithmetic:size=40", "--model", "openai/none", "--store", "s.db")
COMMANDS = [
    ("run", "a", "question=1+1"),
    ("evaluate", "a", *TASKS),
    ("compile", "a", *TASKS),
    ("tune", "a", *TASKS),
    ("collect", "a", *TASKS),
    ("compare", "a", "math_qa", *TASKS),
    ("registry", "register", "agent", "a", "--store", "s.db"),
    ("trust", "add", "a"),
    ("judge", "card", "a"),
]


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("program.json", lambda text: text.replace("calculator", "oracle")),
        ("manifest.json", lambda text: text.replace("scripted/model", "another/model")),
        ("manifest.json", lambda text: text[:1]),
        ("program.json", lambda text: None),
    ],
    ids=["program changed", "manifest changed", "manifest garbled", "program missing"],
)
def test_a_changed_or_incomplete_artifact_is_refused(own_folder: Path, file: str, change: Any) -> None:
    place = shipped(own_folder / "a") / file
    text = place.read_text()
    assert change(text) != text
    if (changed := change(text)) is None:
        place.unlink()
    else:
        place.write_text(changed)
    with pytest.raises(ArtifactError):
        assay.load(own_folder / "a")


@pytest.mark.parametrize("found", [FORMAT - 1, 0, -1, True, FORMAT + 1])
def test_an_artifact_of_another_format_is_not_loaded(own_folder: Path, found: Any) -> None:
    for load in (load_artifact, assay.load, load_judge, lambda path: assay.load(path, trust=True)):
        with pytest.raises(ArtifactError, match=r"(?i)compile again"):
            load(shipped(own_folder / f"{found}", format=found))


def test_code_of_an_artifact_of_another_format_does_not_run(own_folder: Path) -> None:
    artifact, mark = with_source(own_folder / "a", format=FORMAT - 1)
    with pytest.raises(ArtifactError, match=r"(?i)compile again"):
        assay.load(artifact, trust=True)
    with pytest.raises(ArtifactError, match=r"(?i)compile again"), trusting(True):
        load_source(next((artifact / "source").glob("*.py")))
    assert not mark.exists()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_each_command_refuses_an_artifact_of_another_format(own_folder: Path, command: tuple[str, ...]) -> None:
    (shipped(own_folder / "a", format=FORMAT - 1) / "card.json").write_text("{}")
    error = CliRunner().invoke(group, command).exception
    assert isinstance(error, AssayError)
    assert error.exit_code == 1
    assert "compile again" in str(error).lower()
