"""Project files (`assay.toml`) fill what is not given on the command line."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from assay.cli.main import group
from assay.commands.compile import Compile
from assay.commands.project import project_settings
from assay.errors import ConfigError, ProjectError

PROJECT = """
[defaults]
program = "p.py:P"
rubric = "r.yaml"
data = "d.jsonl"
seed = 3

[program]
model = "openai/m"
api_base = "http://localhost:1/v1"

[judge]
model = "openai/j"

[judge.audit]
pass_at = 0.5

[reflection]
model = "openai/r"

[compile]
demos = 2
seed = 4
val_size = 20

[serve]
port = 0
allow_host = ["gateway.local"]

[runs]
limit = 7

[traces]
limit = 8

[traces.close]
idle_minutes = 5

[loop.install]
every_minutes = 15

[train]
steps = 5

[train.ppo]
steps = 6
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("assay.toml").write_text(PROJECT)
    return tmp_path


def test_the_project_file_fills_commands_and_roles(project: Path) -> None:
    role = {"model": "openai/m", "api_base": "http://localhost:1/v1"}
    named = {"program": "p.py:P", "rubric": "r.yaml", "data": "d.jsonl"}
    compiled = {
        **named,
        **role,
        "seed": 4,
        "judge_model": "openai/j",
        "reflection_model": "openai/r",
        "demos": 2,
        "val_size": 20,
    }
    assert project_settings("compile") == compiled
    assert project_settings("evaluate") == {**named, **role, "seed": 3, "judge_model": "openai/j"}
    assert project_settings("judge audit") == {
        "model": "openai/j",
        "api_base": "http://localhost:1/v1",
        "seed": 3,
        "pass_at": 0.5,
    }
    assert (project_settings("train grpo")["steps"], project_settings("train ppo")["steps"]) == (5, 6)
    assert project_settings("export sft") == {}
    assert project_settings("runs list") == {"limit": 7}
    assert project_settings("traces list") == {"limit": 8}  # [defaults] program and seed are not its filters
    assert project_settings("traces close") == {"idle_minutes": 5}
    assert project_settings("traces score") == {"rubric": "r.yaml", "judge_model": "openai/j"}
    assert project_settings("loop install") == {"every_minutes": 15}
    assert project_settings("serve") == {"port": 0, "allow_host": ["gateway.local"]}


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
    assert (settings["program"], settings["rubric"], settings["data"]) == (
        f"{project / 'p.py'}:P",
        str(project / "r.yaml"),
        "d.jsonl",
    )
    assert project_settings("compile", project) == settings


def test_an_error_in_a_project_file_names_its_keys_and_no_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("assay.toml").write_text("[compile]\nmax_calls = '5'")
    with pytest.raises(ProjectError) as refused:
        CliRunner().invoke(group, ["compile", "math_qa"], standalone_mode=False, catch_exceptions=False)
    printed = refused.value.text(refused.value.names)
    assert printed.endswith("assay.toml: [compile] max_calls: must be an integer, not '5'")


def test_flags_override_the_project_file(project: Path) -> None:
    Path("p.py").write_text("def P(question):\n    return {'answer': question}\n")
    Path("r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    rows = [json.dumps({"question": str(n), "answer": str(n)}) for n in range(40)]
    Path("d.jsonl").write_text("\n".join(rows))
    Path("assay.toml").write_text(
        PROJECT.replace('api_base = "http://localhost:1/v1"', "").replace(
            "[compile]", "[evaluate]\nsplit = 'gate'\nsize = 3\n\n[compile]"
        )
    )
    settings = [
        json.loads(
            CliRunner()
            .invoke(group, ["evaluate", "--json", *flags], standalone_mode=False, catch_exceptions=False)
            .stdout.splitlines()[-1]
        )
        for flags in ([], ["--split", "train", "--size", "2"], ["--split", "train"])
    ]
    assert [settings["split"] for settings in settings] == ["gate", "train", "train"]
    assert [settings["result"]["n"] for settings in settings] == [3, 2, 3]


def test_an_artifact_keeps_its_own_model(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("made").mkdir()
    Path("made/manifest.json").write_text("{}")
    observed: list[Compile] = []

    def run(settings: Compile) -> None:
        observed.append(settings)
        raise ConfigError("enough")

    monkeypatch.setattr(Compile, "run", run)
    for program in ("p.py:P", "made"):
        CliRunner().invoke(group, ["compile", program])
    assert [bool(settings.model or settings.api_base) for settings in observed] == [True, False]
