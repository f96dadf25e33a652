"""Presets: files of settings that an optimizer, a method or an algorithm names."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from assay.commands.compile import Compile
from assay.commands.tune import Tune
from assay.errors import ConfigError
from assay.jobs.rl_settings import RLSettings
from assay.support.package import CONTENT

JOB: dict[str, Any] = {"program": "p", "rubric": "r", "data": "d"}
SHIPPED = sorted(path.stem for path in (CONTENT / "optimizers").glob("*.toml"))
TRAINING: Any = partial(RLSettings, name="a")
SETTINGS = {"tune": (Tune, "method"), "grpo": (TRAINING, "algorithm")}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_copy_of_a_shipped_preset_does_the_same(name: str, tmp_path: Path) -> None:
    kind, field = SETTINGS.get(name, (Compile, "optimizer"))
    copy = tmp_path / "mine.toml"
    copy.write_text((CONTENT / "optimizers" / f"{name}.toml").read_text())
    assert kind(**JOB, **{field: str(copy)}) == kind(**JOB, **{field: name})


def test_the_presets_of_defaults_say_what_the_defaults_are() -> None:
    assert Tune(**JOB, method="tune") == Tune(**JOB)
    assert TRAINING(**JOB, algorithm="rloo") == replace(TRAINING(**JOB), algorithm="rloo")


def test_a_light_search_makes_fewer_calls_than_the_default() -> None:
    light, auto = Compile(**JOB, optimizer="light"), Compile(**JOB)
    assert (light.optimizer, light.max_search_calls, auto.max_search_calls) == ("auto", 120, 300)


def test_a_setting_that_is_given_overrides_the_preset(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'optimizer = "mipro"\ndemos = 8\nthreshold = 0.5\n[optimizer_settings]\nnum_candidates = 4\nminibatch = false'
    )
    settings = Compile(**JOB, optimizer=tmp_path / "mine.toml", demos=2, optimizer_settings={"num_candidates": 9})
    assert (settings.optimizer, settings.demos, settings.threshold) == ("mipro", 2, 0.5)
    assert settings.optimizer_settings == {"num_candidates": 9, "minibatch": False}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('optimizer = "gepa"\ndemo = 8', "'demos'"),
        ('optimizer = "gepa"\ndemos = 0', "demos: must be"),
        ('optimizer = "gepa"\napi_base = "http://elsewhere"', "'api_base'"),
        ("demos = 8", "optimizer"),
        ("optimizer = ", "cannot be read"),
    ],
)
def test_a_preset_with_a_mistake_is_refused_with_its_file(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        Compile(**JOB, optimizer=str(tmp_path / "mine.toml"))
    assert "mine.toml" in str(refused.value)
    assert named in str(refused.value)
