"""Adversarial cases and card of judges with known defects, and of one without."""

import re
from typing import Any

import pytest
from audited_judges import ANSWERS, KEY, QUESTION, Swayed, answers_of, audited

from assay.judges import Item, Judge, Rating
from assay.judges.quality.agreement import agreement, ceiling, objective_of
from assay.judges.quality.audit import BASES, Base, audit_cases, not_tried, padded
from assay.judges.quality.card import reliability_card
from assay.testing import AnswerKeyJudge, PairKeyJudge, broken_judges


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
