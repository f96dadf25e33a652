"""A misspelt argument is refused with the nearest one, and a value of a wrong type with the argument's name."""

import re
from collections.abc import Callable
from typing import Any

import pytest

import assay
from assay.errors import AssayError, ConfigError, DataError, RubricError
from assay.optimizers import RLTrainer
from assay.rubrics import checks
from assay.runs.settings.shared import ProgramSettings
from assay.support.settings import settings_of
from assay.traces.gateway.rollout_fields import checked_fields

LOCAL = {"api_base": "http://127.0.0.1:9/v1", "api_key": "k"}


@pytest.mark.parametrize(
    ("call", "near"),
    [
        (lambda: assay.load("folder", trut=True), "trust"),  # type: ignore[call-arg]
        (lambda: assay.load_rubric("math_qa", judge_m=None), "judge_model"),  # type: ignore[call-arg]
        (lambda: assay.load_tasks("arithmetic:size=9", limt=3), "limit"),  # type: ignore[call-arg]
        (lambda: assay.load_verifier("Is it good?", trst=True), "trust"),  # type: ignore[call-arg]
        (lambda: assay.project_settings("compile", foldr="."), "folder"),  # type: ignore[call-arg]
        (lambda: assay.load_judge("Is it good?", own_modl=True), "own_model"),  # type: ignore[call-arg]
        (lambda: assay.load_judge("Is it good?", scal=("no", "yes")), "scale"),  # type: ignore[call-arg]
        (lambda: assay.evaluate("math_qa", rubric="math_qa", data="arithmetic:size=9", trut=True), "trust"),  # type: ignore[call-arg]
        (lambda: assay.record("x", rubrc="math_qa").__enter__(), "rubric"),  # type: ignore[call-arg]
        (lambda: assay.record("x", stoer="s.db").__enter__(), "store"),  # type: ignore[call-arg]
        (lambda: assay.get_lm("openai/m", temperatue=0.1, **LOCAL), "temperature"),
        (lambda: assay.get_lm("openai/m", api_bse="http://127.0.0.1:9/v1"), "api_base"),
        (lambda: assay.Rubric("r", critera=[]), "criteria"),  # type: ignore[call-arg]
        (lambda: RLTrainer(None, None, [1, 2], sed=1), "seed"),  # type: ignore[call-arg,arg-type]
        (lambda: checked_fields({"task_tpye": "sums"}), "task_type"),
    ],
)
def test_a_misspelt_argument_is_refused_with_the_nearest(call: Callable[[], Any], near: str) -> None:
    with pytest.raises((TypeError, AssayError)) as refused:
        call()
    assert f"Did you mean {near!r}" in str(refused.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: assay.load_tasks("arithmetic:size=9", limit="3"), "limit='3' must be an integer or None"),  # type: ignore[arg-type]
        (lambda: assay.load_tasks("arithmetic:size=9", inputs="question"), "inputs='question' must be a list"),
        (lambda: assay.load_tasks("arithmetic:size=9", rename="a=b"), "rename='a=b' must be a mapping"),  # type: ignore[arg-type]
        (lambda: assay.load_rubric("math_qa", trust="no"), "trust='no' must be True or False"),  # type: ignore[arg-type]
        (lambda: assay.load_rubric("math_qa", judge_model=5), "judge_model=5 must be"),  # type: ignore[arg-type]
        (lambda: assay.load_judge("Is it good?", own_model=1), "own_model=1 must be True or False"),  # type: ignore[arg-type]
        (
            lambda: assay.export("sft", "out", gates={"privacy": "off"}),
            "gates={'privacy': 'off'} must be Gates or None",
        ),  # type: ignore[arg-type]
        (lambda: assay.compile_judge(5, labels=[]), "judge=5 must be"),  # type: ignore[arg-type]
        (lambda: assay.compile_judge("Is it good?", labels=5), "labels is a int"),
        (lambda: assay.compile_judge("Is it good?", labels=[]), "labels is empty"),
        (lambda: assay.train(5, rubric="math_qa", data="arithmetic:size=9", name="n"), "program=5 must be a name"),  # type: ignore[arg-type]
        (lambda: assay.train_sft("folder", name="n", evaluation=5), "evaluation=5 must be a mapping"),  # type: ignore[arg-type]
        (lambda: assay.record("x", rubric=5).__enter__(), "rubric=5 must be a Rubric"),  # type: ignore[arg-type]
        (lambda: assay.record("x", store=5).__enter__(), "store=5 must be a database's file or URL"),  # type: ignore[arg-type]
        (lambda: assay.record("x", metadata=5).__enter__(), "metadata=5 must be a mapping"),  # type: ignore[arg-type]
        (
            lambda: assay.get_lm("embedded/smollm2-135m", api_base="http://h"),
            "api_base would have no effect",
        ),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_with_its_argument(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ConfigError, RubricError, AssayError)) as refused:
        call()
    assert message in str(refused.value)


def test_arguments_without_names_are_refused_with_the_names() -> None:
    with pytest.raises(TypeError, match=r"evaluate\(\) takes only program without a name, .*: rubric=…, data=…"):
        assay.evaluate("math_qa", "math_qa", "arithmetic:size=9")  # type: ignore[misc]


def test_a_row_without_expected_fields_is_unscored_with_the_way_out() -> None:
    rubric = assay.Rubric("r", [assay.Criterion(name="right", check=checks.exact)])
    reason = rubric.score({"ticket": "x"}, {"queue": "bug"}).verdicts[0].reason
    assert reason.endswith("has no expected 'answer'; it has none. Give the row as {'inputs': {…}, 'expected': {…}}")


def test_keywords_of_a_provider_reach_it() -> None:
    """vLLM's `min_tokens` is no misspelt `max_tokens`."""
    assert assay.get_lm("openai/m", min_tokens=3, **LOCAL).model == "openai/m"


def test_the_help_of_data_names_every_spec() -> None:
    with pytest.raises(DataError) as refused:
        assay.load_tasks("unknown")
    specs = re.findall(r"\w+:…", str(refused.value))
    help = settings_of(ProgramSettings)["data"].declared.help
    assert specs[:2] == ["hf:…", "reasoning_gym:…"]
    assert [spec for spec in specs if spec not in help] == []
