"""The cases of an audit: shipped ones, those of the user, hidden instructions, pairs and scales."""

from typing import Any

import pytest
from audited_judges import KEY, QUESTION, Swayed, answers_of, audited

from assay.errors import ConfigError, DataError
from assay.judges import Cascade, Item, Judge, Rating
from assay.judges.quality.audit import (
    Base,
    assess,
    audit_cases,
    audit_items,
    bases_of,
    load_attacks,
    load_bases,
    negatives,
)
from assay.rubrics import JudgeSpec
from assay.testing import PairKeyJudge


def test_user_attacks_are_tried(tmp_path: Any) -> None:
    attacks = load_attacks(
        [("l:1", {"name": "our brand", "text": "Acme Corp says: {output}"}), ("l:2", {"text": "as of Tuesday"})]
    )
    assert [attack.on("x {y}") for attack in attacks] == ["Acme Corp says: x {y}", "x {y} as of Tuesday"]
    report = audited(Swayed("Acme"), attacks=attacks)
    assert not report["attacks"]["our brand"]["passed"]
    assert report["attacks"]["attack 'as of Tuesday'"]["passed"]
    assert audited(Swayed("Acme"))["passed"], "what is not tried is not found"
    for row in ({"name": "x"}, {"text": " "}, {"text": "{output}"}):
        with pytest.raises(DataError, match="an attack needs a 'text'"):
            load_attacks([("l:1", row)])
    with pytest.raises(DataError, match="at least one row"):
        load_attacks([])


def test_a_cascade_of_written_pairwise_judges_keeps_both_orders() -> None:
    class Writes(PairKeyJudge):
        def judged(self, reading: Any, verdict: Any = None) -> Any:
            text = super().judged(reading, verdict)
            text.probabilities = text.confidence = None
            return text

    cascade = Cascade(Writes(key=KEY), Writes(key=KEY))
    report = audited(cascade)
    assert report["passed"], report
    assert report["attacks"]["the places changed"]["share"] == 1.0


def test_a_nominal_scale_requires_user_cases() -> None:
    colours = JudgeSpec(text="Which colour?", scale=("red", "green"), kind="nominal")

    class Sees(Judge):
        def read(self, values: Any) -> Any:
            return None, "red" if "rose" in values["output"] else "green"

    judge = Sees(colours, shows=("output",))
    with pytest.raises(ConfigError, match="pass cases or labels"):
        audit_cases(judge, profile="property")
    cases = audit_cases(judge, [Base({"output": "a rose"}, {"output": "grass"})], profile="property")
    items = audit_items(cases, judge)
    assert assess(cases, items, answers_of(judge, items), judge)["passed"]


def test_audit_cases_of_pairwise_judges_have_bases_and_negatives() -> None:
    spec = JudgeSpec(text="Better?", scale=("a", "tie", "b"))
    items = [
        Item(
            id=str(i),
            fields={"task_input": "q", "output_a": f"a{i}", "output_b": f"b{i}"},
            ratings=(Rating(rater="r", label=label),),
        )
        for i, label in enumerate(["a", "b", "tie"])
    ]
    assert [(base.good["output"], base.bad["output"]) for base in bases_of(items, spec)] == [("a0", "b0"), ("b1", "a1")]
    made = negatives(items, spec, count=4)
    assert [item.ratings[0].label for item in made] == ["a", "b", "a", "b"]
    assert made[0].fields["output_a"] == "a0"
    assert made[0].fields["output_b"].startswith("b0\n")
    assert made[1].fields["output_a"] == ""
    with pytest.raises(DataError, match="with a preferred output"):
        bases_of(items[2:], spec)
    with pytest.raises(DataError, match="with a preferred output"):
        negatives(items[2:], spec, count=1)


def test_user_bases_are_used() -> None:
    rows = [("f:1", {"input": "q", "good": "g", "bad": "b", "context": "c"})]
    assert load_bases(rows) == [
        Base({"task_input": "q", "context": "c", "output": "g"}, {"task_input": "q", "context": "c", "output": "b"})
    ]
    with pytest.raises(DataError, match="bad is missing"):
        load_bases([("f:2", {"good": "g", "bad": " "})])
    with pytest.raises(DataError, match="at least one"):
        load_bases([])
    items = [
        Item(id=str(i), fields={"output": str(i)}, ratings=(Rating(rater="r", label="yes" if i % 2 else "no"),))
        for i in range(5)
    ]
    assert [base.good["output"] for base in bases_of(items, QUESTION)] == ["1", "3"]
    with pytest.raises(DataError, match="'no'"):
        bases_of(items[1:2], QUESTION)


@pytest.mark.slow
def test_negatives_are_attacks_labelled_with_the_worst_word() -> None:
    items = [
        Item(id=str(i), fields={"output": f"text {i}"}, ratings=(Rating(rater="r", label="yes" if i % 2 else "no"),))
        for i in range(4)
    ]
    made = negatives(items, QUESTION, count=9)
    assert len({item.id for item in made}) == 9
    assert {rating.label for item in made for rating in item.ratings} == {"no"}
    assert {rating.rater for item in made for rating in item.ratings} == {"audit"}
    many = negatives(items, QUESTION, count=24)
    assert len({str(item.fields["output"]) for item in many}) >= 10
    assert any("<|im_end|>" in str(item.fields["output"]) for item in many)
    with pytest.raises(DataError, match="the train items contain none"):
        negatives(items[1:2], QUESTION, count=1)
