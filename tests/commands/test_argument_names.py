"""A misspelt argument is refused with the nearest one, and a value of a wrong type with the argument's name."""

import re

import pytest

import assay
from assay.commands.evaluate import Evaluate
from assay.errors import DataError
from assay.rubrics import checks
from assay.support.options import options_of

LOCAL = {"api_base": "http://127.0.0.1:9/v1", "api_key": "k"}


def test_a_row_without_expected_fields_is_unscored_with_the_way_out() -> None:
    rubric = assay.Rubric("r", [assay.Criterion(name="right", check=checks.exact)])
    reason = rubric.score({"ticket": "x"}, {"queue": "bug"}).verdicts[0].reason
    assert reason.endswith(
        "has no expected 'answer'; it has no expected outputs. Give the row as {'inputs': {…}, 'expected': {…}}"
    )


def test_keywords_of_a_provider_reach_it() -> None:
    """vLLM's `min_tokens` is not a misspelt `max_tokens`."""
    assert assay.get_lm("openai/m", min_tokens=3, **LOCAL).model == "openai/m"


def test_the_help_of_data_names_every_spec() -> None:
    with pytest.raises(DataError) as refused:
        assay.load_tasks("unknown")
    specs = re.findall(r"\w+:…", str(refused.value))
    help = options_of(Evaluate)["data"].help
    assert specs[:2] == ["hf:…", "reasoning_gym:…"]
    assert [spec for spec in specs if spec not in help] == []
