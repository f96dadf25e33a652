"""Programs given as factories, with constructor arguments, and with other names than `self`."""

from pathlib import Path
from typing import Any

import dspy
import pytest
from own_programs import RUBRIC, answer, rows

import assay
from assay.errors import ProgramError
from assay.programs.loading import load_program
from assay.testing import scripted_lm

PROGRAMS = """
import functools

import dspy

class QA(dspy.Module):
    def __init__(s, k, words=("a",)):
        super().__init__()
        s.depth, s.words = k, list(words)
        s.answer = dspy.Predict("question -> answer")

    def forward(s, question, hint="none"):
        return dspy.Prediction(answer=s.answer(question=question).answer + str(s.depth))

class Later(dspy.Module):
    def __init__(this):
        super().__init__()
        this.first, this.second = dspy.Predict("question -> draft"), dspy.Predict("draft -> answer")

    async def aforward(this, **inputs):
        return await this.second.acall(draft=(await this.first.acall(**inputs)).draft)

def made():
    return QA(3)

def made_with(k, *, words=("b",)):
    return QA(k, words)

class Kinds:
    @classmethod
    def deep(cls, k=8):
        return QA(k)

def made_with_any(**options):
    return QA(**{"k": 1, **options})

prepared = functools.partial(QA, 9, words=["c"])

def solve(question):
    return {"answer": "4"}

def solve_any(**inputs):
    return {"answer": inputs["question"]}

def solve_some(question=None):
    return {"answer": question.upper()}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PROGRAMS)
    (tmp_path / "r.yaml").write_text(RUBRIC)
    rows(tmp_path, 16)
    return tmp_path


def compiled(program: Any) -> Any:
    return assay.compile(program, rubric="r.yaml", data="rows.jsonl", lm=scripted_lm(answer), optimizer="labeled")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mine.py:made", "43"),
        ("mine.py:QA(k=7)", "47"),
        ("mine.py:made_with(k=5, words=['x:y', '(z)'])", "45"),
        ("mine:made_with(k=6)", "46"),
        ("mine.py:Kinds.deep", "48"),
        ("mine.py:Kinds.deep(k=2)", "42"),
        ("mine.py:prepared", "49"),
        ("mine.py:made_with_any", "41"),
    ],
)
def test_factories_and_arguments_in_a_name_build_the_program_and_its_artifact(
    place: Path, name: str, value: str
) -> None:
    report = compiled(name)
    with dspy.context(lm=scripted_lm(answer)):
        assert report.program(question="?").answer == value
        assert assay.load(report.artifact)(question="?").answer == value


@pytest.mark.parametrize("name", ["solve_any", "solve_some"])
def test_a_function_whose_inputs_have_defaults_is_a_program_by_name_and_as_an_object(place: Path, name: str) -> None:
    program = load_program(f"mine.py:{name}")
    for each in (f"mine.py:{name}", program.function):
        report = assay.evaluate(each, rubric="r.yaml", data="rows.jsonl", lm=scripted_lm(answer), split="all")
        assert report.evaluation.report()["failed"] == 0


def test_missing_arguments_are_named_with_a_way_to_give_them(place: Path) -> None:
    with pytest.raises(ProgramError, match=r"mine\.py:QA\(k=…\)"):
        compiled("mine.py:QA")
    for wrong in ("mine.py:QA(3)", "mine.py:QA(k=open('x'))", "mine.py:QA(k=)"):
        with pytest.raises(ProgramError, match="literals"):
            compiled(wrong)
