"""Options: what one field with its docstring gives to the Python function and to the checks."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pytest

from assay.errors import ConfigError
from assay.support.options import Count, Flag, OneOf, Pair, Parse, Positive, Settings, Share, function_of


class Caps(Settings):
    """Caps."""

    max_calls: Count | None = None
    """Maximum number of LM calls."""
    least: Share = 0.0
    most: Share = 1.0

    def check(self) -> None:
        if self.least > self.most:
            raise ConfigError("is above `most`", field="least", hint="Lower it")


def upper(text: str) -> str:
    if not text.isascii():
        raise ValueError("must be ASCII")
    return text.upper()


class Run(Caps):
    """Runs FOLDER."""

    folder: str | Path = field(kw_only=False)
    """Folder; it is read
    once, within `max_calls`."""
    n: Positive = 3
    kind: Literal["quick", "slow"] = "quick"
    colour: Annotated[str, OneOf(("red", "green"))] = "red"
    names: Annotated[Sequence[str], Flag(name="--name")] = ()
    budget: int | str | None = None
    ranges: Mapping[str, Pair] = field(default_factory=dict)
    title: Annotated[str | None, Parse(upper)] = None

    def run(self) -> "Run":
        return self


run = function_of(Run, "run")


@pytest.mark.parametrize(
    ("name", "value", "stored"),
    [
        ("n", np.int64(5), 5),
        ("least", np.float32(0.5), 0.5),
        ("least", 1, 1.0),
        ("budget", "low", "low"),
        ("budget", 5, 5),
        ("folder", Path("p"), Path("p")),
        ("names", ["a"], ["a"]),
        ("ranges", {"a": [1, 2]}, {"a": (1.0, 2.0)}),
        ("title", "a", "A"),
        ("max_calls", None, None),
    ],
)
def test_a_value_is_stored_as_a_plain_value_of_its_type(name: str, value: object, stored: object) -> None:
    found = getattr(run(**{"folder": "f", name: value}), name)  # type: ignore[arg-type]
    assert found == stored
    assert isinstance(found, type(stored))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("n", value) for value in (0, "5", True, 5.0, None, np.float32(5))),
        *(("least", value) for value in (1.1, -0.1, float("nan"), "0.5", False)),
        *(("kind", value) for value in ("fast", 1)),
        ("colour", "blue"),
        *(("names", value) for value in ("a", [1], [""], {"a": 1})),
        *(("budget", value) for value in (True, 1.5)),
        *(("ranges", value) for value in ({"a": 1}, {"a": [1]}, {1: [1, 2]})),
        ("title", "ä"),
        ("title", 5),
        *(("folder", value) for value in ("", " ", 5)),
    ],
)
def test_a_value_of_another_type_or_out_of_bounds_is_refused_by_its_field(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as raised:
        run(**{"folder": "f", name: value})  # type: ignore[arg-type]
    assert raised.value.field == name


def test_rules_between_settings_of_a_group_hold_in_its_commands() -> None:
    with pytest.raises(ConfigError) as raised:
        run("f", least=0.5, most=0.4)
    assert raised.value.text() == "least: is above most. Lower it"
    assert raised.value.text(lambda name: f"--{name}") == "--least: is above --most. Lower it"
