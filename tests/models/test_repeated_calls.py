"""Equal calls of one rollout: answers of their own, replayed in order; none is asked twice at temperature 0."""

import itertools
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dspy
import pytest

from assay.datasets import Task
from assay.evaluation.session import RecordedProgram, Session
from assay.models import Meter, ResponseCache
from assay.rubrics import Criterion, Rubric
from assay.rubrics.checks import exact
from assay.testing import scripted_lm
from assay.traces import Recorder

TASK = Task(id="t", inputs={"question": "How many?"}, expected={"answer": "1"}, metadata={})


class Repeating(dspy.Module):
    """Asks the same question three times; its answer is the three answers as JSON."""

    def __init__(self, way: Callable[[Callable[[], str]], list[str]], **config: Any) -> None:
        super().__init__()
        self.ask, self.way, self.config = dspy.Predict("question -> answer"), way, config

    def forward(self, question: str) -> Any:
        answers = self.way(lambda: str(self.ask(question=question, config=self.config).answer))
        return {"answer": json.dumps(answers)}


def in_turn(ask: Callable[[], str]) -> list[str]:
    return [ask() for _ in range(3)]


def in_pool(ask: Callable[[], str]) -> list[str]:
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda _: ask(), range(3)))


def answers(
    program: dspy.Module,
    cache: ResponseCache | None,
    *,
    sample: int | None = None,
    script: Any = None,
    retries: int = 0,
) -> tuple[list[str], int]:
    """The three answers, and the number of calls that the model answered."""
    numbers = itertools.count()
    recorder = Recorder()
    counting = script or (lambda _: f"[[ ## answer ## ]]\n{sample}/{next(numbers)}\n\n[[ ## completed ## ]]")
    lm = scripted_lm(counting, cache=cache, observers=[recorder.observe], num_retries=retries)
    session = Session(lm, Rubric("r", [Criterion(name="right", check=exact)]), recorder, Meter())
    with session.context():
        run = RecordedProgram(program, session, sample=sample).run(TASK)
    return json.loads(run.prediction.answer), lm.scripted.calls


WAYS = pytest.mark.parametrize("way", [in_turn, in_pool])


@WAYS
@pytest.mark.parametrize("config", [{"temperature": 1.0}, {}])
def test_equal_calls_get_answers_of_their_own_and_are_replayed(
    way: Callable[..., Any], config: dict[str, Any], tmp_path: Path
) -> None:
    program = Repeating(way, **config)
    first, calls = answers(program, ResponseCache(tmp_path / "c"))
    again, calls_again = answers(program, ResponseCache(tmp_path / "c"))
    assert (len(set(first)), calls, calls_again) == (3, 3, 0)
    assert sorted(again) == sorted(first)
    if way is in_turn:
        assert again == first


@WAYS
def test_samples_have_repeats_of_their_own(way: Callable[..., Any], tmp_path: Path) -> None:
    cache, program = ResponseCache(tmp_path / "c"), Repeating(way, temperature=1.0)
    found = [answers(program, cache, sample=sample)[0] for sample in (None, 1, 2)]
    assert len({answer for repeats in found for answer in repeats}) == 9


@WAYS
def test_at_temperature_0_an_equal_call_is_answered_from_the_cache(way: Callable[..., Any], tmp_path: Path) -> None:
    found, calls = answers(Repeating(way, temperature=0.0), ResponseCache(tmp_path / "c"))
    assert (len(set(found)), calls) == (1, 1)


def answer(text: str) -> str:
    return f"[[ ## answer ## ]]\n{text}\n\n[[ ## completed ## ]]"


def test_a_call_that_is_sent_again_after_an_error_is_the_same_call(tmp_path: Path) -> None:
    numbers = itertools.count()

    def failing_once(_: Any) -> Any:
        number = next(numbers)
        return ConnectionError("down") if number == 1 else answer(str(number))

    def patient(ask: Callable[[], str]) -> list[str]:
        found: list[str] = []
        while len(found) < 3:
            try:
                found.append(ask())
            except Exception:
                continue
        return found

    cache = ResponseCache(tmp_path / "c")
    first, calls = answers(Repeating(patient, temperature=1.0), cache, script=failing_once)
    again, calls_again = answers(Repeating(in_turn, temperature=1.0), cache)
    assert (first, calls, calls_again) == (again, 4, 0)


def test_a_killed_rollout_is_continued_with_its_next_answer(tmp_path: Path) -> None:
    cache, program = ResponseCache(tmp_path / "c"), Repeating(lambda ask: [ask()], temperature=1.0)
    first, _ = answers(program, cache)
    program.way = in_turn
    again, calls = answers(program, cache, script=lambda _: answer(f"new {threading.get_ident()}"))
    assert again[0] == first[0]
    assert calls == 2


def test_several_completions_of_equal_calls_differ(tmp_path: Path) -> None:
    class Several(Repeating):
        def forward(self, question: str) -> Any:
            found = [
                text
                for _ in range(2)
                for text in self.ask(question=question, config={"n": 3, "temperature": 1.0}).completions.answer
            ]
            return {"answer": json.dumps(found)}

    found, calls = answers(Several(in_turn), ResponseCache(tmp_path / "c"))
    assert (len(set(found)), calls) == (6, 6)
