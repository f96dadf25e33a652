"""Programs, checks and judges in the user's files: helper modules, names, state after loading."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import dspy
import pytest
from own_programs import RUBRIC, answer, compiled, in_another_place, write_program

import assay
from assay.datasets import make_task
from assay.programs import load_program
from assay.sources.modules import load_source
from assay.testing import scripted_lm


def test_helper_modules_are_imported_and_isolated_between_programs(tmp_path: Path) -> None:
    before = list(sys.path)
    first, second = (load_program(write_program(tmp_path / name, name)) for name in ("one", "two"))
    with dspy.context(lm=scripted_lm(answer)):
        assert [p(question="?").answer for p in (first, second, first)] == [
            "onelateone-deep-1 4",
            "twolatetwo-deep-1 4",
            "onelateone-deep-1 4",
        ]
    assert sys.path == before
    assert "helper" not in sys.modules


def test_checks_and_judges_import_from_their_folder_the_working_directory_and_the_programs(
    tmp_path: Path, monkeypatch: Any
) -> None:
    load_program(write_program(tmp_path / "programs"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "work" / "shared.py").write_text("HERE = 1.0\n")
    (tmp_path / "rubrics").mkdir()
    (tmp_path / "rubrics" / "beside.py").write_text("RIGHT = '4'\n")
    (tmp_path / "rubrics" / "check.py").write_text(
        "import beside, shared\nfrom helper import PREFIX\ndef right(task, prediction, rollout):\n"
        "    return shared.HERE * (prediction['answer'] == PREFIX + beside.RIGHT)\n"
    )
    (tmp_path / "rubrics" / "r.yaml").write_text(
        RUBRIC.replace("contains", "check.py:right").replace("right\n    check", "one\n    check")
    )
    rubric = assay.load_rubric(tmp_path / "rubrics" / "r.yaml")
    task = make_task({"question": "?", "answer": "4"})
    assert rubric.score(task, dspy.Prediction(answer="A4")).value == 1.0
    (tmp_path / "rubrics" / "judging.py").write_text(
        "from shared import HERE\nfrom assay.judges import PointwiseJudge\nmood = PointwiseJudge('Is it kind?')\n"
    )
    assert assay.load_judge(f"{tmp_path}/rubrics/judging.py:mood").labels == ("no", "yes")


DYNAMIC = """
import importlib
from importlib import import_module, resources

import dspy

class QA(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        plugin, deep = importlib.import_module("plugin"), import_module(name="parts.deep")
        marks = [plugin.MARK, deep.MARK, __import__("third").MARK]
        marks.append(importlib.import_module(".near", package=parts_name()).MARK)
        marks.append(importlib.import_module(".near", "parts").MARK)
        return dspy.Prediction(answer=" ".join([*marks, self.answer(question=question).answer]))

def parts_name():
    import parts
    return parts.__name__
"""


def write_dynamic(folder: Path, mark: str) -> str:
    (folder / "parts").mkdir(parents=True)
    (folder / "agent.py").write_text(DYNAMIC)
    (folder / "parts" / "__init__.py").write_text("")
    for name in ("plugin", "third", "parts/deep"):
        (folder / f"{name}.py").write_text(f"MARK = '{mark}'\n")
    (folder / "parts" / "near.py").write_text("MARK = 'near'\n")
    (folder / "parts" / "deep.py").write_text(
        f"from importlib import import_module\nMARK = import_module('.near', __package__).MARK + '{mark}'\n"
    )
    return f"{folder / 'agent.py'}:QA"


def test_modules_imported_by_name_in_a_string_are_isolated_between_programs(tmp_path: Path) -> None:
    first, second = (load_program(write_dynamic(tmp_path / name, name)) for name in ("one", "two"))
    with dspy.context(lm=scripted_lm(answer)):
        assert [p(question="?").answer for p in (first, second, first)] == [
            f"{m} near{m} {m} near near 4" for m in ("one", "two", "one")
        ]
    assert not {"plugin", "third", "parts"} & sys.modules.keys()


@pytest.mark.slow
def test_modules_imported_by_name_in_a_string_are_in_the_artifact(tmp_path: Path) -> None:
    artifact = compiled(write_dynamic(tmp_path / "p", "one"), tmp_path / "out")
    present = {path.name for path in (artifact / "source").rglob("*.py")}
    assert present == {"agent.py", "__init__.py", "plugin.py", "third.py", "deep.py", "near.py"}
    shutil.rmtree(tmp_path / "p")
    text = in_another_place(
        artifact,
        tmp_path / "elsewhere",
        "dspy.configure(lm=dspy.utils.DummyLM([{'answer': '4'}]))\nprint(loaded(question='?').answer)",
    )
    assert text.strip().endswith("one nearone one near near 4")


def test_a_file_named_like_an_installed_module_does_not_shadow_it(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(
        "import json, dspy\nassert json.loads('1') == 1\nqa = dspy.ChainOfThought('question -> answer')\n"
    )
    assert load_program(f"{tmp_path}/json.py:qa").predictors()
    assert json.__name__ == sys.modules["json"].__name__ == "json"


def test_loading_state_does_not_change_a_module_level_program(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("import dspy\nqa = dspy.ChainOfThought('question -> answer')\n")
    program = load_program(f"{tmp_path}/p.py:qa")
    program.predictors()[0].demos = [dspy.Example(question="?", answer="!")]
    assert load_source(tmp_path / "p.py").qa.predictors()[0].demos == []
