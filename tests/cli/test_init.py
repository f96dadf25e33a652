"""`assay init` writes a project that compiles as it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import assay
from assay.cli.main import group
from assay.commands.init import init_project
from assay.testing import scripted_lm


def test_project_file_names_only_existing_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(group, ["init"], standalone_mode=False, catch_exceptions=False)
    assert "next: assay compile" in ended.output
    settings = assay.project_settings("compile")
    assert (settings["program"], settings["rubric"], settings["data"]) == (
        "program.py:Triage",
        "rubric.yaml",
        "data.jsonl",
    )
    assert settings["model"] == "embedded/smollm2-135m"


def test_new_project_compiles_with_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    init_project()
    settings = {
        name: value
        for name, value in assay.project_settings("compile").items()
        if name not in ("model", "max_search_calls")
    }
    report = assay.compile(
        **settings, lm=scripted_lm(lambda request: "label: bug"), optimizer="labeled", threads=1
    ).to_dict()
    baseline = report["candidates"][0]
    assert baseline["n"] >= 5
    assert 0 < baseline["val_score"] < 1


SMALL = "max_search_calls = 12\nval_size = 4\ngate_size = 5\ntest_size = 5"


@pytest.mark.tutorial
@pytest.mark.slow
@pytest.mark.model
def test_assay_compile_runs_in_a_new_project_without_any_flag(tmp_path: Path, embedded: str) -> None:
    for words in (["init"], ["compile", "--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "assay", *words], capture_output=True, text=True, cwd=tmp_path, timeout=1200
        )
        assert done.returncode == 0, done.stderr
        settings = (tmp_path / "assay.toml").read_text().replace("max_search_calls = 120", SMALL)
        (tmp_path / "assay.toml").write_text(settings)  # a short search, which only the settings file requests
    assert SMALL in settings
    data = json.loads(done.stdout)
    assert Path(tmp_path / data["artifact"]).is_dir()
    assert data["candidates"][0]["val_score"] is not None
    assert (data["replaces"], data["test"]["compiled"]) == (False, None)  # five gate tasks decide nothing
