"""Settings: each field is declared once; values are validated; Python functions accept exactly these keywords."""

import ast
import inspect
import pickle
import subprocess
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.commands.compile import Compile
from assay.commands.evaluate import Evaluate
from assay.errors import ConfigError
from assay.models import EMBEDDED
from assay.models.defaults import DEFAULT_MODEL, DEFAULT_WEIGHTS
from assay.optimizers.prompts.config import CompileConfig
from assay.runs import settings
from assay.runs.settings import options
from assay.runs.settings.shared import DEFAULT_SALT
from assay.support.settings import Declared, DeclaredFields, Settings, nearest, setting, settings_of

NAMED = {"program": "p", "rubric": "r", "data": "d"}
PUBLIC: list[tuple[Callable[..., Any], type[Any], type[Any]]] = [
    (assay.improve, settings.ImproveSettings, options.ImproveOptions),
]


@pytest.mark.parametrize(
    ("function", "kind", "keywords"), PUBLIC, ids=[f"{f.__module__}.{f.__name__}" for f, _, _ in PUBLIC]
)
def test_keywords_types_and_defaults_are_those_of_the_settings(
    function: Callable[..., Any], kind: type[Any], keywords: type[Any]
) -> None:
    parameters = inspect.signature(function).parameters
    own_parameters = inspect.signature(inspect.unwrap(function)).parameters
    declared = {name: field for name, field in settings_of(kind).items() if not field.declared.named}
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    assert "trust" in parameters
    for name, field in declared.items():
        assert name in parameters, name
        if name not in own_parameters:
            assert (parameters[name].default, parameters[name].annotation) == (field.default, field.type), name
    typed = {name: result for name, result in typing.get_type_hints(keywords).items() if name != "trust"}
    assert typed == {name: setting.type for name, setting in declared.items() if name not in own_parameters}


def test_keywords_of_a_declaration_are_its_attributes() -> None:
    assert typing.get_type_hints(DeclaredFields) | {"help": str} == typing.get_type_hints(Declared)


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


def test_a_field_without_setting_is_internal() -> None:
    assert "kind" not in settings_of(settings.ImproveSettings)


def test_every_setting_has_a_help_text_and_a_default() -> None:
    for name in settings.__all__:
        kind = getattr(settings, name)
        if isinstance(kind, type) and issubclass(kind, Settings):
            for setting in settings_of(kind).values():
                assert setting.declared.named or (
                    setting.declared.help.endswith((".", ")", "…")) and not setting.required
                ), f"{name}.{setting.name}"


@dataclass(frozen=True, kw_only=True)
class Example(Settings):
    count: int = setting(1, "A count.", ge=1, lt=5)
    turns: Sequence[Mapping[str, Any]] = setting((), "Turns.")
    file: Path | None = setting(None, "A file.")


def test_types_and_bounds_of_any_settings_class() -> None:
    assert Example(count=4, turns=[{"a": 1}], file=Path("x")).count == 4
    for values, message in (
        ({"count": 5}, "count=5 must be at least 1 and below 5"),
        ({"turns": ["a"]}, "must be a list or tuple of mappings"),
        ({"file": "x"}, "file='x' must be a Path or None"),
    ):
        with pytest.raises(ConfigError, match=message):
            Example(**values)  # type: ignore[arg-type]


def test_a_typo_in_a_settings_class_names_the_nearest_field() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword 'max_cals'\. Did you mean 'max_calls'\?"):
        assay.compile(**NAMED, max_cals=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Example has no field 'zzz'\. It has count, turns, file\."):
        Example(zzz=3)  # type: ignore[call-arg]
    made = Compile(**NAMED, max_calls=3)
    assert pickle.loads(pickle.dumps(made)) == made == replace(made, seed=0)


def test_a_value_is_parsed_once() -> None:
    parsed = []

    @dataclass(frozen=True, kw_only=True)
    class Parsed(Settings):
        text: str = setting("", "A text.", parse=lambda value: parsed.append(value) or value.upper())

    assert (Parsed(text="a").text, parsed) == ("A", ["a"])


def test_the_nearest_valid_name_is_found() -> None:
    assert nearest("max_cals", ["max_calls", "model"]) == "max_calls"
    assert nearest("zzz", ["max_calls"]) is None


def test_choices_defined_twice_are_equal() -> None:
    from assay.commands.export import Export
    from assay.judges.quality.agreement import MEASURES
    from assay.optimizers.finetuning.settings import PolicySettings
    from assay.optimizers.judges.config import JudgeConfig
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


def test_importing_the_settings_is_light() -> None:
    code = "import assay.runs.settings, sys; print(' '.join(m for m in sys.modules if '.' not in m))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"dspy", "torch", "litellm", "sqlalchemy", "numpy", "optuna", "pydantic", "rich"} & set(loaded) == set()
