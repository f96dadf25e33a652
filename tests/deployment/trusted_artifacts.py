"""Artifacts of another user, and the list of those that the user trusts."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import dspy
import pytest

from assay.deployment import save_artifact
from assay.programs import load_program
from assay.sources.artifact_files import hash_of_manifest, hash_of_text
from assay.sources.trust import trust_file

AGENT = """
import pathlib
import dspy
pathlib.Path({mark!r}).touch()

class QA(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.answer(question=question)
"""


SETTINGS: dict[str, Any] = {"adapter": None, "parameters": {}}
MATH_QA = {"program": "math_qa", "settings": {"adapter": "json", "parameters": {}}}


@pytest.fixture(autouse=True)
def trust_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("ASSAY_HOME", raising=False)
    return trust_file()


def forged(artifact: Path, **changes: Any) -> Path:
    """The artifact with other values in its manifest, and valid hashes."""
    place = artifact / "manifest.json"
    manifest = {**json.loads(place.read_text()), **changes}
    place.write_text(json.dumps({**manifest, "sha256": hash_of_manifest(manifest)}))
    return artifact


def with_state(artifact: Path, state: dict[str, Any], **changes: Any) -> Path:
    """The artifact with another state, and valid hashes."""
    text = json.dumps(state)
    (artifact / "program.json").write_text(text)
    files = json.loads((artifact / "manifest.json").read_text())["files"]
    return forged(artifact, files={**files, "program.json": hash_of_text(text)}, **changes)


def with_rubric(artifact: Path, criterion: str) -> Path:
    """A rubric of one criterion in the artifact, with valid hashes."""
    path, text = artifact / "rubric" / "rubric.yaml", f"name: r\ncriteria:\n- {{name: right, {criterion}}}\n"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    forged(artifact, rubric_files={"rubric.yaml": hashlib.sha256(text.encode()).hexdigest()})
    return path


def shipped(folder: Path, **changes: Any) -> Path:
    """An artifact of a shipped program, which needs no trust."""
    program = load_program("math_qa")
    settings = {"adapter": "json", "parameters": program.agent_parameters.model_dump()}
    manifest = {"program": "math_qa", "model": "scripted/model", "settings": settings}
    written = save_artifact(folder, program, manifest, splits={}, report="")
    return forged(written, **changes) if changes else written


def of_predict(folder: Path, signature: str = "q -> a") -> Path:
    manifest = {"program": "dspy:Predict", "model": "openai/m", "settings": SETTINGS}
    return save_artifact(folder, dspy.Predict(signature), manifest, splits={}, report="")


def of_judge(folder: Path, judge: Any, **more: Any) -> Path:
    name = f"assay.judges:{type(judge).__name__}"
    manifest = {"program": name, "kind": "judge", "model": "scripted/model", "settings": SETTINGS}
    return save_artifact(folder, judge, manifest, splits={}, report="", **more)


def with_source(folder: Path, text: str = AGENT, name: str = "QA", **more: Any) -> tuple[Path, Path]:
    """An artifact of another user, with source, and the file that its code creates when it runs."""
    mark = folder.with_name("ran")
    source = folder.with_name("theirs") / "agent.py"
    source.parent.mkdir()
    source.write_text(text.format(mark=str(mark)))
    manifest = {"program": f"{source}:{name}", "model": "scripted/model", "settings": SETTINGS, **more}
    written = save_artifact(folder, load_program(f"{source}:{name}"), manifest, splits={}, report="")
    mark.unlink()
    trust_file().unlink()
    shutil.rmtree(source.parent)
    return written, mark
