"""A sealed task is recognised in every spelling: in exports, prompts and demonstrations."""

import json
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.datasets.tasks import Task
from assay.traces import Rollout, Store, Transition
from assay.traces.export.settings import Gates
from assay.traces.shown import TaskTexts
from assay.traces.store.erasure import erase_subject
from assay.traces.store.sealing import SplitFinder, known_splits, store_tasks

LOOSE = Gates(min_transitions=0, min_clean=0.0, min_task_types=0)
QUESTION = "Which of the two parcels to Ulm weighs 12 kg?"
SPELLINGS: list[dict[str, Any]] = [
    {"question": f" {QUESTION}\n"},
    {"question": QUESTION.lower()},
    {"prompt": QUESTION.upper()},
    {"input": QUESTION.replace(" ", "\u00a0")},
    {"input": "Ｗｈｉｃｈ" + QUESTION[5:]},
    {"prompt": f"Answer in one word.\n\nQ: {QUESTION.upper()}\nA:"},
    {"prompt": f"[[ ## question ## ]]\n{QUESTION.lower()}\n\nRespond with the field `[[ ## answer ## ]]`."},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION.lower()}]},
]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    with Store("s.db") as opened:
        yield opened


def recorded(store: Store, inputs: dict[str, Any], name: str) -> None:
    request = {"dialect": "chat", "body": {"model": "m", "messages": [{"role": "user", "content": json.dumps(inputs)}]}}
    response = {"body": {"choices": [{"message": {"role": "assistant", "content": "7"}, "finish_reason": "stop"}]}}
    call = Transition(t=0, model="m", weights="w", request=request, response=response, output="7")
    rollout = Rollout(
        model="m", status="done", score=1.0, inputs=inputs, task_id=name, group_id=name, source="gateway",
        transitions=[call],
    )  # fmt: skip
    store.put_rollout(rollout)
    store.put_transition(rollout.id, call)


@pytest.mark.parametrize("split", ["gate", "test"])
def test_spellings_of_a_sealed_task_reach_no_export(store: Store, split: str) -> None:
    kept = [{"question": f"How heavy is parcel number {at} to Bonn?"} for at in range(4)]
    store_tasks(store, {split: [Task(id="s", inputs={"question": QUESTION})]})
    store_tasks(store, {"train": [Task(id=str(at), inputs=inputs) for at, inputs in enumerate(kept)]})
    for at, inputs in enumerate(SPELLINGS):
        recorded(store, inputs, f"sealed {at}")
    for at, inputs in enumerate(kept):
        recorded(store, {"question": inputs["question"].upper()}, f"kept {at}")
    store.flush()
    report = assay.export("transitions", "out", store="s.db", gates=LOOSE, privacy="off")
    tasks = {json.loads(line)["task"] for line in (report.path / "data.jsonl").read_text().splitlines()}
    assert tasks == {f"kept {at}" for at in range(4)}
    finder = SplitFinder(store)
    assert {finder.of_inputs(inputs) for inputs in SPELLINGS} <= {split, "test"}
    assert all(finder.knows_as_sealed(inputs) for inputs in SPELLINGS)


def test_a_task_keeps_its_first_split_in_any_spelling(store: Store) -> None:
    first = Task(id="a", inputs={"question": QUESTION, "weight": 12})
    assert store_tasks(store, {"train": [first]}) == {}
    other = Task(id="b", inputs={"weight": "12.0", "question": f"{QUESTION.upper()} "})
    assert store_tasks(store, {"test": [other]}) == {first.key: "train"}
    assert known_splits(store) == {first.key: "train"}


def test_owners_of_all_rows_of_a_task_are_kept(store: Store) -> None:
    owned = Task(id="a", inputs={"question": QUESTION}, metadata={"data_subject": "Ann"})
    store_tasks(store, {"train": [owned, Task(id="b", inputs={"question": QUESTION.lower()})]})
    assert erase_subject(store, "ann").tasks == {owned.key}


def test_a_demonstration_in_another_spelling_shows_the_same_task() -> None:
    texts, one, two = TaskTexts(), {"question": QUESTION}, {"question": QUESTION.upper()}
    key = Task(id="a", inputs=one).key
    for inputs in (one, two):
        texts.add(key, inputs)
    for inputs in (one, two):
        prompt = f"This is an example.\nQuestion: {inputs['question']}\nAnswer: the second"
        assert texts.tasks_in([prompt, "Question: How far is Bonn from Ulm?"]) == (key,)
    assert texts.tasks_in([f"Question: {two['question']}"], own_task=key) == ()
