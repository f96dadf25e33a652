"""Whether a text answers tasks by heart: a rare word of a task stands near the task's answer.

An n-gram of eight words finds copied sentences (`assay.datasets.keys.overlap`), but not a table that has one word of
each task and its answer. Calls no model.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from assay.datasets.keys import folded_text
from assay.datasets.tasks import Task
from assay.support.values import value_text

MOST_MEMORISED = 2  # tasks that a text may have answered so: with one more it is refused
_NEAR = 8  # words between the rare word and the answer, at most
_LONGEST_ANSWER = 8  # words; a longer answer is found by its n-grams
_LEAST_CHARACTERS = 4  # of a rare word without a digit


def memorised(text: str, tasks: Sequence[Task], *, before: str = "") -> list[str]:
    """Ids of the tasks that a text answers by heart.

    A word is rare if the inputs of one of the tasks have it, and neither the other tasks nor `before`. It must have at
    least 4 characters or a digit, must not be a word of the answer, and stand at most 8 words from the answer.

    Args:
        tasks: those that the author of the text may have seen. Each has a word that no other has, or is not found.
        before: the text that it replaces; what was memorised there is not counted.
    """
    known = set(_words(before))
    words = {task.id: set(_words(" ".join(map(value_text, task.inputs.values())))) for task in tasks}
    counts = Counter(word for found in words.values() for word in found)
    places: dict[str, list[int]] = {}
    written = _words(text)
    for at, word in enumerate(written):
        places.setdefault(word, []).append(at)

    def is_answered(task: Task) -> bool:
        rare = [
            word
            for word in words[task.id] & places.keys() - known
            if counts[word] == 1 and (len(word) >= _LEAST_CHARACTERS or any(map(str.isdecimal, word)))
        ]
        return any(
            _between(at, start, len(answer)) <= _NEAR
            for answer in _answers(task)
            for start in _starts(written, answer, places)
            for word in rare
            if word not in answer
            for at in places[word]
        )

    return [task.id for task in tasks if is_answered(task)]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", folded_text(text))


def _answers(task: Task) -> Iterator[list[str]]:
    for value in task.expected.values():
        answer = _words(value_text(value))
        if 0 < len(answer) <= _LONGEST_ANSWER:
            yield answer


def _starts(written: Sequence[str], answer: Sequence[str], places: dict[str, list[int]]) -> list[int]:
    """Where an answer begins in the text."""
    return [at for at in places.get(answer[0], []) if list(written[at : at + len(answer)]) == list(answer)]


def _between(at: int, start: int, length: int) -> int:
    """Number of words between a place and an answer."""
    return start - at - 1 if at < start else at - start - length
