"""Artifacts of programs in the user's files: on other machines, with their files, sources and checks."""

import json
import shutil
from pathlib import Path

import dspy
import pytest
from own_programs import RUBRIC, answer, compiled, in_another_place, rows, source, write_program

import assay
from assay.datasets import make_task
from assay.errors import ArtifactError
from assay.testing import scripted_lm


@pytest.mark.slow
def test_an_artifact_runs_from_another_folder_after_its_program_is_deleted(tmp_path: Path) -> None:
    artifact = compiled(write_program(tmp_path / "p"), tmp_path / "job")
    parts = ["parts/__init__.py", "parts/deep.py", "parts/deeper.py"]
    assert source(artifact) == ["agent.py", "helper.py", "late.py", *parts]
    shutil.rmtree(tmp_path / "p")
    code = (
        "from assay.testing import scripted_lm\n"
        "with dspy.context(lm=scripted_lm(lambda r: '[[ ## answer ## ]]\\n4\\n\\n[[ ## completed ## ]]'), "
        "adapter=dspy.ChatAdapter()):\n    print(loaded(question='?').answer)"
    )
    assert in_another_place(artifact, tmp_path / "far", code) == "AlateA-deep-1 4"
    repeated = compiled(
        str(tmp_path / "far" / "a"), tmp_path / "again"
    )  # and what is compiled from it carries the source on
    shutil.rmtree(tmp_path / "far")
    assert in_another_place(repeated, tmp_path / "farther", code) == "AlateA-deep-1 4"


@pytest.mark.parametrize("wrong", ["changed", "added", "missing"])
def test_changed_source_is_refused_before_it_runs(tmp_path: Path, wrong: str) -> None:
    artifact = compiled(write_program(tmp_path / "p"), tmp_path / "job")
    helper = artifact / "source" / "helper.py"
    if wrong == "missing":
        helper.unlink()
    else:
        target = helper if wrong == "changed" else artifact / "source" / "random.py"
        target.write_text("raise SystemExit('ran')\n")
    with pytest.raises(ArtifactError, match=r"source/(helper|random)\.py"):
        assay.load(artifact)


READER = """
import json
from pathlib import Path

import dspy

HERE = Path(__file__).parent
PROMPT = (HERE / "prompt.txt").read_text()

class QA(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict(dspy.Signature("question -> answer", PROMPT))

    def forward(self, question):
        suffix = json.loads((HERE / "conf" / "suffix.json").read_text())
        for name in (".env", "api_secret.txt", "rows.db", "rows.jsonl"):
            if (HERE / name).exists():
                (HERE / name).read_bytes()
        (HERE.parent / "above.txt").read_text() if (HERE.parent / "above.txt").exists() else ""
        return dspy.Prediction(answer=self.answer(question=question).answer + suffix)
"""


def write_reader(folder: Path) -> str:
    (folder / "conf").mkdir(parents=True)
    (folder / "agent.py").write_text(READER)
    (folder / "prompt.txt").write_text("Add up.")
    (folder / "conf" / "suffix.json").write_text('"!"')
    (folder / "other.txt").write_text("nobody reads it")
    return f"{folder / 'agent.py'}:QA"


@pytest.mark.slow
def test_files_that_the_program_reads_are_in_its_artifact(tmp_path: Path) -> None:
    artifact = compiled(write_reader(tmp_path / "p"), tmp_path / "job")
    assert source(artifact) == ["agent.py", "conf/suffix.json", "prompt.txt"]
    shutil.rmtree(tmp_path / "p")
    code = (
        "dspy.configure(lm=dspy.utils.DummyLM([{'answer': '4'}]))\n"
        "print(loaded(question='?').answer, loaded.predictors()[0].signature.instructions)"
    )
    assert in_another_place(artifact, tmp_path / "far", code) == "4! Add up."


def test_secrets_data_and_outside_files_are_reported_and_not_copied(tmp_path: Path) -> None:
    name = write_reader(tmp_path / "p")
    for secret in (".env", "api_secret.txt", "rows.db"):
        (tmp_path / "p" / secret).write_text("KEY=1")
    (tmp_path / "above.txt").write_text("outside")
    (tmp_path / "r.yaml").write_text(RUBRIC)
    report = assay.compile(
        name, rubric=tmp_path / "r.yaml", data=rows(tmp_path / "p"), out=tmp_path / "artifact", lm=scripted_lm(answer),
        optimizer="labeled", portable=False,
    )  # fmt: skip
    assert source(report.artifact) == ["agent.py", "conf/suffix.json", "prompt.txt", "rows.db"]
    assert any("above.txt" in note for note in report.to_dict()["notes"])
    for file in (".env", "api_secret.txt", "rows.jsonl"):
        assert any(f"reads {file}, which its artifact does not contain" in note for note in report.to_dict()["notes"])
    assert "api_secret.txt" in (report.artifact / "report.md").read_text()


def test_an_artifact_contains_the_rubrics_checks_and_judges_with_hashes(tmp_path: Path) -> None:
    artifact = compiled(write_program(tmp_path / "p"), tmp_path / "job")
    files = json.loads((artifact / "manifest.json").read_text())["rubric_files"]
    assert sorted(files) == ["code/0/check.py", "rubric.yaml"]
    shutil.rmtree(tmp_path / "p")
    (tmp_path / "job" / "check.py").unlink()
    rubric = assay.load_rubric(artifact / "rubric" / "rubric.yaml")
    assert rubric.score(make_task({"question": "?", "answer": "4"}), dspy.Prediction(answer="4")).value == 1.0
    (artifact / "rubric" / "code" / "0" / "check.py").write_text(
        "def right(task, prediction, rollout):\n    return 1.0\n"
    )
    with pytest.raises(ArtifactError, match=r"rubric/code/0/check.py was changed"):
        assay.load(artifact)
