"""Settings of jobs: the key of a job, rules between settings, keywords of the Python functions."""

import ast
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

import assay
from assay.commands.compile import Compile
from assay.commands.evaluate import Evaluate
from assay.errors import ConfigError
from assay.jobs.groups import DEFAULT_SALT
from assay.models import EMBEDDED
from assay.models.roles import DEFAULT_MODEL, DEFAULT_WEIGHTS
from assay.optimizers.settings import CompileConfig

NAMED = {"program": "p", "rubric": "r", "data": "d"}


@pytest.mark.parametrize("optimizer", ["copro", "gepa", "GEPA", "dspy:COPRO"])
def test_demos_are_refused_for_an_optimizer_that_adds_none(optimizer: str) -> None:
    assert CompileConfig(optimizer=optimizer).demos == 16
    with pytest.raises(ConfigError, match="demos: 9 would have no effect on optimizer"):
        CompileConfig(optimizer=optimizer, demos=9)
    assert CompileConfig(optimizer="mipro", demos=9).demos == 9


def test_the_key_of_a_job_depends_only_on_settings_that_affect_its_result() -> None:
    made = Compile(**NAMED)
    same = {"max_calls": 3, "threads": 2, "cache": False, "task_timeout": 3.0, "judge_api_key_env": "X"}
    for name, value in {**same, "salt": DEFAULT_SALT}.items():
        assert Compile(**NAMED, **{name: value}).key == made.key, name
    for name, value in {"seed": 1, "demos": 3, "judge_model": "openai/m", "salt": "b", "prompt_format": "json"}.items():
        assert Compile(**NAMED, **{name: value}).key != made.key, name
    assert Evaluate(**NAMED).key != Evaluate(**NAMED, split="gate").key


def test_settings_are_values() -> None:
    made = Compile(**NAMED, max_calls=3)
    assert pickle.loads(pickle.dumps(made)) == made == replace(made, seed=0)


@pytest.mark.slow
def test_the_default_model_is_named_in_one_place() -> None:
    root = Path(assay.__file__).parent
    names = (DEFAULT_MODEL, DEFAULT_WEIGHTS)
    named = [
        path.relative_to(root).as_posix()
        for path in sorted(root.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert named == ["models/roles.py"] * 2
    assert EMBEDDED[DEFAULT_MODEL.removeprefix("embedded/")].base_repo == DEFAULT_WEIGHTS
