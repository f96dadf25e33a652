"""Rows that `assay run` and `assay.record` get keep their owner: exports and erasure depend on it."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.commands.run import Predictor
from assay.commands.traces import forget_subject
from assay.datasets.tasks import Task
from assay.jobs.recording import opened_store
from assay.testing import scripted_lm
from assay.traces import Rollout, Store
from assay.traces.records import subject_digest
from rigs.command_line import assay_command
from rigs.projects import write_rows

PROGRAM = """
import dspy


class Repeat(dspy.Module):
    def forward(self, question):
        return dspy.Prediction(answer=question)


class Ours(dspy.Module):
    def forward(self, question, tenant):
        return dspy.Prediction(answer=tenant)
"""
OWNERS = {"data_subject": "Ada Quux", "tenant": "acme", "consent": "no"}
ADDRESS: dict[str, Any] = {"model": "openai/none", "api_base": "http://127.0.0.1:9"}
LONG = "My name is Ada Quux, and parcel 4711 for Elm Street 12 never arrived."


@pytest.fixture(autouse=True)
def program(own_folder: Path) -> None:
    (own_folder / "p.py").write_text(PROGRAM)


def stored() -> list[Rollout]:
    with Store() as store:
        return [whole for row in store.rollouts() if (whole := store.rollout(row.id)) is not None]


def run(file: str, *flags: str, stdin: str = "") -> None:
    words = ["run", "p.py:Repeat", "--file", file, "--model", ADDRESS["model"], "--api-base", ADDRESS["api_base"]]
    done = assay_command(*words, *flags, stdin=stdin)
    assert done.code == 0, done.stderr


def owner_of(rollout: Rollout) -> dict[str, Any]:
    return {name: getattr(rollout, name) for name in OWNERS}


ROWS: dict[str, dict[str, Any]] = {
    "flat": {"question": LONG, "answer": "x", **OWNERS},
    "boolean consent": {"question": LONG, **OWNERS, "consent": False},
    "structured": {"inputs": {"question": LONG}, "expected": {"answer": "x"}, **OWNERS},
    "in the metadata": {"inputs": {"question": LONG}, "metadata": OWNERS},
}


@pytest.mark.parametrize("form", ROWS)
def test_a_row_of_run_has_the_owner_that_evaluate_stores_and_is_erased_with_them(form: str) -> None:
    run(write_rows("d.jsonl", [ROWS[form]]))
    assert [owner_of(rollout) for rollout in stored()] == [OWNERS]
    report = forget_subject("Ada Quux").to_dict()
    assert (report["removed"], report["not_searched"]["tasks_without_texts"]) == (1, 0)
    assert stored() == []


def test_rows_of_csv_files_and_standard_input_have_their_owner_too() -> None:
    run(write_rows("d.csv", [{"question": LONG, **OWNERS}]))
    run("-", stdin=json.dumps(ROWS["flat"]))
    assert [owner_of(rollout) for rollout in stored()] == [OWNERS, OWNERS]


def test_an_input_with_the_name_of_an_owner_is_the_owner_too() -> None:
    assay.run("p.py:Ours", {"question": LONG, "tenant": "acme"}, **ADDRESS)
    assert [rollout.tenant for rollout in stored()] == ["acme"]


def test_a_row_of_run_keeps_personal_values_task_type_and_split_and_no_other_column() -> None:
    row = {**ROWS["structured"], "metadata": {"entities": {"person": "Ada"}}, "task_type": "mail", "split": "test"}
    run(write_rows("d.jsonl", [row]))
    (rollout,) = stored()
    assert rollout.metadata["entities"] == {"person": "Ada"}
    assert (rollout.task_type, rollout.split, rollout.expected) == ("mail", "test", {})


def test_a_recorded_task_has_the_owner_of_its_metadata_unless_another_is_named() -> None:
    task = Task(id="a", inputs={"question": LONG}, metadata={**OWNERS, "consent": False})
    with assay.record(task) as run:
        run.answer("yes")
    with assay.record(task, tenant="other") as run:
        run.answer("yes")
    opened_store(None)[0].flush()
    found = sorted((owner_of(rollout) for rollout in stored()), key=str)
    assert found == sorted([OWNERS, {**OWNERS, "tenant": "other"}], key=str)


def test_an_erasure_names_the_files_of_predictions_and_those_that_hold_the_text() -> None:
    run(write_rows("d.jsonl", [ROWS["flat"]]), "--out", "p.jsonl")
    report = forget_subject("Ada Quux").to_dict()
    out, data = (str(Path(name).absolute()) for name in ("p.jsonl", "d.jsonl"))
    assert report["made_from_them"] == [out]
    assert sorted(report["holding"]) == [data, out]
    assert LONG in Path("p.jsonl").read_text()  # it is the user's


def test_an_erasure_names_what_a_stopped_run_has_written() -> None:
    outputs = (Path("out.jsonl"), Path("out.jsonl.part"))
    with suppress(KeyboardInterrupt), Predictor("p.py:Repeat", **ADDRESS).predictor(outputs=outputs) as predict:
        predict(ROWS["flat"], where="d.jsonl:1")
        outputs[1].write_text("{}\n")
        raise KeyboardInterrupt
    assert forget_subject("Ada Quux").to_dict()["made_from_them"] == [str(outputs[1].absolute())]


def test_an_erasure_names_the_data_files_of_jobs_and_exported_traces() -> None:
    row = {**ROWS["flat"], "consent": "yes"}
    rows = [{**row, "question": f"{at} {LONG}", "split": split} for at, split in enumerate(("train", "val", "gate"))]
    write_rows("d.jsonl", rows)
    assay.evaluate("p.py:Repeat", rubric="exact", data="d.jsonl", split="val", lm=scripted_lm(str))
    assert assay_command("traces", "export", "otlp", "spans.jsonl", "--tenant", "acme").code == 0
    report = forget_subject("Ada Quux").to_dict()
    spans, data = (str(Path(name).absolute()) for name in ("spans.jsonl", "d.jsonl"))
    assert spans in report["made_from_them"]
    assert {spans, data} <= set(report["holding"])


def test_running_the_rows_of_a_data_set_leaves_its_people_known() -> None:
    write_rows("d.jsonl", [{"question": LONG}])
    with Store() as store:
        store.put_artifact(str(Path("d.jsonl").resolve()), [subject_digest("Ada Quux")])
    run("d.jsonl")
    assert forget_subject("Ada Quux").to_dict()["made_from_them"] == [str(Path("d.jsonl").absolute())]
