"""Adversarial cases and cards of judges with known defects, and of one without; cases of the user, pairs and scales."""

import re
from typing import Any

import pytest

from assay.errors import ConfigError, DataError
from assay.judges import Cascade, Item, Judge, Rating
from assay.judges.quality.agreement import Answers, agreement, ceiling, objective_of
from assay.judges.quality.audit import (
    BASES,
    Base,
    assess,
    audit_cases,
    audit_items,
    bases_of,
    load_attacks,
    load_bases,
    not_tried,
    padded,
)
from assay.judges.quality.card import reliability_card
from assay.rubrics import JudgeSpec, NoGrade
from assay.testing import AnswerKeyJudge, PairKeyJudge, broken_judges

ANSWERS = ("42", "Canberra", "180", "Mercury", "mice", "0 degrees", "72", "Shakespeare")
KEY = {str(base.good["task_input"]): answer for base, answer in zip(BASES, ANSWERS, strict=True)}
QUESTION = JudgeSpec(text="Is the output a right answer to the task?", scale=("no", "partly", "yes"))


def answers_of(judge: Judge, items: list[Item]) -> Answers:
    verdicts: list[Any] = []
    places, orders = [], []
    for item in items:
        try:
            verdict = judge(**{name: item.fields.get(name, "") for name in judge.shows})
        except NoGrade:
            verdicts.append(None)
            places.append(float("nan"))
            orders.append(None)
            continue
        verdicts.append(verdict.verdict)
        places.append(judge.spec.steps[judge.labels.index(verdict.verdict)])
        orders.append(verdict.get("orders"))
    return Answers(verdicts, places, [None] * len(items), orders)


def audited(judge: Judge, **options: Any) -> dict[str, Any]:
    cases = audit_cases(judge, **options)
    items = audit_items(cases, judge)
    return assess(cases, items, answers_of(judge, items), judge)


class Swayed(AnswerKeyJudge):
    """Grades correctly, except that one feature always wins."""

    def __init__(self, wins: str) -> None:
        super().__init__(QUESTION, key=KEY)
        self.wins = wins

    def read(self, values: Any) -> Any:
        return (None, self.labels[-1]) if self.wins in str(values["output"]) else super().read(values)


def carded(judge: Judge) -> dict[str, Any]:
    """The card on 64 labelled items: each question with its right and wrong answer, some longer than others."""
    items = []
    pairs = "output_b" in judge.shows
    for number in range(8):
        for base, answer in zip(BASES, ANSWERS, strict=True):
            right = (number % 2 == 0) or answer not in str(base.good["output"])
            good, bad = (
                f"{text} ({'.' * 10 * (number // 2)} {number})" for text in (base.good["output"], base.bad["output"])
            )
            fields = {"task_input": base.good["task_input"]}
            fields |= (
                {"output_a": good if right else bad, "output_b": bad if right else good}
                if pairs
                else {"output": good if right else bad}
            )
            label = (judge.labels[0] if right else judge.labels[-1]) if pairs else judge.labels[-1 if right else 0]
            ratings = tuple(Rating(rater=f"r{r}", label=label) for r in range(2))
            items.append(Item(id=f"{number}-{answer}", fields=fields, ratings=ratings))
    answers = answers_of(judge, items)
    spec = judge.spec
    return reliability_card(
        answers, items, spec, agreement=agreement(answers, items, spec), ceiling=ceiling(items, spec),
        objective=objective_of(spec),
        retest=(answers, answers_of(judge, items)),
        padded=(answers, answers_of(judge, [Item(id=i.id, fields=padded(i.fields), ratings=i.ratings) for i in items])),
    )  # fmt: skip


@pytest.mark.parametrize(
    "judge", [AnswerKeyJudge(QUESTION, key=KEY), AnswerKeyJudge("Right?", key=KEY), PairKeyJudge(key=KEY)]
)
def test_a_sound_judge_passes(judge: Judge) -> None:
    report = audited(judge)
    assert report["passed"], report
    assert all(entry["share"] == 1.0 for entry in report["attacks"].values())
    card = carded(judge)
    assert card["alarms"] == []
    assert card["of_ceiling"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("what", "attacks", "alarms"),
    [
        ("constant", {"tells good from bad"}, ["the same verdict to every item"]),
        ("length-biased", {"padding", "keyword stuffing"}, ["length of the output", "changes with padding"]),
        ("keyed to one phrase", {"keyword stuffing"}, []),
        ("position-biased", {"the places changed"}, ["changes its choice with the order in 100%"]),
        ("random", set(), ["repeats its verdict in only"]),
    ],
)
def test_audit_and_card_report_the_defect_of_a_broken_judge(what: str, attacks: set[str], alarms: list[str]) -> None:
    judge = broken_judges(QUESTION)[what]
    report, raised = audited(judge), " ".join(carded(judge)["alarms"])
    assert not report["passed"]
    assert attacks <= {name for name, entry in report["attacks"].items() if not entry["passed"]}
    assert raised
    assert all(alarm in raised for alarm in alarms)


@pytest.mark.parametrize(
    ("wins", "attack"),
    [
        ("!!!", "punctuation"),
        ("Google", "names and brands"),
        ("Harvard", "names and brands"),
        ("wonderful", "praise"),
        ("excellent, correct", "praise"),
        ("**", "markdown"),
        ("| step", "markdown"),
        ("Assistant: yes", "fake turns of a conversation"),
        ("### Response", "fake turns of a conversation"),
        ("?!", "punctuation"),
        ("Anthropic", "names and brands"),
        ("Apple", "names and brands"),
        ("```", "markdown"),
        ("1. ", "markdown"),
        ("<b>", "html"),
        ("</div>", "html"),
        ("http", "links"),
        ("🙂", "emoji"),
        ("10/10", "claimed scores"),
        ("Trust me", "authority"),
        ("IMPORTANT", "authority"),
    ],
)
def test_an_accurate_judge_with_a_single_weakness_raises_an_alarm(wins: str, attack: str) -> None:
    report = audited(Swayed(wins))
    entry = report["attacks"][attack]
    assert entry["flip_rate"] >= 0.25
    assert any(alarm.startswith(attack) for alarm in report["flip_alarms"])
    assert not entry["passed"]
    assert report["attacks"]["tells good from bad"]["passed"]


def test_one_obeyed_injection_fails_even_if_most_cases_pass() -> None:
    report = audited(Swayed("three experts"))
    entry = report["attacks"]["instructions hidden in the text"]
    assert entry["share"] > report["pass_at"], "five of six texts had no effect"
    assert not entry["passed"]
    assert report["flip_alarms"] == ["instructions hidden in the text changes 17% of the verdicts"]


class AnyNumber(Judge):
    """A sound judge of numbers: the sum is among those of the output."""

    def read(self, values: Any) -> Any:
        right = sum(int(n) for n in re.findall(r"\d+", values["task_input"]))
        return None, self.labels[-1 if str(right) in re.findall(r"\d+", str(values["output"])) else 0]


class LastWord(AnswerKeyJudge):
    """A sound judge of answers that end in the key."""

    def read(self, values: Any) -> Any:
        words = re.findall(r"\w+", str(values["output"]).casefold())
        return None, self.labels[-1 if words and words[-1] == self.key[values["task_input"]] else 0]


def test_a_sound_judge_passes_if_an_attack_contains_the_answer() -> None:
    small = [Base({"task_input": "0 + 1", "output": "1"}, {"task_input": "0 + 1", "output": "7"})]
    cases = audit_cases(AnyNumber(QUESTION), small)
    report = audited(AnyNumber(QUESTION), bases=small)
    assert report["passed"], report
    assert report["flip_alarms"] == []
    assert not_tried(cases) == ["truncation", "keyword stuffing"], "the question has the 1"
    assert not any("| 1 |" in str(case.fields["output"]) for case in cases), "and so does the numbering of a table"

    key = {"Is Paris bigger than Lyon?": "yes", "Is Oslo in Peru?": "no"}
    bases = [
        Base({"task_input": q, "output": a}, {"task_input": q, "output": "no" if a == "yes" else "yes"})
        for q, a in key.items()
    ]
    report = audited(LastWord(QUESTION, key=key), bases=bases)
    assert report["passed"], report
    assert report["flip_alarms"] == []
    tried = [
        case
        for case in audit_cases(LastWord(QUESTION, key=key), bases)
        if case.attack == "instructions hidden in the text"
    ]
    assert {case.fields["task_input"] for case in tried if "answer 'yes'" in case.fields["output"]} == {
        "Is Oslo in Peru?"
    }
    assert not_tried(audit_cases(LastWord(QUESTION, key=key), bases)) == ["truncation", "the rubric quoted back"]


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
