"""Thinking and halting fitted on val or searched: what is tried, what is chosen, what the artifact has."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import pytest
from own_prompt_programs import Sentiment

import assay
from assay.commands.tune import tune
from assay.errors import ConfigError, ParameterError
from assay.evaluation.evaluation import Evaluation
from assay.optimizers.parameters import Space
from assay.optimizers.parameters.space import check_ranges
from assay.optimizers.prompts.thinking import FULL, fitted_policy, why_none, with_halting
from assay.programs import RANGES, MathQA, Refine, ThinkingPolicy, program_state, restore_program
from assay.programs.budgets import set_thresholds
from assay.programs.refinement import Halting
from assay.rubrics import Criterion, Grade, Rubric, ScoreResult
from assay.rubrics.checks import exact
from assay.testing import scripted_lm
from rigs.progress import Lines


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


def script(request: Any) -> str:
    thought = '"thought": "it is, well, not so clear what this means", ' if "'thought'" in str(request.config) else ""
    return f'{{{thought}"label": "{"happy" if "yay" in str(request.messages[-1]) else "sad"}"}}'


def test_compile_fits_a_policy_on_val_and_stores_it_in_the_artifact(tmp_path: Any) -> None:
    rows = [{"text": f"{'yay' if at % 2 else 'oh'} {at}", "label": "happy" if at % 2 else "sad"} for at in range(30)]
    lm = scripted_lm(script)
    report = assay.compile(
        Sentiment, rubric=Rubric(name="r", criteria=[Criterion(name="right", check=exact)]), data=rows, lm=lm,
        out=tmp_path / "a", store=tmp_path / "s.db", max_search_calls=20, preflight=False, thinking_margin=0.05,
    )  # fmt: skip
    note = next(note for note in report.outcome.notes if "thinking policy" in note)
    # without probabilities, every other policy needs more calls
    assert note == "thinking policy stays 'thinks once': no other saves tokens"
    assert assay.load(report.unproven).policy == ThinkingPolicy()
    assert [row["name"] for row in report.outcome.candidates][-1].endswith("thinks once")


# -- thresholds as searched parameters


def test_setting_thresholds_keeps_the_rest_of_the_policy() -> None:
    agent = MathQA(thinking=64, policy={"stable": 3, "piece": 8, "posterior": 0.8})
    set_thresholds(agent, {"stable": 1, "probe_margin": 0.3, "samples": 5})
    assert agent.policy == ThinkingPolicy(piece=8, posterior=0.8, probe_margin=0.3, samples=5)
    plain, own = MathQA(thinking=64), MathQA()
    set_thresholds(plain, {"probe_margin": 1, "samples": 1})
    set_thresholds(own, {"samples": 5})
    assert (plain.policy, own.policy) == (None, None)


@pytest.mark.parametrize(
    ("ranges", "reason"),
    [
        ({"probe_margin": (0.25, 0.5)}, "tenths"),
        ({"probe_margin": (0.5, 1.5)}, "between 0 and 1"),
        ({"stable": (0, 3)}, "between 1 and 6"),
        ({"samples": (1, 2.5)}, "whole numbers"),
        ({"confidence": (math.nan, 1)}, "finite"),
        ({"piece": (1, 2)}, "of a program that thinks probe_margin, stable"),
    ],
)
def test_a_range_that_cannot_be_searched_is_refused(ranges: dict[str, tuple[float, float]], reason: str) -> None:
    with pytest.raises(ParameterError, match=reason):
        check_ranges(ranges, {})


def test_thresholds_that_do_not_act_and_misspelt_ones_are_refused_with_the_way_out() -> None:
    with pytest.raises(ParameterError, match=r"no effect of samples in p; they need .* such as thinking=64"):
        Space(programs=["p"], acting={"p": ["temperature"]}, ranges={"samples": (1, 3)})
    with pytest.raises(ParameterError, match=r"no effect of max_steps in p$"):
        Space(programs=["p"], acting={"p": ["temperature"]}, ranges={"max_steps": (1, 3)})
    with pytest.raises(ParameterError, match=r"Did you mean 'samples'\?"):
        check_ranges({"sample": (1, 3)}, {})


def options(tmp_path: Path) -> dict[str, Any]:
    rows = [{"text": f"{'yay' if at % 2 else 'oh'} {at}", "label": "happy" if at % 2 else "sad"} for at in range(40)]
    rubric = Rubric(name="r", criteria=[Criterion(name="right", check=exact)])
    store = {"store": tmp_path / "s.db", "preflight": False, "lm": scripted_lm(script)}
    return {"rubric": rubric, "data": rows, "sizes": {"val": 4, "gate": 3, "test": 3}, **store}


@pytest.mark.slow
def test_tune_searches_the_thresholds_and_writes_the_best_policy_into_the_artifact(tmp_path: Path) -> None:
    report = tune(
        Sentiment(), **options(tmp_path), trials=8, sampler="grid", ranges={"samples": (1, 4)}, out=tmp_path / "a",
        objectives=("tokens",),
    )  # fmt: skip
    tried = {trial["parameters"]["samples"] for trial in report.to_dict()["history"]}
    assert {1, 4} < tried <= {1, 2, 3, 4}
    assert report.best["samples"] == 1  # fewest tokens, and the program's own: no policy is set
    assert assay.load(tmp_path / "a").policy is None
    voting = tune(
        Sentiment(), **options(tmp_path), trials=2, ranges={"samples": (3, 3)}, out=tmp_path / "b", study="votes"
    )
    assert voting.best["samples"] == 3
    assert assay.load(voting.unproven or voting.artifact).policy == ThinkingPolicy(samples=3)
    assert voting.gate is not None  # the policy alone makes it another program


@pytest.mark.slow
def test_only_thresholds_that_act_are_searched(tmp_path: Path) -> None:
    thinking = tune(Sentiment(), **options(tmp_path), trials=2, out=tmp_path / "a")
    assert {"stable", "samples"} <= thinking.best.keys()
    assert not {"probe_margin", "confidence"} & thinking.best.keys()  # the engine has no probabilities
    plain = tune(Sentiment(thinking=None), **options(tmp_path), trials=2, out=tmp_path / "b")
    assert plain.best.keys() == RANGES.keys()
    budgeted = tune(Sentiment(thinking=None), **options(tmp_path), trials=2, out=tmp_path / "c", thinking=32)
    assert "stable" in budgeted.best
    with pytest.raises(ParameterError, match="nothing is searched"):
        tune(Sentiment(thinking=None), **options(tmp_path), trials=2, ranges={"stable": (1, 3)})
    with pytest.raises(ParameterError, match="nothing is searched"):
        tune(Sentiment(), **options(tmp_path), method="policy", episodes=1, ranges={"stable": (1, 3)})


# -- when a Refine program halts


SIZES = {"train": 4, "val": 60, "gate": 5, "test": 5}  # 60 tasks without a loss show a margin of 0.05


def test_thresholds_are_part_of_the_state() -> None:
    refine = Refine(dspy.Predict("question -> answer"), lambda *_: 1.0, halt_at=0.8, min_gain=0.2)
    fitted = with_halting(refine, Halting(0.5, 0.1, [[0.3] * 5]))
    restored = restore_program("", {}, program_state(fitted), fresh=refine)
    assert vars(restored.halting) == vars(fitted.halting)
    assert (refine.halting.halt_at, refine.halting.gains) == (0.8, [])
    with pytest.raises(ConfigError, match="halt_at=nan must be above 0"):
        Halting(halt_at=math.nan)


def draft_of(request: Any) -> str:
    """Counts upwards: an answer is one more than its draft, the first is 0."""
    drafts = re.findall(r"answer: (\d+)", str(request.messages[-1]))
    return json.dumps({"answer": str(int(drafts[-1]) + 1 if drafts else 0)})


def by_number(task: Any, prediction: dict[str, Any], rollout: Any) -> Grade:
    """0.2, then 0.6, then no better: the second round is right, later ones are worth nothing."""
    return Grade(value=0.6 if int(prediction["answer"]) else 0.2, reason="count")


def raising(*_: Any) -> float:
    raise RuntimeError("the tests cannot run")


def compiled(tmp_path: Path, program: Any, **options: Any) -> Any:
    job = {"data": [{"question": f"q{at}", "answer": "1"} for at in range(400)], "lm": scripted_lm(draft_of)}
    folders = {"out": tmp_path / "a", "store": tmp_path / "s.db"}
    rubric = Rubric(name="r", criteria=[Criterion(name="right", check=exact)])
    fixed = {"optimizer": "labeled", "preflight": False, "thinking_margin": 0.05, "sizes": SIZES}
    return assay.compile(program, rubric=rubric, **{**job, **folders, **fixed, **options})


def fitted(tmp_path: Path, verifier: Callable[..., Any], depth: int = 10, val: int = 60) -> Any:
    """The report, what it says of halting, and the program."""
    refine = Refine(dspy.Predict("question -> answer"), verifier)
    refine.set_parameters({"reasoning_depth": depth})
    report = compiled(tmp_path, refine, sizes={**SIZES, "val": val}, gate=False)
    return report, next(note for note in report.outcome.notes if "halting" in note), refine


@pytest.mark.slow
def test_compile_fits_the_halting_and_stores_it_in_the_artifact(tmp_path: Path) -> None:
    report, note, refine = fitted(tmp_path, by_number)
    assert "halting fitted on val: halts at 0.9, or below a gain of 0.01; tokens -" in note
    assert "score +0.000 on " in note  # the answer of the second round is right, and was the best before
    loaded = assay.load(report.artifact, program=refine)
    assert len(loaded.halting.gains) == 3
    assert refine.halting.gains == []
    with dspy.context(lm=scripted_lm(draft_of)):
        assert len(loaded(question="q").rounds) == 2
        assert len(refine(question="q").rounds) == 4


@pytest.mark.parametrize(
    ("verifier", "chosen"),
    [
        (lambda *_: 0.0, "below a gain of 0.01"),  # always no: further rounds are never kept
        (lambda *_: 1.0, "no halting was fitted"),  # always yes: there is one round
        (raising, "no halting was fitted"),
    ],
)
@pytest.mark.slow
def test_a_verifier_that_is_always_undecided_loses_no_answer(tmp_path: Path, verifier: Any, chosen: str) -> None:
    report, note, _ = fitted(tmp_path, verifier)
    assert chosen in note
    assert report.outcome.stopped is None


def test_too_few_tasks_keep_all_rounds_and_say_how_many_are_needed(tmp_path: Path) -> None:
    report, note, refine = fitted(tmp_path, by_number, val=12)
    assert "halting stays 'all rounds': none that saves tokens is shown to lose at most 0.05" in note
    assert "on 12 val tasks; about 60 are needed" in note
    with dspy.context(lm=scripted_lm(draft_of)):
        assert len(assay.load(report.artifact, program=refine)(question="q").rounds) == 4


def test_a_margin_without_effect_is_said_before_the_search_and_once(tmp_path: Path) -> None:
    progress = Lines()
    report = compiled(tmp_path, dspy.Predict("question -> answer"), progress=progress)
    assert sum("thinking_margin" in note for note in report.outcome.notes) == 1
    text = progress.text
    assert -1 < text.find("`thinking_margin` has no effect") < text.find("\nestimate")
