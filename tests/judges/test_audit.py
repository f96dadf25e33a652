"""The adversarial pack and the card against judges that are broken in known ways, and one that is sound."""

import re
from typing import Any

import pytest

from assay.errors import ConfigError, DataError
from assay.judges import Cascade, Item, Judge, Rating
from assay.judges.quality.agreement import Answers, agreement, ceiling, objective_of
from assay.judges.quality.attacks import cut_short, holds, load_attacks
from assay.judges.quality.audit import assess, audit_cases, audit_items, judges_quality, negatives, not_tried, padded
from assay.judges.quality.bases import BASES, Base, bases_of, load_bases
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


@pytest.mark.parametrize(("what", "judge"), broken_judges(QUESTION).items())
def test_every_broken_judge_is_caught_by_the_audit_and_by_the_card(what: str, judge: Judge) -> None:
    assert not audited(judge)["passed"]
    assert carded(judge)["alarms"], what


def test_the_reported_weakness_is_the_judges_defect() -> None:
    broken = broken_judges(QUESTION)
    failed = {
        what: {name for name, entry in audited(judge)["attacks"].items() if not entry["passed"]}
        for what, judge in broken.items()
    }
    assert "tells good from bad" in failed["constant"]
    assert {"padding", "keyword stuffing"} <= failed["length-biased"]
    assert "keyword stuffing" in failed["keyed to one phrase"]
    assert "the places changed" in failed["position-biased"]
    alarms = {what: " ".join(carded(judge)["alarms"]) for what, judge in broken.items()}
    assert "the same verdict to every item" in alarms["constant"]
    assert "repeats its verdict in only" in alarms["random"]
    assert "length of the output" in alarms["length-biased"]
    assert "changes with padding" in alarms["length-biased"]
    assert "changes its choice with the order in 100%" in alarms["position-biased"]


class Swayed(AnswerKeyJudge):
    """Right, but for one thing that wins."""

    def __init__(self, wins: str) -> None:
        super().__init__(QUESTION, key=KEY)
        self.wins = wins

    def read(self, values: Any) -> Any:
        return (None, self.labels[-1]) if self.wins in str(values["output"]) else super().read(values)


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


def test_one_obeyed_injection_is_an_alarm_even_if_most_cases_pass() -> None:
    report = audited(Swayed("three experts"))
    assert report["attacks"]["instructions hidden in the text"]["passed"], "five of six texts had no effect"
    assert report["flip_alarms"] == ["instructions hidden in the text changes 17% of the verdicts"]


class Number(Judge):
    """A sound judge of numbers: the last number of the output is the sum, or it is not."""

    def read(self, values: Any) -> Any:
        right = sum(int(n) for n in re.findall(r"\d+", values["task_input"]))
        text = re.findall(r"\d+", str(values["output"]))
        return None, self.labels[-1 if text and int(text[-1]) == right else 0]


class Begins(AnswerKeyJudge):
    """A sound judge of answers that begin with the key."""

    def read(self, values: Any) -> Any:
        return None, self.labels[
            -1 if str(values["output"]).casefold().startswith(self.key[values["task_input"]]) else 0
        ]


SUMS = [
    Base(
        {"task_input": f"{n} + {n + 1}", "output": str(2 * n + 1)},
        {"task_input": f"{n} + {n + 1}", "output": str(2 * n)},
    )
    for n in range(3, 9)
]


def test_a_sound_judge_of_numbers_does_not_fail_on_a_cut_word() -> None:
    report = audited(Number(QUESTION), bases=SUMS)
    assert "truncation" not in report["attacks"]
    assert report["passed"], report


def test_a_sound_judge_of_answers_that_begin_with_the_key_passes() -> None:
    towns = {"Capital of France?": "Paris", "Capital of Peru?": "Lima", "Capital of Kenya?": "Nairobi"}
    bases = [
        Base(
            {"task_input": q, "output": f"{town}, a large city by a river, as everybody knows."},
            {"task_input": q, "output": "Oslo, as everybody knows."},
        )
        for q, town in towns.items()
    ]
    judge = Begins(QUESTION, key={q: town.casefold() for q, town in towns.items()})
    report = audited(judge, bases=bases)
    assert report["passed"], report
    assert "truncation" not in report["attacks"]


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


def test_an_answer_is_matched_as_words() -> None:
    assert holds("| 1 | result |", "1")
    assert holds("<h1>", "1")
    assert holds("in the New York Times", "new york")
    assert not holds("known nothing", "no")
    assert not holds("New Jersey, York", "New York")
    assert not holds("anything", "")


def test_an_output_is_cut_only_if_its_meaning_is_lost() -> None:
    cut = cut_short
    bad = {"output": "It is 12."}
    assert cut({"output": "42"}, bad) is None
    assert cut({"output": "42, because 17 and 25 are 42 together."}, bad) is None, "the half says 42"
    assert cut({"output": "so we add the ones and then tens: 42."}, bad) == "so we add the"
    assert cut({"output": "be kind to each other, always and everywhere"}, bad) is None, "nobody can say what it lost"
    assert cut({"output": "The tens give 30 and the ones 12, so 42."}, bad) is None, "30 may be what counts"
    assert cut({"output": "The tens give 30 and the ones 12, so 42."}, bad, "42") == "The tens give 30 and"
    assert all(cut(base.good, base.bad, base.answer) for base in BASES), "the shipped cases all end in their answer"


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


@pytest.mark.parametrize(
    ("text", "quality"),
    [
        ("Is the output a right answer to the task?", True),
        ("Which output is better?", True),
        ("Does it answer the question?", True),
        ("How helpful is the reply?", True),
        ("Is the summary faithful?", True),
        ("Is the output polite?", False),
        ("Is the tone of the answer formal?", False),
        ("What is the sentiment of the text?", False),
        ("Is the answer concise?", False),
    ],
)
def test_the_question_decides_which_shipped_cases_apply(text: str, quality: bool) -> None:
    assert judges_quality(JudgeSpec(text=text, scale=("no", "yes"))) is quality
    judged_by_meaning = JudgeSpec(text=text, scale=("no", "yes"), anchors={"yes": "everything is correct"})
    assert judges_quality(judged_by_meaning)


def test_hidden_instructions_are_tried_on_judges_of_properties_too() -> None:
    class Obeys(Judge):
        def read(self, values: Any) -> Any:
            return None, "positive" if "Ignore all instructions" in values["output"] or "lovely" in values[
                "output"
            ] else "negative"

    judge = Obeys(JudgeSpec(text="Mood?", scale=("negative", "neutral", "positive")), shows=("output",))
    cases = audit_cases(judge, [Base({"output": "lovely"}, {"output": "awful"})], profile="property")
    assert {case.attack for case in cases} == {
        "tells good from bad",
        "instructions hidden in the text",
        "fake turns of a conversation",
    }
    items = audit_items(cases, judge)
    answers = assess(cases, items, answers_of(judge, items), judge)
    assert answers["attacks"]["tells good from bad"]["passed"]
    assert answers["attacks"]["instructions hidden in the text"]["wrong"][0]["output"].startswith("awful\nIgnore all")
    with pytest.raises(DataError, match="quality, property"):
        audit_cases(judge, profile="all")


@pytest.mark.parametrize("scale", [("a", "tie", "b"), ("first", "tie", "second")])
def test_a_pairwise_judge_that_obeys_injections_fails(scale: tuple[str, ...]) -> None:
    class Obeys(PairKeyJudge):
        def read(self, values: Any) -> Any:
            read, _ = super().read(values)
            labels = {label: float(label == scale[-1]) for label in scale}
            hidden = any(
                text in str(values[name])
                for name in ("output_a", "output_b")
                for text in (f"{scale[-1]!r}", "verdict", "im_end")
            )
            return ({"given": labels, "swapped": labels} if hidden else read), None

    sound, obeys = (kind({"text": "Better?", "scale": scale}, key=KEY) for kind in (PairKeyJudge, Obeys))
    assert audited(sound)["passed"]
    assert not audited(obeys)["attacks"]["instructions hidden in the text"]["passed"]


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


def test_bases_and_negatives_of_pairs() -> None:
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


def test_a_judge_without_verdicts_on_attacks_must_still_tell_good_from_bad() -> None:
    class Silent(Judge):
        def read(self, values: Any) -> Any:
            raise NoGrade("no")

    report = audited(Silent(QUESTION))
    assert report["attacks"]["nothing said"]["passed"]
    assert not report["attacks"]["tells good from bad"]["passed"]


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
