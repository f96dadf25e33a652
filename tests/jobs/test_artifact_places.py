"""Artifacts of jobs: their place is checked before a call, and one that names no model runs with its own."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.commands.collect import Collect
from assay.errors import ConfigError
from assay.jobs.planning import plan_of
from assay.testing import scripted_lm
from rigs.projects import write_project, write_rows
from rigs.serving import ChatServer

MINE = "mine.py:Mine"


@pytest.fixture
def job(own_folder: Path) -> dict[str, Any]:
    write_rows("l.jsonl", [{"output": f"text {at}", "label": ("no", "yes")[at % 2]} for at in range(60)])
    Path("victim").mkdir()
    Path("victim/thesis").write_text("mine")
    return {**write_project(40), "lm": scripted_lm(lambda _: json.dumps({"answer": "7"}))}


def compiled(job: dict[str, Any], **options: Any) -> Any:
    return assay.compile(MINE, optimizer="labeled", **job, **options)


def judged(job: dict[str, Any], **options: Any) -> Any:
    options |= {"lm": job["lm"], "scale": ["no", "yes"], "optimizer": "calibrate"}
    return assay.compile_judge("Is it nice?", labels="l.jsonl", **options)


def improved(job: dict[str, Any], **options: Any) -> Any:
    more = {"rubric": job["rubric"], "data": job["data"], "model": "openai/m", "api_base": "http://127.0.0.1:9/v1"}
    return assay.improve(MINE, name="up", order=["prompts"], **more, **options)


JOBS: dict[str, tuple[Callable[..., Any], str]] = {  # with the name of the artifact
    "compile": (compiled, "mine-labeled"),
    "tune": (lambda job, **options: assay.tune(MINE, trials=2, **job, **options), "mine-tuned"),
    "judge": (judged, "judge-calibrate"),
    "improve": (improved, "up"),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_place_that_exists_or_is_a_link_is_refused_before_any_call(name: str, job: dict[str, Any]) -> None:
    run, default = JOBS[name]
    Path("link").symlink_to(Path("victim").absolute())
    Path("dangling").symlink_to(Path("nowhere").absolute())
    Path("file").write_text("mine")
    Path("folder").mkdir()
    before = sorted(Path().iterdir()), sorted(Path("..").iterdir())
    for place in ("link", "dangling", "file", "folder", "."):
        for resume in (False, True):
            with pytest.raises(ConfigError):
                run(job, out=place, resume=resume)
    assert (sorted(path for path in Path().iterdir() if path.name != ".assay"), sorted(Path("..").iterdir())) == before
    Path(".assay/artifacts").mkdir(parents=True, exist_ok=True)
    (Path(".assay/artifacts") / default).symlink_to(Path("victim").absolute())
    with pytest.raises(ConfigError, match="symbolic link"):
        run(job)
    assert job["lm"].scripted.calls == 0
    assert {str(path): path.read_text() for path in Path().glob("victim*/*")} == {"victim/thesis": "mine"}


@pytest.mark.slow
def test_an_artifact_of_an_earlier_job_is_never_replaced(job: dict[str, Any]) -> None:
    first, second = compiled(job), compiled(job, seed=1)
    assert (first.artifact.name, second.artifact.name) == ("mine-labeled", "mine-labeled-2")
    named = compiled(job, seed=2, out="a")
    before = (named.artifact / "manifest.json").read_text()
    with pytest.raises(ConfigError, match="exists"):
        compiled(job, seed=3, out="a")
    assert compiled(job, seed=2, out="a", resume=True).artifact == named.artifact
    assert (named.artifact / "manifest.json").read_text() == before


# -- models of artifacts

SMALL: dict[str, Any] = {"optimizer": "labeled", "sizes": {"val": 4, "gate": 3, "test": 3}}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    for name in ("OPENAI_API_KEY", "OPENAI_API_BASE", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with ChatServer(lambda body: '{"answer": "4"}').serving() as running:
        yield running


def asking() -> dspy.Module:
    return dspy.Predict("question -> answer")


def test_the_address_of_a_model_object_is_stored_in_the_artifact(job: dict[str, Any], server: ChatServer) -> None:
    job["lm"] = dspy.LM("openai/m", api_base=server.url, api_key="secret-4711", cache=False)
    report = assay.compile(asking(), **SMALL, **job)
    manifest = (report.artifact / "manifest.json").read_text()
    assert json.loads(manifest)["api_base"] == server.url
    assert "secret-4711" not in manifest
    server.bodies.clear()
    assert assay.load(report.artifact, program=asking())(question="What is 2 + 2?").answer == "4"
    assert set(server.models) == {"m"}


@pytest.mark.slow
def test_every_job_on_an_artifact_uses_the_artifacts_model(job: dict[str, Any], server: ChatServer) -> None:
    del job["lm"]
    report = assay.compile(MINE, model="openai/own", api_base=server.url, **SMALL, **job)
    artifact = str(report.artifact)
    server.bodies.clear()
    assert assay.collect(artifact, n=2, sizes={"train": 2}, **job).to_dict()["rollouts"] == 4
    assay.compile(artifact, max_search_calls=4, **SMALL, **job)
    assay.tune(artifact, trials=2, sizes={"val": 2, "gate": 2, "test": 2}, cache=False, **job)
    assert plan_of(Collect(artifact, split="train", **job)).calls > 0
    assert set(server.models) == {"own"}
    server.bodies.clear()
    assay.collect(artifact, n=1, model="openai/other", api_base=server.url, sizes={"train": 2}, **job)
    assert set(server.models) == {"other"}


@pytest.mark.slow
def test_an_artifact_says_that_it_needs_a_model_and_which_tasks_it_was_selected_on(job: dict[str, Any]) -> None:
    artifact = str(assay.compile(asking(), **SMALL, **job).artifact)
    notes = {split: assay.evaluate(artifact, split=split, **job).to_dict()["notes"] for split in ("val", "gate")}
    used = {split: any("were used to compile" in note for note in lines) for split, lines in notes.items()}
    assert used == {"val": True, "gate": False}
    del job["lm"]
    with pytest.raises(ConfigError, match="an object that no name stands for"):
        assay.collect(artifact, **job)


def test_tenant_and_consent_columns_are_used_by_export_filters(job: dict[str, Any]) -> None:
    rows = [
        {"question": f"What is {n} + 0?", "answer": "4", "tenant": "ab"[n % 2], "consent": ["yes", "no"][n % 4 // 2]}
        for n in range(40)
    ]
    assay.collect(asking(), n=1, **{**job, "data": rows})
    with assay.Store() as store:
        owners = {(rollout.tenant, rollout.consent) for rollout in store.rollouts(limit=None)}
    assert owners == {("a", "yes"), ("b", "yes"), ("a", "no"), ("b", "no")}
