"""The place of an artifact is checked before a job makes a call, and nothing that exists is written over or through."""

import json
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.errors import ConfigError
from assay.testing import scripted_lm

PROGRAM = """
import dspy


class P(dspy.Module):
    def __init__(self):
        super().__init__()
        self.ask = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.ask(question=question)
"""


@pytest.fixture
def job(own_folder: Path) -> dict[str, Any]:
    Path("p.py").write_text(PROGRAM)
    Path("r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    rows = [{"question": f"How much is {at} and {at}?", "answer": "7"} for at in range(40)]
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    labels = [{"output": f"text {at}", "label": ("no", "yes")[at % 2]} for at in range(60)]
    Path("l.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labels))
    Path("victim").mkdir()
    Path("victim/thesis").write_text("mine")
    lm = scripted_lm(lambda _: json.dumps({"answer": "7"}))
    return {"rubric": "r.yaml", "data": "d.jsonl", "lm": lm}


def compiled(job: dict[str, Any], **options: Any) -> Any:
    return assay.compile("p.py:P", optimizer="labeled", **job, **options)


def tuned(job: dict[str, Any], **options: Any) -> Any:
    return assay.tune("p.py:P", trials=2, **job, **options)


def judged(job: dict[str, Any], **options: Any) -> Any:
    lm = job["lm"]
    return assay.compile_judge(
        "Is it nice?", labels="l.jsonl", lm=lm, scale=["no", "yes"], optimizer="calibrate", **options
    )


def improved(job: dict[str, Any], **options: Any) -> Any:
    more = {name: value for name, value in job.items() if name != "lm"}
    return assay.improve(
        "p.py:P", name="up", order=["prompts"], model="openai/m", api_base="http://127.0.0.1:9/v1", **more, **options
    )


JOBS = {"compile": compiled, "tune": tuned, "judge": judged, "improve": improved}
DEFAULTS = {"compile": "p-labeled", "tune": "p-tuned", "judge": "judge-calibrate", "improve": "up"}


def files() -> dict[str, str]:
    return {str(path): path.read_text() for path in Path().glob("victim*/*")}


@pytest.mark.parametrize("run", JOBS)
@pytest.mark.parametrize("place", ["link", "dangling", "file", "folder", "."])
@pytest.mark.parametrize("resume", [False, True])
def test_a_named_folder_that_exists_or_is_a_link_is_refused_before_any_call(
    run: str, place: str, resume: bool, job: dict[str, Any]
) -> None:
    Path("link").symlink_to(Path("victim").absolute())
    Path("dangling").symlink_to(Path("nowhere").absolute())
    Path("file").write_text("mine")
    Path("folder").mkdir()
    before = sorted(Path().iterdir()), sorted(Path("..").iterdir())
    with pytest.raises(ConfigError):
        JOBS[run](job, out=place, resume=resume)
    assert job["lm"].scripted.calls == 0
    assert files() == {"victim/thesis": "mine"}
    assert (sorted(path for path in Path().iterdir() if path.name != ".assay"), sorted(Path("..").iterdir())) == before


@pytest.mark.parametrize("run", JOBS)
def test_a_link_in_the_place_of_an_artifact_of_the_store_is_refused_before_any_call(
    run: str, job: dict[str, Any]
) -> None:
    Path(".assay/artifacts").mkdir(parents=True)
    (Path(".assay/artifacts") / DEFAULTS[run]).symlink_to(Path("victim").absolute())
    with pytest.raises(ConfigError, match="symbolic link"):
        JOBS[run](job)
    assert job["lm"].scripted.calls == 0
    assert files() == {"victim/thesis": "mine"}


@pytest.mark.slow
def test_an_artifact_of_an_earlier_job_is_never_replaced(job: dict[str, Any]) -> None:
    first = compiled(job)
    second = compiled(job, seed=1)
    assert (first.artifact.name, second.artifact.name) == ("p-labeled", "p-labeled-2")
    named = compiled(job, seed=2, out="a")
    before = (named.artifact / "manifest.json").read_text()
    with pytest.raises(ConfigError, match="exists"):
        compiled(job, seed=3, out="a")
    assert compiled(job, seed=2, out="a", resume=True).artifact == named.artifact
    assert (named.artifact / "manifest.json").read_text() == before
