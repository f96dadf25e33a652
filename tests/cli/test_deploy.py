"""`assay deploy simulate`."""

from pathlib import Path

import pytest

from assay.commands.deploy import simulate_plan
from assay.errors import ConfigError
from rigs.command_line import assay_command


def test_a_worse_candidate_is_rolled_back_and_the_shares_add_up() -> None:
    flags = ["--base", "0.7", "--effect", "-0.25", "--runs", "10", "--seed", "1", "--json"]
    report = assay_command("deploy", "simulate", *flags).report
    assert report["rolled_back"] == 1.0
    assert report["promoted"] + report["rolled_back"] + report["undecided"] == pytest.approx(1)
    assert report["step_requests"][0] == 100  # the replay
    assert len(report["step_requests"]) == 5
    assert {"requests_median", "candidate_requests_median", "runs"} < report.keys()


def test_a_custom_plan_is_simulated_and_its_goal_can_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("steps:\n- {weight: 50, decides: true, max_requests: 300}\nmetrics:\n- {success_gain: 0.0}\n")
    options = {"plan": str(path), "effect": 0.3, "runs": 10}
    assert simulate_plan(**options).promoted > 0.8  # type: ignore[arg-type]
    strict = simulate_plan(goal=0.9, **options)  # type: ignore[arg-type]
    assert (strict.promoted, strict.rules) == (0.0, {"inconclusive": 10})


def test_values_out_of_range_and_a_missing_plan_are_refused() -> None:
    for name, value in (("base", 1.2), ("runs", 0), ("users", 1), ("effect", -2.0), ("plan", "no.yaml")):
        with pytest.raises(ConfigError, match=r"no\.yaml" if name == "plan" else name):
            simulate_plan(**{name: value})  # type: ignore[arg-type]
