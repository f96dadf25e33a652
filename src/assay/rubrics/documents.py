"""Checks of answers from documents. Each is called as `check(task, prediction, rollout, **with)`.

The prediction is that of `answer_from_documents`: `answer`, `abstained`, `citation`, `passages` and `searches`; other
programs may have the same fields. A passage is an `assay.programs.Passage`, a mapping with `text` and `source`, or a
text. Whether the documents have the answer is known from the task's metadata `answerable`,
else from `expected.passages`, `expected.source` or `expected.answer`: an empty one says that they have not.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from assay.datasets import Task
from assay.rubrics.criteria import Grade, NoGrade, NotApplicable, not_expected
from assay.rubrics.steps import plain_text
from assay.support.numbers import with_plain_numbers
from assay.support.sections import without_thoughts
from assay.traces.records import Rollout, Transition

__all__ = ["abstained", "answer_correct", "answer_supported", "retrieval_gain", "retrieved"]

_ABSTENTIONS = re.compile(
    r"\bnot (?:(?:said|mentioned|stated|contained) )?in the (?:documents?|passages?|texts?)\b|\bdo(?:es)? not say\b|"
    r"\b(?:is|are) not (?:stated|mentioned|given|known)\b|\bdo(?:n't| not) know\b|\bcannot be answered\b|"
    r"\bno answer\b|\bunknown\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"(?:(?<![\w)])-(?=\d))?[^\W_]+(?:[.,]\d+)*")
_MOST_WORDS = 10_000  # `_has_words` compares each position


def is_answerable(task: Task) -> bool:
    """Whether the documents have the answer.

    Raises:
        NoGrade: the task does not say it.
    """
    answerable = task.metadata.get("answerable")
    if isinstance(answerable, bool):
        return answerable
    for name in ("passages", "source", "answer"):
        if name in task.expected:
            return task.expected[name] not in ("", None, [], ())
    raise NoGrade(
        f"task {task.id!r} does not say whether the documents have the answer: give expected.answer, source or "
        "passages (empty if they do not), or answerable in its metadata"
    )


def _answer(prediction: Mapping[str, Any]) -> str:
    answer = prediction.get("answer")
    return "" if answer is None or answer == [] else without_thoughts(str(answer))


def has_abstained(prediction: Mapping[str, Any]) -> bool:
    """Whether a prediction says that the documents have no answer: by `abstained`, else by the words of its answer."""
    abstained = prediction.get("abstained")
    if isinstance(abstained, bool):
        return abstained
    answer = _answer(prediction)
    return not answer.strip() or _ABSTENTIONS.search(answer[:1000]) is not None


def words(text: Any) -> list[str]:
    """The words and numbers of a text or of the values in a structure, without case; numbers in one spelling."""
    parts = text.values() if isinstance(text, Mapping) else text if isinstance(text, list | tuple) else None
    if parts is not None:
        return [word for part in parts for word in words(part)][:_MOST_WORDS]
    return _WORD.findall(plain_text(with_plain_numbers(str(text)[:20_000])))[:_MOST_WORDS]


def _has_words(text: Any, part: Any) -> bool:
    """Whether a text has the words of `part` in their order, one after the other."""
    present, wanted = words(text), words(part)
    return bool(wanted) and any(present[at : at + len(wanted)] == wanted for at in range(len(present)))


def _is_right(expected: Any, answer: Any, spare: int) -> bool:
    options = expected if isinstance(expected, list | tuple) else [expected]
    return any(_has_words(answer, option) and len(words(answer)) <= len(words(option)) + spare for option in options)


def answer_correct(task: Task, prediction: dict[str, Any], rollout: Rollout | None, spare_words: int = 8) -> Grade:
    """Grade 1 if the answer has the words of the expected one and at most `spare_words` more; for answerable tasks.

    The limit keeps a copied document from being a right answer. `expected.answer` may be a list of right answers.
    """
    if not is_answerable(task):
        raise NotApplicable("the documents have no answer")
    if "answer" not in task.expected:
        raise not_expected(task, "answer")
    answer = "" if has_abstained(prediction) else _answer(prediction)
    right = _is_right(task.expected["answer"], answer, spare_words)
    return Grade.of(right, f"Expected {task.expected['answer']!r}, found {str(answer)[:200]!r}.")


def abstained(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Grade 1 if the prediction says that the documents have no answer; for tasks whose documents have none."""
    if is_answerable(task):
        raise NotApplicable("the documents have the answer")
    answer = str(prediction.get("answer"))[:200]
    return Grade.of(has_abstained(prediction), f"The documents have no answer, and it is {answer!r}.")


def retrieved(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Recall: share of the expected passages among those that were retrieved; for answerable tasks.

    Expected are `expected.passages` (texts or ids of passages; a retrieved one that contains the text counts), else
    `expected.source` (names of documents, a text or a list).
    """
    if not is_answerable(task):
        raise NotApplicable("the documents have no answer")
    passages = _passages(prediction)
    if wanted := label_texts(task.expected.get("passages")):
        missing = [part for part in wanted if not any(is_passage(passage, part) for passage in passages)]
    elif wanted := label_texts(task.expected.get("source")):
        if passages and not any(passage.get("source") for passage in passages):
            raise NoGrade("the sources of the retrieved passages are unknown: none has a 'source'")
        missing = [name for name in wanted if not any(passage.get("source") == name for passage in passages)]
    else:
        raise not_expected(task, "passages", with_what=" or 'source'")
    reason = f"Not retrieved: {', '.join(part[:100] for part in missing)}." if missing else ""
    return Grade(value=1 - len(missing) / len(wanted), reason=reason)


def expected_sources(task: Task) -> list[str]:
    """Names of the documents that `retrieved` expects; none if it expects passages, or the documents have no answer."""
    try:
        answerable = is_answerable(task)
    except NoGrade:
        return []
    return (
        label_texts(task.expected.get("source"))
        if answerable and not label_texts(task.expected.get("passages"))
        else []
    )


def label_texts(value: Any) -> list[str]:
    """A label that may be one text or a list of them, without empty ones."""
    listed = value if isinstance(value, list | tuple) else [value]
    return [str(part) for part in listed if part not in (None, "")]


def _passages(prediction: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    listed = prediction.get("passages")
    if not isinstance(listed, list | tuple):
        raise NoGrade("the retrieved passages are unknown: the prediction has no field 'passages'")
    return [_passage(entry) for entry in listed]


def _passage(entry: Any) -> Mapping[str, Any]:
    """A passage of a prediction as a mapping.

    Raises:
        NoGrade: it is something else.
    """
    if isinstance(entry, Mapping):
        return entry
    if dataclasses.is_dataclass(entry) and not isinstance(entry, type):
        return dataclasses.asdict(entry)
    if isinstance(entry, str):
        return {"text": entry}
    raise NoGrade(
        f"a passage of the prediction is {str(entry)[:80]!r}: return Passage objects, mappings with 'text' and "
        "'source', or texts"
    )


def _identity(passage: Mapping[str, Any]) -> Any:
    return passage.get("id") or passage.get("text")


def is_passage(passage: Mapping[str, Any], wanted: str) -> bool:
    """Whether a passage has an expected id, or contains an expected text, regardless of case and spaces."""
    return passage.get("id") == wanted or plain_text(wanted) in plain_text(passage.get("text", ""))


def answer_supported(task: Task, prediction: dict[str, Any], rollout: Rollout | None) -> Grade:
    """Support by the cited passage: share of the answer's words and numbers that the passage or the question has.

    0 if the citation was not retrieved or is missing, or if a number of the answer is not in the passage. Does not
    apply if the prediction abstains, or the documents have no answer. A judge can decide about paraphrases instead.
    """
    if not is_answerable(task):
        raise NotApplicable("the documents have no answer")
    if has_abstained(prediction):
        raise NotApplicable("the prediction abstains")
    cited = prediction.get("citation")
    identity = cited if cited is None or isinstance(cited, str) else _identity(_passage(cited))
    passage = next((part for part in _passages(prediction) if identity and _identity(part) == identity), None)
    if passage is None:
        return Grade.of(False, f"The citation {str(identity)[:100]!r} is none of the retrieved passages.")
    answer, known = words(_answer(prediction)), set(words(passage.get("text", "")))
    if not answer:
        return Grade.of(False, "The answer has no words.")
    # a number is never a paraphrase
    if invented := [word for word in answer if word.lstrip("-")[0].isdigit() and word not in known]:
        return Grade.of(False, f"{invented[0]} is not in the cited passage.")
    known |= set(words(list(task.inputs.values())[:1]))  # the first input is the question
    missing = [word for word in answer if word not in known]
    reason = f"Not in the cited passage: {', '.join(missing[:10])}." if missing else ""
    return Grade(value=1 - len(missing) / len(answer), reason=reason)


def retrieval_gain(
    task: Task,
    prediction: dict[str, Any],
    rollout: Rollout | None,
    *,
    tool: str = "search",
    losses: bool = False,
    spare_words: int = 8,
) -> Grade:
    """What a retrieval added: the score of the answer with it minus that of the answer without it. Scope `step`.

    The answers are those that the program would have given before and after the retrieval (`searches`, in their order,
    each with `answer` and `abstained`); before the first one it abstains. An answer scores 1 if it is right, or if it
    abstains and the documents have no answer. Of another program, an answer counts as known from the retrieval on whose
    result has the words of the expected one.

    Args:
        tool: name of the retrieving tool. Steps without a call of it are not graded.
        losses: grade the size of a negative gain instead, for a criterion of negative weight.
    """
    transition = prediction.get("transition")
    if not isinstance(transition, Transition) or rollout is None:
        raise NoGrade("a step check needs a transition of a rollout")
    calls = [(step.t, call) for step in rollout.transitions for call in step.tools if call.name == tool]
    mine = [at for at, (t, _) in enumerate(calls) if t == transition.t]
    if not mine:
        raise NoGrade(f"the step has no call of the tool {tool!r}")
    answerable, searches = is_answerable(task), (rollout.prediction or {}).get("searches")
    if not isinstance(searches, list | tuple) or len(searches) != len(calls):
        results = [call.result or "" for _, call in calls]
        searches = [_answer_known(task, "\n".join(results[: at + 1])) for at in range(len(calls))]

    def score(at: int) -> float:
        draft = {"abstained": True} if at < 0 else searches[at]
        if not answerable:
            return float(has_abstained(draft))
        return float(not has_abstained(draft) and _is_right(task.expected.get("answer"), _answer(draft), spare_words))

    gain = score(mine[-1]) - score(mine[0] - 1)
    return Grade(value=max(0.0, -gain if losses else gain))


def _answer_known(task: Task, results: str) -> dict[str, Any]:
    expected = task.expected.get("answer")
    options = expected if isinstance(expected, list | tuple) else [expected]
    known = next((option for option in options if option is not None and _has_words(results, option)), None)
    return {"answer": known, "abstained": known is None}
