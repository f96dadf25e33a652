"""A user copies the folder of a shipped program and changes it."""

import shutil
from pathlib import Path

import pytest

from assay.programs.loading import SHIPPED, full_name, program_class
from assay.support.package import CONTENT


@pytest.mark.parametrize("name", SHIPPED)
def test_a_copy_of_a_shipped_program_is_a_program_of_its_own(name: str, tmp_path: Path) -> None:
    shutil.copytree(CONTENT / "programs" / name, tmp_path / name)
    copied = program_class(str(tmp_path / name / "program.py"))
    assert copied.__name__ == program_class(name).__name__
    assert copied is not program_class(name)
    assert full_name(str(tmp_path / name / "program.py")).endswith(f":{copied.__name__}")


def test_the_check_of_a_copied_program_is_that_of_the_copy(tmp_path: Path) -> None:
    from assay.rubrics import load_rubric

    shutil.copytree(CONTENT / "programs" / "nim", tmp_path / "nim")
    checks = tmp_path / "nim" / "checks.py"
    checks.write_text(checks.read_text().replace("float(won)", "float(won) / 2"))
    (tmp_path / "half.yaml").write_text("name: half\ncriteria:\n- {name: won, check: nim/checks.py:nim_won}\n")
    task = {"inputs": {"sticks": 1, "most": 3, "skill": 0.5, "seed": 1}}
    prediction = {"steps": [{"action": "1", "reward": 1.0, "done": True, "error": None, "info": {"opponent": None}}]}
    assert load_rubric(tmp_path / "half.yaml").score(task, prediction).value == 0.5
    assert load_rubric("nim").score(task, prediction).value == 1.0
