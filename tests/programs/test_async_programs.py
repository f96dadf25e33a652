"""Asynchronous programs, generators, and the allowed kinds of `forward` in a module."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.errors import ProgramError
from assay.rubrics import Criterion, Rubric
from assay.testing import scripted_lm

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


def test_a_returned_generator_is_refused(file: str) -> None:
    with pytest.raises(ProgramError, match="returned a generator"):
        assay.evaluate(f"{file}:lazily", rubric=right(), data=rows(), lm=scripted_lm(answer))

    def counting(question: str) -> Iterator[str]:
        yield "4"

    with pytest.raises(ProgramError, match="counting is a generator"):
        assay.evaluate(counting, rubric=right(), data=rows(), lm=scripted_lm(answer))


def test_a_module_without_forward_is_refused_by_name(file: str) -> None:
    with pytest.raises(ProgramError, match="Neither has no forward"):
        assay.evaluate(f"{file}:Neither", rubric=right(), data=rows(), lm=scripted_lm(answer))
