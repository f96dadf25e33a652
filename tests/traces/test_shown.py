"""Data subjects of prompts: matching, recording, loaded artifacts."""

import json
from typing import Any

import dspy
import pytest
from shown_tasks import job as job, question, task

import assay
from assay.datasets.tasks import task_key
from assay.programs import make_adapter
from assay.testing import scripted_lm
from assay.traces import Recorder, Rollout, Store
from assay.traces.shown import Carried, TaskTexts


def test_tasks_are_found_by_the_text_of_their_inputs() -> None:
    texts = TaskTexts()
    texts.add("long", {"question": "How many apples has Jane Miller?"})
    texts.add("two", {"a": "first part of it", "b": ["x", "y"]})
    texts.add("short", {"q": "2+2"})
    assert texts.within("Q: How many  apples\thas Jane Miller? A: 3") == {"long"}
    assert texts.within("first part of it") == {"two"}, "a program need not show every column"
    assert texts.within('first part of it\n["x", "y"]') == {"two"}
    assert texts.within("what is 12+22?") == frozenset()  # not a part of another number
    assert texts.within("[[ ## q ## ]]\n2+2\n") == {"short"}
    assert texts.within("q: 2+2") == {"short"}


EXTRAS = [True, None, "", 7, 2.5, "customer-3-id", ["alpha omega", "beta gamma"], {"n": [1, True]}, ["lone text"]]
ANSWERS = {
    "chat": "[[ ## answer ## ]]\nx", "json": '{"answer": "x"}', "lean": "answer: x", "xml": "<answer>x</answer>"
}  # fmt: skip


@pytest.mark.parametrize("kind", ["declared", "text", "not shown"])
@pytest.mark.parametrize("prompt_format", ANSWERS)
def test_demonstrations_are_found_in_every_rendering_of_their_inputs(kind: str, prompt_format: str) -> None:
    adapter = make_adapter(prompt_format)
    for extra in EXTRAS:
        fields: dict[str, Any] = {"question": (str, dspy.InputField())}
        if kind != "not shown":
            declared = str if kind == "text" else Any if extra is None else type(extra)
            fields["extra"] = (declared, dspy.InputField())
        demo, own = (
            {"question": question, "extra": extra} for question in ("Whose file is number 731?", "My own question?")
        )
        recorder = Recorder()
        for inputs in (demo, own):
            recorder.texts.add(task_key(inputs), inputs)
        program = dspy.Predict(dspy.Signature({**fields, "answer": (str, dspy.OutputField())}))
        program.demos = [dspy.Example(**{name: demo[name] for name in fields}, answer="x")]
        rollout, lm = Rollout(inputs=own), scripted_lm(lambda _: ANSWERS[prompt_format], observers=[recorder.observe])
        with dspy.context(lm=lm, adapter=adapter), recorder.active(), recorder.rollout(rollout):
            program(**{name: own[name] for name in fields})
        assert rollout.transitions[0].shown_tasks == (task_key(demo),), extra


@pytest.mark.parametrize(("program", "optimizer"), [("One", "labeled"), ("P", "bootstrap")])
@pytest.mark.slow
def test_calls_record_the_tasks_of_their_demonstrations(job: dict[str, Any], program: str, optimizer: str) -> None:
    made = assay.compile(f"p.py:{program}", optimizer=optimizer, out="a", gate=False, **job)
    with Store(job["store"]) as store:
        stored = [store.rollout(r.id) for r in store.rollouts()]
    checked = 0
    for rollout in stored:
        own_task = task_key(rollout.inputs) if rollout.inputs else ""
        for call in rollout.transitions:
            text = json.dumps(call.request)
            visible = {task(at) for at in range(20) if question(at) in text or f"number {at} of it" in text}
            visible.discard(own_task)
            assert visible <= set(call.shown_tasks), (rollout.phase, call.t)
            checked += bool(visible)
    assert checked > 4
    manifest = json.loads((made.artifact / "manifest.json").read_text())
    assert manifest["shown"]["tasks"]
    assert set(manifest["shown"]["tasks"]) <= {task(at) for at in range(12)}
    assert manifest["shown"]["people"]


def test_only_demonstrations_in_the_prompt_are_shown() -> None:
    river, mountain = (["Which river is it?", "the Aare"], ["t1"]), (["Which mountain is it?", "Eiger"], ["t2"])
    carried = Carried(["t1", "t2", "t3"], [river, mountain])
    assert carried.tasks_in(["You answer.", "question: Which  river is it?", "the Aare"]) == {"t1"}
    assert carried.tasks_in(["You answer."]) == set()
    # the file does not record t3, so it may be included
    assert Carried(["t1", "t3"], [river, (["a", "b"], [])]).tasks_in(["You answer."]) == {"t3"}
    assert Carried(["t1", "t2"]).tasks_in(["You answer."]) == {"t1", "t2"}  # of no demonstration


@pytest.mark.slow
def test_calls_with_nearest_demonstrations_record_only_those_in_the_prompt(job: dict[str, Any]) -> None:
    made = assay.compile("p.py:One", optimizer="KNNFewShot", out="a", gate=False, **job)
    others = [{"question": f"Quite another question, number {at}?", "answer": "7"} for at in range(60)]
    options = {**job, "data": others, "store": "new/s.db", "sizes": {"val": 3}}
    assay.evaluate(str(made.artifact), split="val", **options)
    with Store("new/s.db") as store:
        calls = [call for r in store.rollouts() for call in store.rollout(r.id).transitions]
    every = json.loads((made.artifact / "manifest.json").read_text())["shown"]["tasks"]
    for call in calls:
        text = json.dumps(call.request)
        assert set(call.shown_tasks) == {task(at) for at in range(20) if question(at) in text} < set(every)
    assert any(call.shown_tasks for call in calls)
