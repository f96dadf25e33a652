"""Texts that have memorised the answers of tasks."""

import random

import pytest

from assay.datasets import Task
from assay.datasets.memorised import memorised

FIRST = ("ba", "de", "fi", "go", "hu", "ka", "le", "mi", "no", "pu")
LAST = ("lor", "ten", "vas", "zim", "quo", "rus", "hib", "nex")
WORDS = [f"{first}{last}" for first in FIRST for last in LAST]
LABELS = ["billing", "shipping", "returns", "other"]


def tasks(answers: list[str]) -> list[Task]:
    """80 questions with one word of their own each."""
    return [
        Task(id=f"t{n}", inputs={"question": f"What about the {word} of my order?"}, expected={"answer": answer})
        for n, (word, answer) in enumerate(zip(WORDS, answers, strict=True))
    ]


NUMBERS = [str(1000 + 7 * n) for n in range(80)]
SORTED = [LABELS[n % 4] for n in range(80)]
HONEST = """Answer briefly. Read the whole question first, name the order and its state, and say what happens next. If a
question is about money, say what was paid and what is refunded. Do not guess: ask for the order (1021)."""


@pytest.mark.parametrize("answers", [NUMBERS, SORTED])
def test_a_table_of_one_word_of_each_task_is_found(answers: list[str]) -> None:
    known = tasks(answers)
    table = "; ".join(f"{word}: {answer}" for word, answer in zip(WORDS, answers, strict=True))
    assert len(memorised(table, known)) == 80
    assert memorised(HONEST, known) == []
    assert memorised(table, known, before=table) == []


def test_three_tasks_with_answers_of_their_own_are_enough() -> None:
    known = tasks(NUMBERS)
    pairs = [f"for {word} say {number}" for word, number in zip(WORDS, NUMBERS, strict=True)]
    assert memorised(f"{HONEST} {pairs[0]}. {pairs[5]}", known) == []
    assert memorised(f"{HONEST} {pairs[0]}. {pairs[5]}, {pairs[9]}", known) == [known[n].key for n in (0, 5, 9)]


def test_rules_for_labels_may_name_rare_words() -> None:
    rules = f"Questions about {WORDS[0]} and {WORDS[4]} are billing; {WORDS[1]}, {WORDS[5]}: shipping. Others: other."
    assert memorised(rules, tasks(SORTED)) == []


def test_an_answer_far_from_the_word_is_not_its_answer() -> None:
    order = list(range(80))
    random.Random(0).shuffle(order)
    text = " ".join(WORDS) + " and so on " * 20 + " ".join(NUMBERS[n] for n in order)
    assert memorised(text, tasks(NUMBERS)) == []


def test_nothing_is_memorised_without_tasks_or_words() -> None:
    assert memorised("", tasks(NUMBERS)) == memorised(HONEST, []) == []
