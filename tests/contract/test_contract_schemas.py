"""What is stored: rubric and judge files, the manifest of an artifact, the tables of a store."""

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from contract_files import Contract

import assay
from assay.errors import AssayError, ConfigError, RubricError
from assay.rubrics import rubric_schema
from assay.traces import Rollout, Transition

JUDGE_KEYS = {
    "name": "mood", "text": "Is it kind?", "scale": ["no", "yes"], "anchors": {"no": "unkind"}, "kind": "ordinal",
    "grades": {"no": 0.0, "yes": 1.0}, "shows": ["output"], "compare": "alone", "reading": "text", "style": "words",
    "reasoning": True, "samples": 2, "min_mass": 0.5, "model": "openai/m",
}  # fmt: skip


def without_prose(schema: Any) -> Any:
    """A JSON schema without titles and descriptions."""
    if isinstance(schema, dict):
        prose = [key for key in ("title", "description") if isinstance(schema.get(key), str)]
        return {key: without_prose(value) for key, value in schema.items() if key not in prose}
    return [without_prose(item) for item in schema] if isinstance(schema, list) else schema


def test_the_schema_of_a_rubric_file_is_unchanged(contract: Contract) -> None:
    contract.check("schemas", "rubric", without_prose(rubric_schema()))


def test_a_judge_file_takes_every_key_and_no_other(own_folder: Path) -> None:
    Path("judge.yaml").write_text(json.dumps(JUDGE_KEYS))
    assert list(assay.load_judge("judge.yaml").labels) == ["no", "yes"]
    Path("judge.yaml").write_text(json.dumps({**JUDGE_KEYS, "sample": 2}))
    with pytest.raises(RubricError):
        assay.load_judge("judge.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "{text: 'Which is better?', scale: [A, tie, B], compare: pairs}",
        "{text: 'Which is best?', compare: list, orders: 2}",
        "{jury: {members: [judge.yaml, judge.yaml], how: majority, weights: [1, 2]}}",
        "{cascade: {first: judge.yaml, second: judge.yaml, least: 0.6}}",
    ],
    ids=["pairs", "list", "jury", "cascade"],
)
def test_every_kind_of_judge_file_loads(text: str, own_folder: Path) -> None:
    Path("judge.yaml").write_text(json.dumps(JUDGE_KEYS))
    Path("kind.yaml").write_text(text)
    assert assay.load_judge("kind.yaml") is not None


@pytest.mark.parametrize("name", assay.rubrics.SHIPPED)
def test_the_criteria_of_a_shipped_rubric_are_unchanged(name: str, contract: Contract) -> None:
    criteria = assay.load_rubric(name).criteria
    contract.check("schemas", f"rubric {name}", {item.name: [item.scope, item.weight] for item in criteria})


@pytest.mark.parametrize("name", ["better_answer", "reports_problem", "right_label", "sentiment"])
def test_the_scale_of_a_shipped_judge_and_what_it_sees_are_unchanged(name: str, contract: Contract) -> None:
    judge = assay.load_judge(name)
    contract.check("schemas", f"judge {name}", {"scale": list(judge.labels), "shows": list(judge.shows)})


@pytest.mark.parametrize(
    "text",
    [
        "name: r\ncriteria: []",
        "name: r\ncriteria:\n- {name: a, check: exact, wieght: 2}",
        "name: r\ncriteria:\n- {name: a, check: exact}\n- {name: a, check: contains}",
        "name: r\ncriteria:\n- {name: a, check: exact, weight: .nan}",
        "name: r\ncriteria:\n- {name: a, check: exact, when: b}",
    ],
    ids=["no criteria", "unknown key", "one name twice", "weight that is not a number", "unknown condition"],
)
def test_a_rubric_that_would_be_misread_is_refused(text: str, own_folder: Path) -> None:
    Path("r.yaml").write_text(text)
    with pytest.raises(RubricError):
        assay.load_rubric("r.yaml")


def test_the_tables_of_a_store_are_unchanged(own_folder: Path, contract: Contract) -> None:
    assay.Store("assay.db").close()
    with contextlib.closing(sqlite3.connect("assay.db")) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            columns = database.execute(f"SELECT name, type, \"notnull\", pk FROM pragma_table_info('{table}')")
            contract.check(
                "store",
                table,
                {
                    name: " ".join([kind, *["not null"] * bool(required), *["key"] * bool(key)])
                    for name, kind, required, key in columns
                },
            )
        contract.check("store", "tables", sorted(tables))


def test_a_store_of_another_version_is_refused_and_left_as_it_is(own_folder: Path) -> None:
    assay.Store("assay.db").close()
    with contextlib.closing(sqlite3.connect("assay.db")) as database:
        database.execute("UPDATE store_revision SET version_num = 'other'")
        database.commit()
    before = Path("assay.db").read_bytes()
    with pytest.raises(AssayError):
        assay.Store("assay.db")
    assert Path("assay.db").read_bytes() == before


def test_a_record_is_read_back_as_it_was_stored(own_folder: Path) -> None:
    call = Transition(
        t=0, model="m", request={"dialect": "chat", "body": {"messages": [{"role": "user", "content": "é\u2028"}]}},
        response={"body": {"choices": []}}, output="4", token_ids=(1, 2), logprobs=(-0.5, -1.0), cost_usd=0.25,
        prompt_tokens=3, completion_tokens=None, step_rewards={"ran": 0.15},
    )  # fmt: skip
    rollout = Rollout(
        id="1" * 32, run_id="r", status="done", program="p", split="train", inputs={"question": "What is 3 + 1?"},
        prediction={"answer": "4"}, score=None, started_at=1.0, ended_at=2.0,
    )  # fmt: skip
    with assay.Store("assay.db") as store:
        store.put_rollout(rollout)
        store.put_transition(rollout.id, call)
        store.flush()
        read = store.rollout(rollout.id)
    assert read.transitions == [call]
    assert (read.inputs, read.prediction, read.score) == (rollout.inputs, rollout.prediction, None)


def test_a_rating_out_of_range_is_refused(own_folder: Path) -> None:
    with assay.Store("assay.db") as store:
        store.put_rollout(Rollout(id="2" * 32, run_id="r", status="done", program="p", inputs={"q": "a"}))
        store.flush()
        with pytest.raises((ConfigError, ValueError)):
            store.rate("2" * 32, 1.5)
