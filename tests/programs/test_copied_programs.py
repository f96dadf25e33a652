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
