"""Finds tasks whose answers a text has memorised: a rare word of the task next to its answer. Calls no model.

Sequences of eight words, see `assay.datasets.keys.overlap`, find copied sentences. They do not find a table that
answers each task by one of its words.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from assay.datasets.keys import folded_text
from assay.datasets.tasks import Task
from assay.support.values import value_text

FEWEST = 3  # memorised tasks from which a text is refused; fewer are there by chance
_NEAR = 12  # words between a word of a task and its answer
_RARE = 2  # tasks that a word is in at most, to tell them from the others
_SHARED = 2  # tasks with one answer, above which the answer is a label
_LABELS = 0.25  # share of the tasks whose labels must be in the text: a rule names some rare words too


def memorised(text: str, tasks: Sequence[Task], *, before: str = "") -> list[str]:
    """Keys of the tasks whose answers a text has memorised; empty for fewer than `FEWEST`.

    A word is rare if it is in the inputs of at most two tasks and not in `before`. Where tasks share their answers, as
    in a classification, general rules have rare words of some tasks next to their labels: there a quarter of the tasks
    must be found.

    Args:
        tasks: those that the text could have been made from.
        before: the text that it replaces; pairs in it do not count.
    """
    words, own = _words(text), set(_words(before))
    if not words or not tasks:
        return []
    places = defaultdict[str, list[int]](list)
    for at, word in enumerate(words):
        places[word].append(at)
    inputs = [set(_words(_text_of(task.inputs))) for task in tasks]
    tasks_with = Counter(word for of_task in inputs for word in of_task)
    answers = [_answers_of(task) for task in tasks]
    shared = Counter(answer for of_task in answers for answer in set(of_task))
    unique, labelled = list[str](), list[str]()
    for task, of_task, of_answer in zip(tasks, inputs, answers, strict=True):
        rare = [word for word in of_task if tasks_with[word] <= _RARE and word in places and word not in own]
        for answer in of_answer:
            if any(_is_near(words, places, word, answer) for word in rare if word not in answer):
                (labelled if shared[answer] > _SHARED else unique).append(task.key)
                break
    fewest = max(FEWEST, math.ceil(_LABELS * len(tasks)))
    found = [*(unique if len(unique) >= FEWEST else []), *(labelled if len(labelled) >= fewest else [])]
    return list(dict.fromkeys(found))


def _is_near(words: Sequence[str], places: Mapping[str, Sequence[int]], word: str, answer: tuple[str, ...]) -> bool:
    """Whether an answer stands at most `_NEAR` words before or after one of the places of a word."""
    starts = [at for at in places.get(answer[0], ()) if tuple(words[at : at + len(answer)]) == answer]
    return any(-_NEAR - len(answer) < start - at <= _NEAR for at in places[word] for start in starts)


def _answers_of(task: Task) -> list[tuple[str, ...]]:
    """The words of each expected output; long ones are found by their sequences of words."""
    texts = (_text_of({name: value}) for name, value in task.expected.items())
    return [answer for text in texts if 0 < len(answer := tuple(_words(text))) <= _NEAR]


def _text_of(values: Mapping[str, Any]) -> str:
    return " ".join(value_text(value) for value in values.values() if value is not None)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", folded_text(text))
