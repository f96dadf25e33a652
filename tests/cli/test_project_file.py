"""Project files (`assay.toml`) fill what is not given on the command line."""

from pathlib import Path

import pytest

from assay.commands.compile import Compile
from assay.commands.project import project_settings
from assay.errors import ConfigError
from rigs.command_line import assay_command

PROJECT = """
[defaults]
program = "p.py:P"
rubric = "r.yaml"
data = "d.jsonl"

[program]
model = "openai/m"
api_base = "http://localhost:1/v1"

[runs]
limit = 7

[traces.close]
idle_minutes = 5

[loop.install]
every_minutes = 15
"""


@pytest.fixture
def project(own_folder: Path) -> Path:
    Path("assay.toml").write_text(PROJECT)
    return own_folder


def test_defaults_are_of_the_commands_that_take_them(project: Path) -> None:
    named = {"program": "p.py:P", "rubric": "r.yaml", "data": "d.jsonl"}
    assert project_settings("evaluate") == {**named, "model": "openai/m", "api_base": "http://localhost:1/v1"}
    assert project_settings("export sft") == {}
    assert project_settings("runs list") == {"limit": 7}  # [defaults] program is not its filter
    assert project_settings("traces close") == {"idle_minutes": 5}
    assert project_settings("loop install") == {"every_minutes": 15}


def test_project_file_is_found_in_parent_folders_with_relative_paths(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("p.py", "r.yaml"):
        Path(name).touch()
    inner = project / "a" / "b"
    inner.mkdir(parents=True)
    (project / ".git").mkdir()
    monkeypatch.chdir(inner)
    settings = project_settings("compile")
    paths = [settings[name] for name in ("program", "rubric", "data")]
    assert paths == [f"{project / 'p.py'}:P", str(project / "r.yaml"), "d.jsonl"]
    assert project_settings("compile", project) == settings


def test_an_artifact_keeps_its_own_model(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("made").mkdir()
    Path("made/manifest.json").write_text("{}")
    observed: list[Compile] = []

    def run(settings: Compile) -> None:
        observed.append(settings)
        raise ConfigError("enough")

    monkeypatch.setattr(Compile, "run", run)
    for program in ("p.py:P", "made"):
        assay_command("compile", program)
    assert [bool(settings.model or settings.api_base) for settings in observed] == [True, False]
