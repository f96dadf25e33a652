"""Settings: each field is declared once; values are validated; Python functions accept exactly these keywords."""

import ast
import inspect
import math
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
from assay.api.agent import run_agent
from assay.api.deploy.status import advance_deployment
from assay.api.judge.audit import audit_judge
from assay.api.judge.drift import replay_anchors
from assay.api.judge.fidelity import audit_user
from assay.api.judge.label import to_label
from assay.api.judge.score import score_rows
from assay.api.loop.install import schedule_files
from assay.api.model_comparison import compare as compare_models
from assay.api.registry import register, set_agent_alias
from assay.api.rollouts import (
    close_rollouts,
    export_rollouts,
    import_rollouts,
    list_rollouts,
    rate_rollout,
    rollouts_to_rate,
)
from assay.api.run import run
from assay.api.serve import serve
from assay.api.traces import forget_subject, score_rollouts
from assay.api.train import train_offline
from assay.errors import ConfigError
from assay.models import EMBEDDED
from assay.models.defaults import DEFAULT_MODEL, DEFAULT_WEIGHTS
from assay.optimizers.finetuning.settings import PolicySettings, SFTSettings
from assay.optimizers.prompts.config import CompileConfig
from assay.runs import settings
from assay.runs.settings import options, store_options
from assay.runs.settings.loop import LoopSettings
from assay.runs.settings.shared import DEFAULT_SALT
from assay.support.settings import Declared, DeclaredFields, Settings, nearest, setting, settings_of

NO_STORE: Any = None  # the arguments are checked first
NAMED = {"program": "p", "rubric": "r", "data": "d"}
PUBLIC: list[tuple[Callable[..., Any], type[Any], type[Any]]] = [
    (assay.compile, settings.CompileSettings, options.CompileOptions),
    (assay.evaluate, settings.EvaluateSettings, options.EvaluateOptions),
    (assay.compare, settings.CompareSettings, options.CompareOptions),
    (assay.collect, settings.CollectSettings, options.CollectOptions),
    (assay.improve, settings.ImproveSettings, options.ImproveOptions),
    (assay.tune, settings.TuneSettings, options.TuneOptions),
    (assay.parameter_impact, settings.ImpactSettings, options.ImpactOptions),
    (assay.train, settings.TrainSettings, options.TrainOptions),
    (train_offline, PolicySettings, options.OfflineOptions),
    (assay.train_sft, SFTSettings, options.SFTOptions),
    (compare_models, settings.EvaluateSettings, options.ComparisonOptions),
    (assay.export, settings.ExportSettings, store_options.ExportOptions),
    (assay.compile_judge, settings.JudgeCompileSettings, options.JudgeCompileOptions),
    (audit_judge, settings.JudgeAuditSettings, options.JudgeAuditOptions),
    (score_rows, settings.JudgeScoreSettings, options.JudgeScoreOptions),
    (replay_anchors, settings.JudgeDriftSettings, options.JudgeDriftOptions),
    (audit_user, settings.FidelitySettings, options.FidelityOptions),
    (run, settings.RunSettings, options.RunOptions),
    (score_rollouts, settings.TracesScoreSettings, store_options.TracesScoreOptions),
    (export_rollouts, settings.TracesExportSettings, store_options.TracesExportOptions),
    (list_rollouts, settings.TracesListSettings, store_options.TracesListOptions),
    (advance_deployment, settings.AdvanceSettings, store_options.StoredJudgeOptions),
    (assay.deployed, settings.StoredJudgeSettings, store_options.StoredJudgeOptions),
    (serve, settings.ServeSettings, store_options.ServeOptions),
]
EXPLICIT: list[tuple[Callable[..., Any], type[Any]]] = [  # keywords are written in the signature
    (rollouts_to_rate, settings.TracesRateSettings),
    (close_rollouts, settings.TracesCloseSettings),
    (import_rollouts, settings.TracesImportSettings),
    (forget_subject, settings.TracesForgetSettings),
    (to_label, settings.JudgeLabelSettings),
    (register, settings.RegisterSettings),
    (schedule_files, settings.LoopInstallSettings),
    (run_agent, settings.AgentRunSettings),
]
WITHOUT_SETTINGS = {assay.train: {"cache"}, compare_models: {"model", "split"}}


@pytest.mark.parametrize(
    ("function", "kind", "keywords"), PUBLIC, ids=[f"{f.__module__}.{f.__name__}" for f, _, _ in PUBLIC]
)
def test_keywords_types_and_defaults_are_those_of_the_settings(
    function: Callable[..., Any], kind: type[Any], keywords: type[Any]
) -> None:
    parameters = inspect.signature(function).parameters
    own_parameters = inspect.signature(inspect.unwrap(function)).parameters
    declared = {
        name: field
        for name, field in settings_of(kind).items()
        if not field.declared.named and name not in WITHOUT_SETTINGS.get(function, ())
    }
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    assert "trust" in parameters or function in (train_offline, list_rollouts, export_rollouts, serve)
    for name, field in declared.items():
        assert name in parameters, name
        if name not in own_parameters:
            assert (parameters[name].default, parameters[name].annotation) == (field.default, field.type), name
    typed = {name: result for name, result in typing.get_type_hints(keywords).items() if name != "trust"}
    assert typed == {name: setting.type for name, setting in declared.items() if name not in own_parameters}


@pytest.mark.parametrize(("function", "kind"), EXPLICIT, ids=[kind.__name__ for _, kind in EXPLICIT])
def test_keywords_in_a_signature_are_those_of_the_settings(function: Callable[..., Any], kind: type[Any]) -> None:
    parameters = inspect.signature(function).parameters
    for name, field in settings_of(kind).items():
        if not field.declared.named and name != "rationale":  # a question of the command line
            assert (parameters[name].default, parameters[name].annotation) == (field.default, field.type), name


def test_keywords_of_a_declaration_are_its_attributes() -> None:
    assert typing.get_type_hints(DeclaredFields) | {"help": str} == typing.get_type_hints(Declared)


def test_no_public_function_takes_untyped_options() -> None:
    for name in assay.__all__:
        function = getattr(assay, name)
        if inspect.isfunction(function) and name not in ("record", "recorded", "get_lm", "load_judge"):
            kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
            assert inspect.Parameter.VAR_KEYWORD not in kinds, name


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_calls": "5"}, "max_calls='5' must be an integer or None"),
        ({"max_calls": 5.5}, "max_calls=5.5 must be an integer or None"),
        ({"max_calls": True}, "max_calls=True must be an integer or None"),
        ({"max_calls": -1}, "max_calls=-1 must be at least 0"),
        ({"max_cost_usd": float("nan")}, "max_cost_usd=nan must be a finite number at least 0"),
        ({"threshold": float("inf")}, "threshold=inf must be a finite number above 0 and at most 1"),
        ({"difference": 0}, "difference=0 must be above 0 and at most 1: the smallest gain"),
        ({"demos": 77}, "demos=77 must be between 1 and 64"),
        ({"cache": "no"}, "cache='no' must be True or False"),
        ({"cache": 1}, "cache=1 must be True or False"),
        ({"model": 3}, "model=3 must be a string"),
        ({"rename": {"a": 1}}, "rename={'a': 1} must be a mapping of strings to strings"),
        ({"rename": "a=b"}, "rename='a=b' must be a mapping of strings to strings"),
        ({"sizes": {"val": 0}}, "must be integers >= 1"),
        ({"sizes": {"vall": 3}}, "sizes names"),
        ({"prompt_format": "yaml"}, "prompt_format='yaml' must be one of json, lean, xml, chat"),
        ({"prompt_format": "JSN"}, "lean, xml, chat. Did you mean 'json'?"),
        ({"executor": "rey"}, "executor='rey' must be one of threads, ray. Did you mean 'ray'?"),
        ({"executor": "dask"}, "executor='dask' must be one of threads, ray"),
        ({"parameters": [("a", 1)]}, "must be a mapping of strings to values"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_field_value_and_rule(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings.CompileSettings(**NAMED, **values)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ranges": {"max_steps": [1, "x"]}}, "must be a mapping of strings to pairs of numbers"),
        ({"also": "folder"}, "also='folder' must be a list or tuple of strings"),
        (
            {"workers": 2, "method": "policy"},
            "workers=2 needs method='optuna': method='policy' supports only workers=1",
        ),
        ({"budget": {"step": 3.0}}, "Did you mean 'steps'?"),
        ({"pruner": "none", "prune_at": 0.3}, "prune_at would have no effect with pruner='none'"),
    ],
)
def test_settings_of_tune_are_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings.TuneSettings(**NAMED, **values)
    assert message in str(refused.value)


def test_a_wrong_value_is_refused_by_the_python_function() -> None:
    with pytest.raises(ConfigError, match="max_calls='5' must be an integer or None"):
        assay.evaluate("math_qa", rubric="math_qa", data="arithmetic:size=60", max_calls="5")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["resume", "gate", "test", "trust"])
def test_a_text_in_place_of_a_switch_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='no' must be True or False"):
        assay.compile("math_qa", rubric="math_qa", data="arithmetic:size=60", **{name: "no"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: assay.evaluate("math_qa", rubric="math_qa", data="x", store=5), "store=5 must be a string or a Path"),  # type: ignore[arg-type]
        (lambda: run(5, {}), "program=5 must be a string or a Path"),  # type: ignore[arg-type]
        (lambda: assay.load(5), "path=5 must be a string or a Path"),  # type: ignore[arg-type]
        (lambda: assay.load_judge(5), "source=5 must be a string or Path"),  # type: ignore[arg-type]
        (lambda: assay.load_tasks(5), "spec=5 must be a string"),  # type: ignore[arg-type]
        (lambda: assay.get_lm(5), "name=5 must be a string"),  # type: ignore[arg-type]
        (lambda: score_rollouts("math_qa", runs="r1"), "runs='r1' must be a list or tuple of strings"),  # type: ignore[arg-type]
        (lambda: score_rollouts("math_qa", threads=0), "threads=0 must be at least 1"),
        (lambda: score_rollouts("math_qa", task_timeout=math.nan), "task_timeout=nan must be a finite number above 0"),
        (lambda: score_rollouts("math_qa", judge_model=" "), "judge_model=' ' must not be empty"),
        (lambda: score_rollouts("math_qa", judge_api_base="http://x"), "would have no effect without judge_model"),
        (lambda: score_rollouts("math_qa", judge_api_base=5), "judge_api_base=5 must be a string"),  # type: ignore[arg-type]
        (lambda: list_rollouts(NO_STORE, limit=-1), "limit=-1 must be at least 1"),
        (lambda: list_rollouts(NO_STORE, failure="toool"), "failure='toool' must be one of parse, context"),
        (lambda: list_rollouts(NO_STORE, min_score=math.nan), "min_score=nan must be a finite number between 0 and 1"),
        (lambda: list_rollouts(NO_STORE, min_score=0.8, max_score=0.2), "min_score=0.8 is above max_score=0.2"),
        (lambda: rollouts_to_rate(NO_STORE, limit="5"), "limit='5' must be an integer"),  # type: ignore[arg-type]
        (lambda: rate_rollout(NO_STORE, "id", math.inf), "rating=inf must be a finite number"),
        (lambda: close_rollouts(NO_STORE, idle_minutes=-1), "idle_minutes=-1 must be at least 0"),
        (lambda: import_rollouts(NO_STORE, "otlp", "f", score=""), "score='' must not be empty"),
        (lambda: to_label("Is it right?", NO_STORE, seed=-1), "seed=-1 must be between 0 and 4294967295"),
        (lambda: to_label("Is it right?", NO_STORE, scale="no,yes"), "scale='no,yes' must be a list or tuple"),
        (lambda: register("a", "folder", parent=3), "parent=3 must be a string"),  # type: ignore[arg-type]
        (lambda: set_agent_alias("a@1", "x", reason=3), "reason=3 must be a string"),  # type: ignore[arg-type]
        (lambda: schedule_files("a", kind="launchd"), "kind='launchd' must be one of systemd, cron"),
        (lambda: schedule_files("a", kind="cron", every_minutes=7), "every_minutes=7 must be a divisor of 60"),
        (lambda: LoopSettings(rubric="r", min_new_tasks=5, pool={"max_tasks": 4}), "min_new_tasks=5 must be at most"),
        (lambda: run_agent("m:f", server="", key="k"), "server='' must not be empty"),
        (lambda: run_agent("m:f", server="http://x", key="k", patience_s=math.inf), "patience_s=inf must be a finite"),
        (lambda: forget_subject(7), "subject=7 must be a string"),  # type: ignore[arg-type]
        (lambda: assay.Store(5), "where=5 must be a database's file or URL"),  # type: ignore[arg-type]
        (lambda: assay.project_settings("compil"), "did you mean 'compile'"),
    ],
)
def test_a_wrong_type_is_an_error_that_names_the_argument(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(assay.AssayError, match=message):
        call()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("sft", {"advantage": "batch"}, "advantage would have no effect on kind='sft', only on transitions"),
        ("grpo", {"min_quality": 0.5}, "min_quality would have no effect on kind='grpo', only on sft"),
        ("sft", {"rubric": "math_qa"}, "rubric='math_qa' would have no effect on kind='sft'"),
        ("sft", {"privacy": "off", "privacy_key": "k"}, "privacy_key='k' would have no effect with privacy='off'"),
        ("sft", {"balance_temperature": 0.3}, "balance_temperature would have no effect with balance='none'"),
        ("sft", {"balance": "down", "most_copies": 2}, "most_copies would have no effect with balance='down'"),
    ],
)
def test_an_export_refuses_settings_that_it_has_no_use_for(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assay.export(kind, "new", **options)


@pytest.mark.parametrize("optimizer", ["copro", "gepa", "GEPA", "dspy:COPRO"])
def test_demos_are_refused_for_an_optimizer_that_adds_none(optimizer: str) -> None:
    assert CompileConfig(optimizer=optimizer).demos == 16
    with pytest.raises(ConfigError, match="demos=9 would have no effect on optimizer="):
        CompileConfig(optimizer=optimizer, demos=9)
    assert CompileConfig(optimizer="mipro", demos=9).demos == 9


@pytest.mark.parametrize(
    ("function", "typo", "right"),
    [
        (assay.compile, "max_call", "max_calls"),
        (assay.tune, "trial", "trials"),
        (assay.train, "num_generation", "num_generations"),
        (assay.export, "min_qualtiy", "min_quality"),
        (assay.compile_judge, "negative", "negatives"),
        (audit_judge, "pass_al", "pass_at"),
        (run, "task_timeot", "task_timeout"),
        (score_rollouts, "agian", "again"),
        (list_rollouts, "min_scor", "min_score"),
        (close_rollouts, "idle_minute", "idle_minutes"),
        (register, "parnet", "parent"),
        (schedule_files, "every_minute", "every_minutes"),
        (set_agent_alias, "reasons", "reason"),
    ],
)
def test_a_typo_names_the_nearest_field(function: Callable[..., Any], typo: str, right: str) -> None:
    with pytest.raises(TypeError, match=f"Did you mean '{right}' instead of '{typo}'"):
        function("x", **{typo: 1})


def test_the_key_of_a_job_depends_only_on_settings_that_affect_its_result() -> None:
    made = settings.CompileSettings(**NAMED)
    for same in (
        {"max_calls": 3},
        {"threads": 2},
        {"cache": False},
        {"task_timeout": 3.0},
        {"judge_api_key_env": "X"},
        {"salt": DEFAULT_SALT},
    ):
        assert settings.CompileSettings(**NAMED, **same).key == made.key, same  # type: ignore[arg-type]
    for other in ({"seed": 1}, {"demos": 3}, {"judge_model": "openai/m"}, {"salt": "b"}, {"prompt_format": "json"}):
        assert settings.CompileSettings(**NAMED, **other).key != made.key, other  # type: ignore[arg-type]
    assert settings.EvaluateSettings(**NAMED).key != settings.EvaluateSettings(**NAMED, split="gate").key


def test_a_field_without_setting_is_internal() -> None:
    assert "kind" not in settings_of(settings.CompileSettings)
    assert "worker" not in settings_of(settings.TuneSettings)


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
    with pytest.raises(TypeError, match=r"CompileSettings has no field 'max_cals'\. Did you mean 'max_calls'\?"):
        settings.CompileSettings(**NAMED, max_cals=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Example has no field 'zzz'\. It has count, turns, file\."):
        Example(zzz=3)  # type: ignore[call-arg]
    made = settings.CompileSettings(**NAMED, max_calls=3)
    assert pickle.loads(pickle.dumps(made)) == made == replace(made, seed=0)


def test_a_value_is_parsed_once() -> None:
    parsed = []

    @dataclass(frozen=True, kw_only=True)
    class Parsed(Settings):
        text: str = setting("", "A text.", parse=lambda value: parsed.append(value) or value.upper())

    assert (Parsed(text="a").text, parsed) == ("A", ["a"])


def test_settings_are_checked_before_two_equal_programs_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_calls='5' must be an integer"):
        assay.compare("math_qa", "math_qa", rubric="math_qa", data="arithmetic:size=9", max_calls="5")  # type: ignore[arg-type]


def test_the_nearest_valid_name_is_found() -> None:
    assert nearest("max_cals", ["max_calls", "model"]) == "max_calls"
    assert nearest("zzz", ["max_calls"]) is None


def test_choices_defined_twice_are_equal() -> None:
    from assay.judges.quality.agreement import MEASURES
    from assay.optimizers.finetuning.settings import RETURNS
    from assay.runs.settings.judge import MEASURES as SETTINGS_MEASURES
    from assay.traces.credit import RETURNS as CREDIT_RETURNS
    from assay.traces.store import sealing

    assert set(RETURNS) == set(CREDIT_RETURNS) == set(settings_of(settings.ExportSettings)["returns"].declared.choices)
    assert SETTINGS_MEASURES == MEASURES
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
