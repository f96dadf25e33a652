"""Checks of answers from documents: right, supported, retrieved, abstained, and what a retrieval added."""

from typing import Any

import pytest

from assay.datasets import Task
from assay.programs import Passage
from assay.rubrics import NoGrade, NotApplicable
from assay.rubrics.documents import (
    abstained,
    answer_correct,
    answer_supported,
    has_abstained,
    is_answerable,
    retrieval_gain,
    retrieved,
)
from assay.traces import Rollout, ToolCall, Transition

TEXT = "The Marlow mill stands 1,380 metres high."
PASSAGE = {"id": "p1", "source": "mill.txt", "line": 1, "text": f"{TEXT} It was opened in 1874."}
OTHER = {"id": "p2", "source": "inn.txt", "line": 1, "text": "The Selside inn is old."}


def task(**expected: Any) -> Task:
    return Task(id="t", inputs={"question": "How high is the Marlow mill?"}, expected=expected)


def said(answer: str, *, cited: Any = PASSAGE, passages: Any = (PASSAGE, OTHER), **more: Any) -> dict[str, Any]:
    return {"answer": answer, "abstained": False, "citation": cited, "passages": list(passages), **more}


SILENT = {"answer": "not in the documents", "abstained": True, "citation": None, "passages": [OTHER]}
RIGHT, REMOVED = task(answer="1380 metres", passages=[TEXT]), task(passages=[])


def test_a_task_that_does_not_say_it_is_unscored() -> None:
    with pytest.raises(NoGrade, match=r"does not say whether the documents have the answer: give expected\.answer"):
        abstained(task(), SILENT, None)
    assert is_answerable(Task(id="t", inputs={"q": 1}, metadata={"answerable": True}))
    for expected, answerable in (
        ({"answer": "x"}, True),
        ({"answer": ""}, False),
        ({"answer": "x", "source": ""}, False),
        ({"source": "a.md"}, True),
        ({"passages": []}, False),
    ):
        assert is_answerable(task(**expected)) is answerable


@pytest.mark.parametrize(
    ("answer", "grade"),
    [
        ("1380 metres", 1.0),
        ("1,380 METRES.", 1.0),
        ("The Marlow mill is 1380 metres high", 1.0),
        ("380 metres", 0.0),
        ("21380 metres", 0.0),
        ("metres 1380", 0.0),
        (f"{PASSAGE['text']} 1380 metres " + "and so on " * 5, 0.0),  # a copied document is not an answer
        ("", 0.0),
    ],
)
def test_a_right_answer_has_the_expected_words_and_few_more(answer: str, grade: float) -> None:
    assert answer_correct(RIGHT, said(answer), None).value == grade


def test_one_of_several_right_answers_is_enough_and_abstaining_is_wrong() -> None:
    assert answer_correct(task(answer=["1380 m", "1380 metres"]), said("1380 m"), None).value == 1.0
    assert answer_correct(RIGHT, SILENT, None).value == 0.0
    with pytest.raises(NotApplicable):
        answer_correct(REMOVED, said("1380 metres"), None)


def test_abstention_counts_where_the_documents_have_no_answer() -> None:
    assert abstained(REMOVED, SILENT, None).value == 1.0
    grade = abstained(REMOVED, said("1380 metres"), None)
    assert (grade.value, grade.reason) == (0.0, "The documents have no answer, and it is '1380 metres'.")
    with pytest.raises(NotApplicable):
        abstained(RIGHT, SILENT, None)


@pytest.mark.parametrize(
    ("answer", "is_abstention"),
    [
        ("", True),
        ("The documents do not say.", True),
        ("I don't know", True),
        ("It is not mentioned in the text", True),
        ("38 metres", False),
        ("The unknownable inn", False),
        ("not the inn but the mill", False),
    ],
)
def test_other_programs_abstain_by_their_words(answer: str, is_abstention: bool) -> None:
    assert has_abstained({"answer": answer}) is is_abstention


@pytest.mark.parametrize(
    ("prediction", "grade"),
    [
        (said("1380 metres"), 1.0),
        (said("The Marlow mill stands 1380 metres high"), 1.0),
        (said("1380 metres and vast"), 0.5),  # `and` and `vast` are in neither passage nor question
        (said("1381 metres"), 0.0),  # a number that the passage does not have
        (said("1380 metres", cited=OTHER), 0.0),
        (said("1380 metres", cited={**PASSAGE, "id": "invented"}), 0.0),
        (said("1380 metres", cited={**OTHER, "text": TEXT}), 0.0),  # the text that counts is what was retrieved
        (said("1380 metres", cited="p1"), 1.0),
        (said("1380 metres", cited=None), 0.0),
        (said("?"), 0.0),
    ],
)
def test_support_is_by_the_retrieved_passage_that_is_cited(prediction: Any, grade: float) -> None:
    assert answer_supported(RIGHT, prediction, None).value == pytest.approx(grade)


def test_passages_of_other_programs_are_objects_mappings_or_texts() -> None:
    text = "The mill stands 38 metres high."
    mill = Passage(text=text, source="mill.txt")
    by_source = Task(id="t", inputs={"question": "How high?"}, expected={"answer": "38", "source": "mill.txt"})
    by_text = Task(id="t", inputs={"question": "How high?"}, expected={"answer": "38", "passages": ["38 metres"]})
    unnamed = {"source": "mill.txt", "text": text}
    for passage in (mill, unnamed):
        prediction = {"answer": "38 metres", "passages": [passage], "citation": passage}
        assert retrieved(by_source, prediction, None).value == 1.0
        assert answer_supported(by_source, prediction, None).value == 1.0
    prediction = {"answer": "38 metres", "passages": [text], "citation": text}
    assert retrieved(by_text, prediction, None).value == 1.0
    assert answer_supported(by_text, prediction, None).value == 1.0
    assert answer_supported(by_text, {**prediction, "passages": [mill], "citation": mill.id}, None).value == 1.0
    with pytest.raises(NoGrade, match="none has a 'source'"):
        retrieved(by_source, prediction, None)
    assert retrieved(by_source, {**prediction, "passages": []}, None).value == 0.0
    with pytest.raises(NoGrade, match=r"a passage of the prediction is '3': return Passage objects"):
        retrieved(by_source, {**prediction, "passages": [3]}, None)


def test_support_applies_to_answers_only() -> None:
    for of, prediction in ((RIGHT, SILENT), (REMOVED, said("1380 metres"))):
        with pytest.raises(NotApplicable):
            answer_supported(of, prediction, None)


def rollout(*searches: dict[str, Any] | None, results: tuple[str, ...] = ()) -> Rollout:
    """A rollout with a call of `search` in every second transition."""
    count = len(results) or len(searches)
    transitions = [
        Transition(
            t=t,
            model="m",
            request={},
            tools=[ToolCall(name="search", arguments={}, result=results[t // 2] if results else "x")] * (t % 2 == 0),
        )
        for t in range(2 * count)
    ]
    return Rollout(transitions=transitions, prediction={"searches": list(searches)} if searches else {})


def gains(of: Task, run: Rollout, **options: Any) -> list[float]:
    graded = [step for step in run.transitions if step.tools]
    return [retrieval_gain(of, {"transition": step}, run, **options).value for step in graded]


def draft(answer: str | None) -> dict[str, Any]:
    return {"answer": answer or "not in the documents", "abstained": answer is None}


def test_a_retrieval_is_credited_with_the_score_with_it_minus_without_it() -> None:
    # scores after each search: abstained 0, right 1, wrong 0; before the first: abstained 0
    run = rollout(draft(None), draft("1380 metres"), draft("12 metres"))
    assert gains(RIGHT, run) == [0.0, 1.0, 0.0]
    assert gains(RIGHT, run, losses=True) == [0.0, 0.0, 1.0]


def test_a_retrieval_that_replaces_a_right_abstention_is_a_loss() -> None:
    # before the first search the right thing was said: nothing, score 1
    run = rollout(draft(None), draft("12 metres"))
    assert gains(REMOVED, run) == [0.0, 0.0]
    assert gains(REMOVED, run, losses=True) == [0.0, 1.0]


def test_other_programs_are_credited_by_what_their_results_contain() -> None:
    run = rollout(results=("The inn is old.", "It is 1,380 metres high.", "1380 metres again"))
    assert gains(RIGHT, run) == [0.0, 1.0, 0.0]


def test_steps_without_a_retrieval_are_not_graded() -> None:
    run = rollout(draft(None))
    for step, message in ((run.transitions[1], "no call of the tool 'search'"), (None, "needs a transition")):
        with pytest.raises(NoGrade, match=message):
            retrieval_gain(RIGHT, {"transition": step}, run)
