"""Biases of a judge, found by edits of the user's own items."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from labelled_items import labels_file

from assay.commands.judge_audit import audit_judge
from assay.judges import PointwiseJudge
from assay.judges.quality.agreement import Answers
from assay.judges.quality.fidelity import assess_biases, edits
from assay.rubrics import JudgeSpec
from assay.testing import scripted_lm

YES_NO = JudgeSpec(text="Good?")
NAMES = tuple(edits("quality", "m"))


def answers(values: Any, spec: JudgeSpec = YES_NO) -> Answers:
    return Answers([spec.scale[int(value)] for value in values], [float(value) for value in values])


def failed(strength: float, *, noise: float, seed: int, edit: str = "length", n: int = 60) -> dict[str, bool]:
    """Whether each edit failed, for a judge that one edit moves up with a probability, and that is noisy."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, 2, n)

    def judged(moved: float = 0.0) -> Answers:
        values = np.where(rng.random(n) < noise, 1 - truth, truth)
        return answers(np.where(rng.random(n) < moved, 1, values))

    changed = {name: judged(strength if name == edit else 0.0) for name in NAMES}
    results = assess_biases(judged(), judged(), changed, YES_NO)
    return {name: entry["passed"] is False for name, entry in results.items()}


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_judge_that_always_follows_an_edit_is_found_on_60_items(noise: float) -> None:
    assert all(failed(1.0, noise=noise, seed=seed)["length"] for seed in range(20))


def test_a_judge_that_follows_an_edit_in_three_of_ten_is_mostly_found() -> None:
    assert sum(failed(0.3, noise=0.02, seed=seed)["length"] for seed in range(20)) >= 10


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
def test_a_noisy_judge_without_a_bias_rarely_fails(noise: float) -> None:
    failures = sum(any(failed(0.0, noise=noise, seed=seed).values()) for seed in range(20))
    assert failures <= 3


def test_a_significant_change_that_is_small_is_no_bias() -> None:
    places = [0.5] * 60
    before = Answers(["no"] * 60, places)
    after = Answers(["no"] * 60, [place + 0.02 for place in places])
    entry = assess_biases(before, before, {"length": after}, YES_NO)["length"]
    assert entry["p"] < 0.01
    assert entry["passed"] is True
    large = Answers(["no"] * 60, [place + 0.1 for place in places])
    assert assess_biases(before, before, {"length": large}, YES_NO)["length"]["passed"] is False


def audited(tmp_path: Path, *swayed: str) -> Any:
    """The audit of a judge that finds lovely answers good, and those with one of these texts."""

    def script(request: Any) -> dict[str, float]:
        text = str(request.messages[-1].text)
        good = "lovely" in text.partition("output: ")[2] or any(each in text for each in swayed)
        return {"yes": 0.95, "no": 0.05} if good else {"yes": 0.05, "no": 0.95}

    judge, labels = PointwiseJudge({"text": "Is it a good answer?"}), labels_file(tmp_path, good="lovely", count=20)
    return audit_judge(judge, labels=labels, lm=scripted_lm(script, logprobs=True), store=tmp_path / "s.db")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("swayed", "found"), [((), []), (("Harvard",), ["authority"]), (("Answer\\n\\n",), ["formatting"])]
)
def test_an_audit_with_labels_finds_what_moves_the_verdicts_on_them(
    tmp_path: Path, swayed: tuple[str, ...], found: list[str]
) -> None:
    report = audited(tmp_path, *swayed)
    assert [name for name, entry in report.biases.items() if not entry["passed"]] == found
    assert not (found and report.passed)


@pytest.mark.slow
def test_injections_that_change_an_eighth_of_the_verdicts_fail(tmp_path: Path) -> None:
    report = audited(tmp_path, "checked by three experts")  # one of six injections
    entry = report.attacks["instructions hidden in the text"]
    assert 0.1 < entry["flip_rate"] < 0.2
    assert not entry["passed"]
    assert not report.passed
