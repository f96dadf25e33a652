"""Threads, asynchronous programs, generators and histories inside a program work as in plain DSPy."""

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import dspy
import pytest
from tqdm.std import tqdm

import assay
from assay.datasets import Task
from assay.errors import ProgramError
from assay.evaluation.evaluation import evaluate
from assay.evaluation.session import RecordedProgram, Session
from assay.models import Meter
from assay.rubrics import Criterion, Rubric
from assay.rubrics.checks import exact
from assay.testing import scripted_lm
from assay.traces import Recorder

TASKS = [Task(id=str(n), inputs={"question": f"q{n}"}, expected={"answer": "3"}, metadata={}) for n in range(4)]


def session(**options: Any) -> Session:
    recorder = Recorder()
    lm = scripted_lm(lambda _: "[[ ## answer ## ]]\n3\n\n[[ ## completed ## ]]", observers=[recorder.observe])
    return Session(lm, Rubric("r", [Criterion(name="right", check=exact)]), recorder, Meter(), **options)


def by_thread(ask: Callable[[int], Any]) -> None:
    threads = [threading.Thread(target=ask, args=(part,)) for part in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def by_pool(ask: Callable[[int], Any]) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(ask, range(3)))


def by_thread_pool(ask: Callable[[int], Any]) -> None:
    with ThreadPool(3) as pool:
        pool.map(ask, range(3))


def by_asyncio(ask: Callable[[int], Any]) -> None:
    async def all_parts() -> None:
        await asyncio.gather(*(asyncio.to_thread(ask, part) for part in range(3)))

    asyncio.run(all_parts())


class Asking(dspy.Module):
    def __init__(self, ask: Callable[[int], Any]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, part: int) -> Any:
        return self.ask(part)


def by_parallel(ask: Callable[[int], Any]) -> None:
    pairs = [(Asking(ask), dspy.Example(part=part).with_inputs("part")) for part in range(3)]
    dspy.Parallel(num_threads=3, disable_progress_bar=True)(pairs)


WAYS = pytest.mark.parametrize("way", [by_thread, by_pool, by_thread_pool, by_asyncio, by_parallel])


class Divided(dspy.Module):
    def __init__(self, way: Callable[..., None]) -> None:
        super().__init__()
        self.part, self.way = dspy.Predict("question, part -> answer"), way

    def forward(self, question: str) -> Any:
        found: list[str] = []
        self.way(lambda part: found.append(self.part(question=question, part=str(part)).answer))
        return {"answer": str(len(found))}


@WAYS
def test_calls_of_a_programs_threads_are_those_of_its_rollout(way: Callable[..., None]) -> None:
    running = session(threads=2)
    evaluation = evaluate(RecordedProgram(Divided(way), running), TASKS, running)
    assert set(evaluation.scores.values()) == {1.0}
    assert set(evaluation.calls.values()) == {3.0}
    assert running.recorder.unrecorded.calls == 0


class Emptied(tqdm):
    """A bar that is made while `dspy.Parallel`, as if in another thread, empties the set of all bars."""

    def __init__(self) -> None:
        by_parallel(str)
        super().__init__(disable=True)


def test_a_program_may_draw_a_bar_while_another_one_starts_parallel_calls() -> None:
    def way(ask: Callable[[int], Any]) -> None:
        Emptied()
        by_parallel(ask)

    running = session(threads=2)
    assert set(evaluate(RecordedProgram(Divided(way), running), TASKS, running).scores.values()) == {1.0}


MODULES = """
import dspy

class Awaited(dspy.Module):
    "Has aforward alone."
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    async def aforward(self, question):
        return await self.answer.acall(question=question)


class Coroutine(Awaited):
    async def forward(self, question):
        return await self.answer.acall(question=question)


class Neither(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def frward(self, question):
        return self.answer(question=question)


async def function(question):
    import asyncio
    await asyncio.sleep(0)
    return {"answer": "4"}


def generator(question):
    yield "4"


async def agenerator(question):
    yield "4"


def lazily(question):
    return (word for word in ["4"])
"""


def answer(request: Any) -> str:
    return json.dumps({"answer": "4"})


def rows(count: int = 12) -> list[dict[str, Any]]:
    return [
        {"question": f"What is {i} + 0?", "answer": "4", "split": ("train", "val", "gate", "test")[i % 4]}
        for i in range(count)
    ]


def right() -> Rubric:
    return Rubric(
        "r", [Criterion(name="right", check=lambda task, prediction, rollout: float(prediction["answer"] == "4"))]
    )


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MODULES)
    return str(tmp_path / "mine.py")


@pytest.mark.parametrize("name", ["Awaited", "Coroutine", "function"])
def test_an_asynchronous_program_is_awaited(file: str, name: str) -> None:
    report = assay.evaluate(f"{file}:{name}", rubric=right(), data=rows(), lm=scripted_lm(answer), prompt_format="json")
    assert report.to_dict()["result"]["score"] == 1.0
    assert report.to_dict()["calls"] == (0 if name == "function" else 3)


def test_an_asynchronous_program_runs_inside_a_running_loop(file: str) -> None:
    async def notebook() -> Any:
        return assay.evaluate(
            f"{file}:Awaited", rubric=right(), data=rows(), lm=scripted_lm(answer), prompt_format="json"
        )

    assert asyncio.run(notebook()).to_dict()["result"]["score"] == 1.0


@pytest.mark.parametrize("name", ["generator", "agenerator"])
def test_generators_are_refused_by_name(file: str, name: str) -> None:
    with pytest.raises(ProgramError, match=f"{name} is a generator"):
        assay.evaluate(f"{file}:{name}", rubric=right(), data=rows(), lm=scripted_lm(answer))


def test_a_module_without_forward_is_refused_by_name(file: str) -> None:
    with pytest.raises(ProgramError, match="Neither has no forward"):
        assay.evaluate(f"{file}:Neither", rubric=right(), data=rows(), lm=scripted_lm(answer))
