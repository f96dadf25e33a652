"""Settings of jobs: the key of a job, rules between settings, keywords of the Python functions."""

import ast
import inspect
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

import assay
from assay.commands.compile import Compile
from assay.commands.evaluate import Evaluate
from assay.errors import ConfigError
from assay.models import EMBEDDED
from assay.models.defaults import DEFAULT_MODEL, DEFAULT_WEIGHTS
from assay.optimizers.settings import CompileConfig
from assay.runs.groups import DEFAULT_SALT
from assay.support.names import nearest

NAMED = {"program": "p", "rubric": "r", "data": "d"}


def test_no_public_function_takes_untyped_options() -> None:
    for name in assay.__all__:
        function = getattr(assay, name)
        if inspect.isfunction(function) and name not in ("record", "recorded", "get_lm", "load_judge"):
            kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
            assert inspect.Parameter.VAR_KEYWORD not in kinds, name


@pytest.mark.parametrize("optimizer", ["copro", "gepa", "GEPA", "dspy:COPRO"])
def test_demos_are_refused_for_an_optimizer_that_adds_none(optimizer: str) -> None:
    assert CompileConfig(optimizer=optimizer).demos == 16
    with pytest.raises(ConfigError, match="demos: 9 would have no effect on optimizer"):
        CompileConfig(optimizer=optimizer, demos=9)
    assert CompileConfig(optimizer="mipro", demos=9).demos == 9


def test_the_key_of_a_job_depends_only_on_settings_that_affect_its_result() -> None:
    made = Compile(**NAMED)
    for same in (
        {"max_calls": 3},
        {"threads": 2},
        {"cache": False},
        {"task_timeout": 3.0},
        {"judge_api_key_env": "X"},
        {"salt": DEFAULT_SALT},
    ):
        assert Compile(**NAMED, **same).key == made.key, same  # type: ignore[arg-type]
    for other in ({"seed": 1}, {"demos": 3}, {"judge_model": "openai/m"}, {"salt": "b"}, {"prompt_format": "json"}):
        assert Compile(**NAMED, **other).key != made.key, other  # type: ignore[arg-type]
    assert Evaluate(**NAMED).key != Evaluate(**NAMED, split="gate").key


def test_a_typo_in_a_keyword_names_the_nearest_field() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword 'max_cals'\. Did you mean 'max_calls'\?"):
        assay.compile(**NAMED, max_cals=3)  # type: ignore[call-arg]
    made = Compile(**NAMED, max_calls=3)
    assert pickle.loads(pickle.dumps(made)) == made == replace(made, seed=0)


def test_the_nearest_valid_name_is_found() -> None:
    assert nearest("max_cals", ["max_calls", "model"]) == "max_calls"
    assert nearest("zzz", ["max_calls"]) is None


def test_choices_defined_twice_are_equal() -> None:
    from assay.commands.export import Export
    from assay.judges.quality.agreement import MEASURES
    from assay.optimizers.finetuning.settings import PolicySettings
    from assay.optimizers.settings import JudgeConfig
    from assay.support.options import options_of
    from assay.traces.credit import RETURNS as CREDIT_RETURNS
    from assay.traces.store import sealing

    choices = (set(options_of(kind)["returns"].choices) for kind in (Export, PolicySettings))
    assert [*choices] == [set(CREDIT_RETURNS)] * 2
    assert options_of(JudgeConfig)["objective"].choices == MEASURES
    assert sealing.DEFAULT_SALT == DEFAULT_SALT


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
    assert named == ["models/defaults.py"] * 2
    assert EMBEDDED[DEFAULT_MODEL.removeprefix("embedded/")].base_repo == DEFAULT_WEIGHTS
