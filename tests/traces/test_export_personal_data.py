"""Exports without personal data: surrogates, erasure, sealed tasks, names in every part of a file."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from export_rows import LOOSE, add_rollout, exported, store as store, turn

from assay.commands.traces import forget_subject
from assay.datasets.tasks import Task, task_key
from assay.errors import ConfigError
from assay.traces import Store, ToolCall
from assay.traces.export.pipeline import export_traces
from assay.traces.export.settings import ExportConfig, Selection, UngatedExport
from assay.traces.store.sealing import store_tasks


def test_personal_data_becomes_the_same_surrogate_everywhere_and_can_be_restored_with_the_key(
    store: Store, tmp_path: Path
) -> None:
    from assay.traces.privacy.anonymizer import Anonymizer, restore

    secret = "sk-" + "a1B2" * 12
    text = f"I am Ada Lovelace, ada@lovelace.org, key {secret}"
    for task in ("t1", "t2"):
        known = {"data_subject": "Ada Lovelace", "metadata": {"entities": {"person": ["Ada Lovelace"]}}}
        add_rollout(store, turn(0, text, "Dear Ada Lovelace"), task=task, **known)
    rows, manifest = exported(store, "sft", privacy_key=tmp_path / "keys" / "k")
    prompts = {row["prompt"][0]["content"] for row in rows}
    assert len(prompts) == 1
    (hidden,) = prompts
    assert "Lovelace" not in (tmp_path / "out" / "data.jsonl").read_text()
    assert "lovelace.org" not in hidden
    assert secret not in hidden
    assert manifest["privacy"]["state"] != "failed"
    assert manifest["privacy"]["found"]["email"] >= 1
    table = Anonymizer.read_table(tmp_path / "out" / "surrogates.enc", tmp_path / "keys" / "k")
    assert "ada@lovelace.org" in restore(hidden, table)
    assert secret not in json.dumps(table)
    again, _ = exported(store, "sft", "out2", privacy_key=tmp_path / "keys" / "k")
    assert again == rows
    other, _ = exported(store, "sft", "out3")
    assert other[0]["prompt"] != rows[0]["prompt"]
    with pytest.raises(ConfigError, match="key"):
        exported(store, "sft", "out4", privacy_key=tmp_path / "out4" / "k")


def test_an_erased_person_is_in_no_later_export_and_earlier_exports_are_named(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"), task="t-1", data_subject="Ann Smith")
    add_rollout(store, turn(0, "a", "b"), task="t-2", data_subject="bob")
    rows, _ = exported(store, "transitions")
    assert {row["task"] for row in rows} == {"t-1", "t-2"}
    assert "Smith" not in (Path("out") / "manifest.json").read_text()
    named = {name: forget_subject(name, store=store.url) for name in ("ann smit", " ann  smith")}
    assert [any("ann smit'" in line for line in report.warnings()) for report in named.values()] == [True, False]
    erased = named[" ann  smith"].to_dict()
    assert (erased["removed"], erased["made_from_them"]) == (1, [str(Path("out").absolute())])
    rows, _ = exported(store, "transitions", "out2")
    assert {row["task"] for row in rows} == {"t-2"}
    assert forget_subject("ann smith", store=store.url).to_dict()["removed"] == 0
    add_rollout(store, turn(0, "a", "b"), task="t-3", data_subject="Ann Smith")  # of a run that was under way
    rows, manifest = exported(store, "transitions", "out3")
    assert {row["task"] for row in rows} == {"t-2"}
    assert manifest["left_out"] == {"without LM calls or of erased people": 1}


def test_anonymized_values_are_in_no_other_part_of_the_export(store: Store) -> None:
    more = {"task": "ann@smithers.org", "task_type": "mail of ann@smithers.org", "group_id": "g"}
    said = turn(0, "q", "I am Ann Smithers", token_ids=(1,), logprobs=(-1.0,))
    plain = turn(1, "r", "x", token_ids=(2,), logprobs=(-1.0,))
    add_rollout(store, said, plain, data_subject="Ann Smithers", **more)
    add_rollout(store, turn(0, "q", "I am Zed Quimby"), score=0.0, data_subject="Zed Quimby", **more)
    rows, manifest = exported(store, "transitions")
    spelled = [row["token_ids"] for row in sorted(rows, key=lambda row: (-row["score"], row["t"]))]
    assert spelled == [None, [2], None]
    assert manifest["privacy"]["rows_without_token_ids"] == 1
    exported(store, "preferences", "dpo")
    exported(store, "sft", "sft")
    for folder in ("out", "dpo", "sft"):
        texts = [(Path(folder) / name).read_text() for name in ("data.jsonl", "manifest.json", "README.md")]
        assert not any(word in "".join(texts).lower() for word in ("smithers", "quimby")), folder
    add_rollout(store, turn(0, "I am user Jane Doe", "hello"), data_subject="user", run_id="role", task="t2",
                metadata={"entities": {"person": "Jane Doe"}}, task_type="Jane Doe type")  # fmt: skip
    (row,), manifest = exported(store, "sft", "role", selection=Selection(runs=("role",)))
    assert [m["role"] for m in row["prompt"] + row["completion"]] == ["user", "assistant"]  # a person named user
    assert "Jane" not in json.dumps([manifest, row])


COOMBS = "My name is Jason Coombs, and I was billed twice for the yearly plan."
OF_COOMBS = {
    "data subject": {"data_subject": "Jason Coombs"},
    "part of a name": {"data_subject": "Coombs"},
    "entities": {"metadata": {"entities": {"person": ["Coombs"]}}},
    "never run": None,
}


@pytest.mark.parametrize(
    ("kind", "declared"),
    [*(("sft", declared) for declared in OF_COOMBS), ("transitions", "data subject"), ("preferences", "never run")],
)
def test_a_value_that_a_demonstrated_task_declares_is_hidden_too(store: Store, kind: str, declared: str) -> None:
    inputs = {"question": COOMBS}
    if (fields := OF_COOMBS[declared]) is None:
        store_tasks(store, {"train": [Task(id="c", inputs=inputs, metadata={"data_subject": "jason  Coombs"})]})
    else:
        add_rollout(store, turn(0, "a", "b"), task="c", inputs=inputs, **fields)
    for score in (1.0, 0.0):
        ask = f"Q: {COOMBS}\nA: Sorry, Jason Coombs!\nQ: Now?"
        shown = turn(0, ask, f"Answer {score}", shown_tasks=(task_key(inputs),))
        add_rollout(store, shown, task="own", data_subject="Ada Quux", score=score)
    _, manifest = exported(store, kind, privacy="patterns")
    assert "Coombs" not in (Path("out") / "data.jsonl").read_text()
    assert manifest["privacy"]["residual"] == 0
    if declared == "never run":  # and erasure names the export whose prompts show the task
        erased = forget_subject("jason coombs", store=store.url).to_dict()
        assert erased["made_from_them"] == [str(Path("out").absolute())]


@pytest.mark.parametrize("owner", [{"consent": False}, {"tenant": "acme"}, {"data_subject": "Ann", "consent": "no"}])
@pytest.mark.parametrize("inputs", [{"question": COOMBS}, {"prompt": f"[[ ## question ## ]]\n{COOMBS}"}])
def test_the_owner_that_a_file_gave_a_task_holds_for_rollouts_that_name_none(
    store: Store, owner: dict[str, object], inputs: dict[str, str]
) -> None:
    store_tasks(store, {"train": [Task(id="c", inputs={"question": COOMBS}, metadata=owner)]})
    add_rollout(store, turn(0, COOMBS, "b"), task="c", inputs=inputs)
    add_rollout(store, turn(0, "Where?", "Here"), task="other")
    rows, manifest = exported(store, "sft", privacy="off")
    assert [row["prompt"][0]["content"] for row in rows] == ["Where?"]
    assert sum(manifest["left_out"].values()) == 1


def test_an_export_without_anonymization_says_so_and_never_that_it_failed(store: Store) -> None:
    add_rollout(store, turn(0, COOMBS, "b"), task="c", data_subject="Jason Coombs")
    rows, manifest = exported(store, "sft", privacy="off")
    assert rows[0]["prompt"][0]["content"] == COOMBS
    assert (manifest["privacy"]["state"], manifest["privacy"]["verified"]) == ("off", False)
    (gate,) = (gate for gate in manifest["gates"] if gate["gate"] == "privacy")
    assert (gate["value"], gate["passed"]) == ("off", True)
    with pytest.raises(UngatedExport):  # the gate was not switched off
        export_traces(store, "again", ExportConfig(kind="sft", gates=LOOSE, privacy="off"))


def test_a_whole_name_that_any_task_declares_is_hidden_where_no_task_is_recorded_as_shown(store: Store) -> None:
    add_rollout(store, turn(0, "a", "b"), task="c", data_subject="Jason Coombs", split="test")
    add_rollout(store, turn(0, "a", "b"), task="m", data_subject="Mark")
    add_rollout(store, turn(0, f"{COOMBS} Mark the plan.", "Dear JASON\nCOOMBS,"), task="own")
    exported(store, "sft", privacy="patterns")
    text = (Path("out") / "data.jsonl").read_text()
    assert "coombs" not in text.lower()
    assert "Mark the plan" in text  # a single word is replaced only where its task is shown


def test_token_ids_are_removed_if_their_text_was_anonymized(store: Store) -> None:
    call = turn(0, "send it", "", token_ids=(1, 2), logprobs=(-1.0, -1.0))
    call.tools = [ToolCall(name="send", arguments={"to": "jane.doe@corp.com"}, result="sent")]
    add_rollout(store, call)
    message = {
        "role": "assistant",
        "content": None,
        "refusal": "No, jane.doe@corp.com.",
        "reasoning_content": "Is jane.doe@corp.com?",
    }
    refused = turn(0, "Is she kind?", "No, jane.doe@corp.com.", token_ids=(1,), logprobs=(-1.0,))
    refused.response = {"body": {"choices": [{"message": message}]}}
    add_rollout(store, refused, task="t2")
    rows, manifest = exported(store, "transitions")
    assert "jane.doe" not in str(rows)
    assert [(row["token_ids"], row["logprobs"]) for row in rows] == [(None, None)] * 2
    assert manifest["privacy"]["rows_without_token_ids"] == 2
    (row,) = (row for row in rows if row["refusal"])
    assert (row["refusal"], row["reasoning"].startswith("Is ")) == (row["output"], True)
    table = pq.read_table("out/data.parquet").column("reasoning").to_pylist()
    assert table == [row["reasoning"] for row in rows]


def test_columns_of_a_task_are_anonymized_whatever_their_names(store: Store) -> None:
    inputs = {name: f"mail {name}@lovelace.org" for name in ("status", "model", "label", "agent", "question")}
    numbers = {"card": 4111111111111111, "password": "hunter2222", "phone": "2127365000"}
    add_rollout(store, turn(0, "a", "b"), inputs={**inputs, **numbers, "prompt": "mine"})
    (row,), manifest = exported(store, "grpo", rubric="math_qa")
    assert not any(value in json.dumps(row) for value in ("lovelace", *map(str, numbers.values())))
    assert (row["prompt_"], row["prompt"]) == ("mine", [{"role": "user", "content": "a"}])
    assert manifest["privacy"]["state"] != "failed"
