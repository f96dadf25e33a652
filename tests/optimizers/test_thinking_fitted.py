"""Fitting a thinking policy on val, and its place among the candidates of the search."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

import assay
from assay.evaluation.evaluation import Evaluation
from assay.optimizers.prompts.candidates import CandidateSpec, kernel
from assay.optimizers.prompts.thinking import FULL, fitted_policy, why_none
from assay.programs import Classify, ThinkingPolicy
from assay.rubrics import Criterion, Rubric, ScoreResult
from assay.rubrics.checks import exact
from assay.testing.fakes import scripted_lm


def evaluation(scores: list[float], tokens: float) -> Evaluation:
    made = Evaluation()
    for at, score in enumerate(scores):
        made.results[f"t{at}"] = ScoreResult(value=score, verdicts=(), coverage=1.0, feedback="")
        made.tokens[f"t{at}"] = tokens
    return made


def test_the_largest_saving_that_is_shown_to_keep_the_margin_is_chosen() -> None:
    plain = [1.0] * 60
    policy, rows = fitted_policy(
        {
            "thinks once": evaluation(plain, 100),
            "probe 0.3": evaluation([0.0] * 2 + plain[2:], 20),  # a mean loss of 0.033, within the margin
            "probe 0.6": evaluation(plain, 60),  # 3.0 / 60 = 0.05 at most
            "probe 0.9": evaluation(plain, 90),
        },
        margin=0.05,
    )
    assert policy == "probe 0.6"
    assert rows["probe 0.3"]["loss"] == pytest.approx(1 / 30)
    assert rows["probe 0.3"]["loss_high"] > 0.05
    assert rows["probe 0.6"] == {"n": 60, "loss": 0, "loss_high": pytest.approx(2.996 / 60, abs=1e-4), "saved": 0.4}


@pytest.mark.parametrize(("tasks", "policy"), [(299, "thinks once"), (300, "probe 0.6")])
def test_a_margin_of_one_point_takes_300_tasks_without_a_loss(tasks: int, policy: str) -> None:
    made = {"thinks once": evaluation([1.0] * tasks, 100), "probe 0.6": evaluation([1.0] * tasks, 60)}
    chosen, rows = fitted_policy(made, margin=0.01)
    assert chosen == policy
    assert tasks == 300 or "on 299 val tasks; about 300 are needed" in why_none(rows, baseline=FULL, margin=0.01)


def test_a_policy_that_gains_needs_no_tasks_of_the_rule_of_three() -> None:
    plain = [0.0, 1.0] * 40
    better = [1.0] * 20 + plain[20:]
    policy, rows = fitted_policy({"thinks once": evaluation(plain, 100), "probe 0.6": evaluation(better, 60)}, margin=0)
    assert policy == "probe 0.6"
    assert rows["probe 0.6"]["loss_high"] < 0


def test_the_note_says_how_many_tasks_are_needed_or_that_more_show_nothing() -> None:
    made = {
        "thinks once": evaluation([1.0] * 100, 100),
        "probe 0.3": evaluation([0.0] * 10 + [1.0] * 90, 20),
        "probe 0.6": evaluation([0.0] + [1.0] * 99, 60),
        "probe 0.9": evaluation([1.0] * 100, 110),
    }
    rows = fitted_policy(made, margin=0.02)[1]
    why = why_none(rows, baseline=FULL, margin=0.02)
    assert "Closest is 'probe 0.6': tokens -40 %, score -0.010, a loss of up to 0.0" in why
    # reach * sqrt(100) / sqrt(n) = 0.02 - 0.01
    reach = rows["probe 0.6"]["loss_high"] - 0.01
    assert f"about {math.ceil(100 * (reach / 0.01) ** 2)} are needed" in why
    assert "more tasks would not show it" in why_none(rows, baseline=FULL, margin=0.005)
    assert why_none({FULL: rows[FULL]}, baseline=FULL, margin=0.01) == "no other saves tokens"


def test_policies_that_save_nothing_or_were_never_scored_are_not_chosen() -> None:
    policy, rows = fitted_policy(
        {
            "thinks once": evaluation([1.0, 0.0], 100),
            "probe 0.3": evaluation([1.0, 0.0], 130),
            "probe 0.6": evaluation([math.nan, math.nan], 10),
        }
    )
    assert policy == "thinks once"
    assert math.isnan(rows["probe 0.6"]["loss"])


def test_specs_without_a_policy_have_the_same_kernel_as_before() -> None:
    specs = [CandidateSpec(count=2), CandidateSpec(selection="random", count=4)]
    plain = kernel(specs, {"temperature": 0.7})
    mixed = kernel([*specs, CandidateSpec(count=2, thinking="probe 0.6")], {"temperature": 0.7})
    assert mixed[:2, :2] - plain == pytest.approx(0.04**2)
    assert CandidateSpec(thinking="probe 0.6").name.endswith("probe 0.6")


class Sentiment(Classify):
    """A classifier that thinks."""

    def __init__(self, labels: Sequence[str] = ("sad", "happy")) -> None:
        super().__init__(labels, thinking=64)


def script(request: Any) -> str:
    thought = '"thought": "it is, well, not so clear what this means", ' if "'thought'" in str(request.config) else ""
    return f'{{{thought}"label": "{"happy" if "yay" in str(request.messages[-1]) else "sad"}"}}'


def test_compile_fits_a_policy_on_val_and_stores_it_in_the_artifact(tmp_path: Any) -> None:
    rows = [{"text": f"{'yay' if at % 2 else 'oh'} {at}", "label": "happy" if at % 2 else "sad"} for at in range(30)]
    lm = scripted_lm(script)
    report = assay.compile(
        Sentiment,
        rubric=Rubric(name="r", criteria=[Criterion(name="right", check=exact)]),
        data=rows,
        lm=lm,
        out=tmp_path / "a",
        store=tmp_path / "s.db",
        max_search_calls=20,
        preflight=False,
        thinking_margin=0.05,
    )
    note = next(note for note in report.outcome.notes if "thinking policy" in note)
    # without probabilities, every other policy needs more calls
    assert note == "thinking policy stays 'thinks once': no other saves tokens"
    assert assay.load(report.unproven).policy == ThinkingPolicy()
    assert [row["name"] for row in report.outcome.candidates][-1].endswith("thinks once")
