"""Versions of DSPy that are refused, warned of or taken; parts of it that have moved; the prompts of its adapters."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import dspy
import pytest

from assay.errors import ConfigError
from assay.models.dspy_seam import PartMoved
from assay.support.lazy import RESTS_ON_STUB, UntestedDSPy, check_version
from assay.traces import Recorder, Rollout


@pytest.mark.parametrize(
    "installed",
    [
        *("3.4.0", "3.4", "3.4.1rc1", "3.4.1.dev0", "3.4.1a2", "3.4.1c1", "3.4.1-pre1", "2.6.27", "3.3.0"),
        *("3.6.0", "3.6", "3.6.0rc1", "3.6.0.dev1", "3.10.0", "4.0", "10.0", "main", "", "3", "unknown", "1!3.5"),
    ],
)
def test_a_version_out_of_the_range_is_refused(installed: str) -> None:
    with pytest.raises(ConfigError, match=r"3\.4\.1 to 3\.5"):
        check_version(installed)


@pytest.mark.parametrize("installed", ["3.5.0", "3.5.0rc1", "3.5.3", "3.5", "3.5.0.dev3+g1234", "v3.5.0"])
def test_an_untested_version_is_warned_of(installed: str) -> None:
    with pytest.warns(UntestedDSPy) as warned:
        check_version(installed)
    assert all(part in str(warned[0].message) for part in RESTS_ON_STUB)


@pytest.mark.parametrize("installed", ["3.4.1", "3.4.2", "3.4.1.post1", "3.4.1+cpu", "3.4.2rc1", "3.4.10"])
def test_a_tested_version_is_taken_without_a_word(installed: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version(installed)


COMMAND = """
import sys, dspy
dspy.__version__ = {version!r}
from assay.cli import main
sys.argv = ["assay", *{arguments!r}]
main()
"""


def called(folder: Path, version: str, *arguments: str) -> Any:
    code = COMMAND.format(version=version, arguments=arguments)
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_command_refuses_an_unsupported_version_in_one_line(tmp_path: Path) -> None:
    result = called(tmp_path, "3.6.0", "run", "qa", "question=2", "--model", "openai/x", "--json")
    assert (result.returncode, result.stdout) == (2, "")
    assert ["3.6.0" in line for line in result.stderr.splitlines()] == [True]


@pytest.mark.slow
def test_a_command_warns_of_an_untested_version_once_beside_its_output(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(
        "import dspy\n\n\nclass Echo(dspy.Module):\n    def forward(self, question):\n"
        "        return dspy.Prediction(answer=question)\n"
    )
    result = called(tmp_path, "3.5.0", "run", "echo.py:Echo", "question=2", "--model", "openai/x", "--json")
    assert json.loads(result.stdout)["answer"] == "2"
    assert result.stderr.count("UntestedDSPy") == 1


def test_a_model_whose_engine_cannot_be_replaced_is_refused_before_its_call() -> None:
    class Elsewhere(dspy.LM):  # type: ignore[misc]
        """Has the attributes of a model, but not DSPy's for its engine."""

        def __init__(self) -> None:
            self.model, self.kwargs, self.history, self.callbacks, self.cache = "openai/m", {}, [], [], False

    recorder = Recorder()
    with recorder.active(), recorder.rollout(Rollout()), pytest.raises(PartMoved):
        Elsewhere()("2+2?")
