"""A setting that a command has no use for is refused, not ignored."""

from collections.abc import Callable
from typing import Any

import pytest

import assay
from assay.commands.judge_audit import audit_judge
from assay.commands.judge_drift import replay_anchors
from assay.commands.judge_fidelity import audit_user
from assay.commands.judge_score import score_rows


@pytest.mark.parametrize(
    "function", [assay.evaluate, assay.collect, assay.compare, assay.parameter_impact, assay.train]
)
def test_a_setting_that_a_command_does_not_use_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"unexpected keywords?:? '?demos"):
        function("math_qa", rubric="math_qa", data="arithmetic:size=60", demos=77)


@pytest.mark.parametrize(
    ("function", "unused"),
    [
        (audit_user, ("rename", "salt", "sizes", "threads", "preflight")),
        (audit_judge, ("rename", "salt", "sizes", "preflight")),
        (replay_anchors, ("rename", "salt", "sizes", "cache")),
        (score_rows, ("salt", "sizes")),
    ],
)
def test_a_command_of_judges_refuses_settings_that_it_does_not_read(
    function: Callable[..., Any], unused: tuple[str, ...]
) -> None:
    for name in unused:
        with pytest.raises(TypeError, match=f"unexpected keyword '{name}'"):
            function("rules", **{name: None})


def test_a_typo_in_the_audit_of_a_user_names_the_nearest_setting() -> None:
    with pytest.raises(TypeError, match="Did you mean 'fail_over'"):
        audit_user("rules", data="conversations:?size=2", fail_ovr=0.1)  # type: ignore[call-arg]
