"""`assay init` writes a project that compiles as it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import assay
from assay.commands.init import init_project
from assay.testing import scripted_lm
from rigs.command_line import assay_command


def test_project_file_names_only_existing_settings(own_folder: Path) -> None:
    assert "next: assay compile" in assay_command("init").stdout
    settings = assay.project_settings("compile")
    named = {"program": "program.py:Triage", "rubric": "rubric.yaml", "data": "data.jsonl"}
    assert settings.items() >= {**named, "model": "embedded/smollm2-135m"}.items()
    assert "type: ignore" not in Path("program.py").read_text()  # no comments for type checkers


def test_new_project_compiles_with_its_settings(own_folder: Path) -> None:
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
