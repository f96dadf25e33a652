"""Versions of DSPy that are refused, warned of or taken, and the prompts that its adapters return."""

import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from assay.errors import ConfigError
from assay.models.dspy_seam import UntestedDSPy, check_version, prompt_text


@pytest.mark.parametrize("installed", ["3.4.0", "3.4.1rc1", "2.6.27", "3.6.0", "3.6.0rc1", "3.6.0.dev1", "4.0", "main"])
def test_a_version_out_of_the_range_is_refused(installed: str) -> None:
    with pytest.raises(ConfigError):
        check_version(installed)


@pytest.mark.parametrize("installed", ["3.5.0", "3.5.0rc1", "3.5.3", "3.5"])
def test_an_untested_version_is_warned_of(installed: str) -> None:
    with pytest.warns(UntestedDSPy):
        check_version(installed)


@pytest.mark.parametrize("installed", ["3.4.1", "3.4.2", "3.4.1.post1"])
def test_a_tested_version_is_taken_without_a_word(installed: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version(installed)


@pytest.mark.slow
def test_a_command_refuses_an_unsupported_version_in_one_line(tmp_path: Path) -> None:
    code = (
        "import sys, dspy; dspy.__version__ = '3.6.0'; from assay.cli import main; "
        "sys.argv = ['assay', 'evaluate', 'qa', '--model', 'openai/x']; sys.exit(main())"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode in (1, 2)
    assert "3.6.0" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_text_of_a_prompt_is_the_same_in_both_shapes() -> None:
    messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "q: 1"}]
    user = SimpleNamespace(role="user", parts=(SimpleNamespace(text="q: 1"),))
    assert prompt_text(messages) == prompt_text(SimpleNamespace(system="Answer.", messages=(user,)))
