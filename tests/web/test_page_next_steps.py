"""What the pages of evaluations and judges offer next: links and commands that work as they are."""

import html
import re
import shlex
from pathlib import Path
from typing import Any

import click
from judged import put_judge, put_question
from pages import NOW, read, rollout_of_sums

from assay.cli import group
from assay.judges.questions import known_questions, remember
from assay.traces import Store


def commands_of(text: str) -> dict[str, str]:
    pairs = re.findall(r"<dt>([^<]*)</dt><dd><pre tabindex=\"0\">([^<]*)</pre>", text)
    return {words: html.unescape(command) for words, command in pairs}


def parses(command: str) -> bool:
    """Whether the command line knows the command with these arguments and flags. Nothing is run."""
    words = shlex.split(command)[1:]
    found: Any = group
    while isinstance(found, click.Group):
        found = found.get_command(click.Context(found), words.pop(0))
    found.make_context("x", words).close()  # raises a usage error
    return True


def evaluated(store: Store, run: str, at: int, **config: object) -> None:
    shared = {"rubric": "r.yaml", "data": "d.jsonl", "model": "openai/m", "api_base": "http://127.0.0.1:1/v1"}
    store.put_run(
        run, kind="evaluate", config={"program": "sums.py:Sums", **shared, **config}, status="done", started_at=NOW + at
    )
    rollout_of_sums(store, at, run_id=run, phase="evaluate")
    store.flush()


def test_an_evaluation_offers_comparison_labelling_and_commands(store: Store) -> None:
    evaluated(store, "first", 1)
    evaluated(store, "second", 2, program="artifacts/a")
    evaluated(store, "other", 3, data="another.jsonl")
    key = put_question(store)
    remember(store, known_questions(store)[key], "r.yaml:kind")
    text = read(store, "/runs/second")
    assert '<a href="/compare?a=first&amp;b=second"><bdi>sums.py:Sums</bdi></a>' in text
    assert "b=other" not in text
    assert f'<a href="/judges/{key}/label?run=second"><bdi>r.yaml:kind</bdi></a>' in text
    offered = commands_of(text)
    address = "--model openai/m --api-base http://127.0.0.1:1/v1"
    compiling = f"assay compile artifacts/a --rubric r.yaml --data d.jsonl {address}"
    assert offered["Compile the program against this rubric"] == compiling
    assert offered["Test the judge for known failure modes: kind"] == f"assay judge audit r.yaml:kind {address}"
    assert offered["Label outputs for the judge in a terminal: kind"] == "assay judge label r.yaml:kind"
    assert all(parses(command) for command in offered.values())


def test_an_evaluated_artifact_is_offered_tasks_that_it_has_not_seen(store: Store, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    evaluated(store, "run-1", 1, program=str(tmp_path), split="val")
    offered = commands_of(read(store, "/runs/run-1"))
    assert offered["Evaluate it on tasks that its compile has not seen"].endswith("--split gate")


def test_a_judge_run_offers_what_follows_with_its_model(store: Store, tmp_path: Path) -> None:
    config = {"judge": "kind.yaml", "model": "openai/m", "scale": []}
    store.put_run("audit", kind="judge audit", config=config, status="done", started_at=NOW)
    store.flush()
    offered = commands_of(read(store, "/runs/audit", where=tmp_path / "page.db"))
    compiling = "assay judge compile kind.yaml --labels store --model openai/m"
    assert offered["Compile the judge with the labels of the store"] == compiling
    assert offered["Label outputs for the judge in a terminal"] == "assay judge label kind.yaml"
    assert all(parses(command) for command in offered.values())


def test_the_page_of_a_judge_offers_its_source_to_compile_and_its_artifact_to_test(
    store: Store, tmp_path: Path
) -> None:
    key = put_judge(store, tmp_path)
    offered = commands_of(read(store, f"/judges/{key}", where=tmp_path / "page.db"))
    assert "kind.yaml --labels store" in offered["Compile the judge with the labels of the store"]
    assert all(parses(command) for command in offered.values())
    assert "60 anchors, mean difference -0.300" in read(store, "/runs/judge-drift", where=tmp_path / "page.db")
