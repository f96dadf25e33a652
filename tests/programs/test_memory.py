"""Memory: its contract on both databases, its source, splits and tenants, erasure, tools, and `converse` with it."""

import itertools
import json
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dspy
import pytest
import sqlalchemy as sa
from indexed_documents import url as url

from assay.commands.traces import forget_subject
from assay.errors import ConfigError
from assay.programs import Converse, Memory
from assay.testing import scripted_lm
from assay.testing.contracts import MemoryContract
from assay.traces.recorder import Recorder
from assay.traces.records import Rollout, ToolCall, Transition
from assay.traces.store import Store
from assay.traces.store.erasure import erase_subject


def test_the_memory_meets_its_contract(url: str) -> None:
    names = (f"m{number}" for number in itertools.count())
    suite = type("Suite", (MemoryContract,), {"make": lambda self: Memory(url, name=next(names))})
    assert suite.failures() == {}


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        ({"forget": lambda self, fact, subject: True}, "test_a_forgotten_fact_is_not_found_and_stays_in_the_history"),
        ({"recall": lambda self, query, subject, k=5, at=None: []}, "test_a_fact_is_found_by_its_words_and_its_person"),
        (
            {"remember": lambda self, subject, text, about="": Memory.remember(self, subject, text)},
            "test_a_new_value_supersedes_and_overwrites_nothing",
        ),
    ],
)
def test_the_contract_finds_broken_memories(tmp_path: Path, broken: dict[str, Any], test: str) -> None:
    kind = type("Broken", (Memory,), broken)
    names = (f"m{number}" for number in itertools.count())
    suite = type("Suite", (MemoryContract,), {"make": lambda self: kind(tmp_path / "s.db", name=next(names))})
    assert test in suite.failures()


def test_a_fact_has_the_call_that_it_comes_from_and_keeps_tenants_and_names_apart(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        memory = Memory(store)
        rollout = Rollout(tenant="acme")
        rollout.transitions = [Transition(t=t, model="m", request={}) for t in range(3)]
        with Recorder(store).rollout(rollout):
            fact = memory.remember("Ada", "lives in Oslo")
        assert (fact.rollout_id, fact.t) == (rollout.id, 2)
        assert memory.recall("Oslo", subject="Ada") == []
        assert Memory(store, tenant="acme").recall("Oslo", subject="Ada") == [fact]
        assert Memory(store, tenant="acme", name="other").recall("Oslo", subject="Ada") == []
    with pytest.raises(ConfigError, match="name: must not be empty"):
        Memory(tmp_path / "s.db", name="")


def test_sealed_facts_are_not_found_while_learning(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        memory, recorder = Memory(store), Recorder(store)
        for split in ("train", "test"):
            with recorder.rollout(Rollout(split=split)):
                memory.remember("Ada", f"lives in {split}")
        facts = {}
        for split in ("train", "val", "test", ""):
            with recorder.rollout(Rollout(split=split)):
                facts[split] = {fact.text for fact in memory.recall("lives", subject="Ada")}
    both = {"lives in train", "lives in test"}
    assert facts == {"train": {"lives in train"}, "val": {"lives in train"}, "test": both, "": both}


def test_one_of_the_facts_that_processes_tell_at_the_same_time_is_valid(url: str) -> None:
    memories, together = [Memory(url) for _ in range(4)], threading.Barrier(4, timeout=60)

    def tell(process: int) -> None:
        for number in range(8):
            together.wait()
            memories[process].remember("Ada", f"lives in {process}-{number}", about="town")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(tell, range(4)))
    facts = memories[0].history("Ada")
    assert (len(facts), len([fact for fact in facts if fact.valid_to is None])) == (32, 1)


@pytest.mark.postgres
def test_a_fact_of_a_machine_whose_clock_is_ahead_is_found_and_superseded_on_another(
    empty_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 7200)
    ahead = Memory(empty_postgres_url)
    ahead.remember("Ada", "lives in Oslo", about="town")
    monkeypatch.setattr(time, "time", real)
    memory = Memory(empty_postgres_url)
    (fact,) = memory.recall("Oslo", subject="Ada")
    assert memory.recall("Oslo", subject="Ada", at=fact.valid_from) == [fact]
    memory.remember("Ada", "lives in Bergen", about="town")
    assert [fact.text for fact in memory.recall("lives", subject="Ada")] == ["lives in Bergen"]
    before, after = memory.history("Ada")
    assert before.valid_from < after.valid_from == before.valid_to


def test_erasure_of_a_person_removes_facts_of_their_rollouts_and_about_them(url: str) -> None:
    with Store(url) as store:
        memory, recorder = Memory(store), Recorder(store)
        with recorder.rollout(Rollout(data_subject="Ada")):
            memory.remember("Ada", "phone: 555-1", about="phone")
            memory.remember("Ada", "phone: 555-2", about="phone")
            memory.remember("Bob", "Ada says that Bob likes tea")
        with recorder.rollout(Rollout(data_subject="Bob")):
            memory.remember("ADA", "owes Bob ten euros")
            memory.remember("Bob", "likes coffee")
        store.flush()
    report = forget_subject("ada", store=url).to_dict()
    assert (report["removed"], report["facts_removed"]) == (1, 4)
    memory = Memory(url)
    assert memory.history("Ada") == []
    assert [fact.text for fact in memory.history("Bob")] == ["likes coffee"]
    for query in ("phone", "tea", "euros"):
        assert memory.recall(query, subject="Bob") == []


def test_erasure_reaches_rollouts_without_a_subject_in_which_facts_were_recalled(url: str) -> None:
    with Store(url) as store:
        memory = Memory(store)
        memory.remember("Ada", "lives in 12 Elm Street", about="address")
        memory.remember("Bob", "lives in 12 Elm Street too", about="address")

        def recalled(person: str) -> list[ToolCall]:
            (_, recall, _) = memory.tools(person)
            return [ToolCall(name="recall", arguments={"query": "lives"}, result=recall("lives"))]

        def rollout(task: str, subject: str | None, tools: list[ToolCall], request: Any = None) -> None:
            made = Rollout(task_id=task, inputs={"question": task}, data_subject=subject)
            store.put_rollout(made)
            store.put_transition(made.id, Transition(t=0, model="m", request=request or {}, tools=tools))

        rollout("recalled", None, recalled("Ada"))
        rollout("of Bob", None, recalled("Bob"))
        rollout("of Bob by name", "Bob", recalled("Ada"))
        rollout("in a prompt", None, [], {"messages": [{"role": "user", "content": "She lives in 12 Elm Street."}]})
        rollout("neither", None, [])
        store.flush()
        ids = {rollout.task_id: rollout.id for rollout in store.rollouts()}
    report = forget_subject("ada", store=url).to_dict()
    assert (report["removed"], report["facts_removed"]) == (1, 1)
    assert report["quoting_facts"] == sorted(ids[task] for task in ("of Bob", "of Bob by name", "in a prompt"))
    with Store(url) as store:
        assert {rollout.task_id for rollout in store.rollouts()} == ids.keys() - {"recalled"}


def test_erasure_reaches_more_rollouts_than_a_statement_has_parameters(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:

        def limit(connection: Any, _: Any) -> None:
            connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 900)  # 32,766 by default; PostgreSQL has 65,535

        store.engine.dispose()
        sa.event.listen(store.engine, "connect", limit)
        memory = Memory(store)
        memory.remember("Ada", "lives in 12 Elm Street", about="address")
        recall = memory.tools("Ada")[1]
        tools = [ToolCall(name="recall", arguments={"query": "lives"}, result=recall("lives"))]
        for at in range(1000):
            made = Rollout(id=f"{at}", inputs={"question": "?"}, early_tools=tools)
            store.put_rollout(made)
        store.put_rollout(Rollout(id="kept", inputs={"question": "?"}))
        erased = erase_subject(store, "Ada")
        assert (erased.removed, erased.facts) == (1000, 1)
        assert [rollout.id for rollout in store.rollouts()] == ["kept"]


def test_the_words_of_an_erased_fact_leave_the_file(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "s.db")
    memory.remember("Ada", "the passphrase is xylophone")
    memory.remember("Bob", "plays the marimba")
    forget_subject("Ada", store=tmp_path / "s.db")
    with memory.engine.connect() as connection:
        words = b"".join(connection.exec_driver_sql("SELECT block FROM facts_fts_data").scalars())
    assert b"xylophon" not in words
    assert b"marimba" in words
    assert [fact.text for fact in memory.recall("marimba", subject="Bob")] == ["plays the marimba"]


def listening(request: Any) -> str:
    """A model that notes the asked field with the last word of the message, and asks for what is missing."""
    text, asks = request.messages[-1].parts[0].text, list(request.config.response_format["schema"]["properties"])
    parts = dict(part.split(" ## ]]\n", 1) for part in text.split("[[ ## ")[1:])
    parts = {name: value.strip().split("\n")[0] for name, value in parts.items()}
    if "value" in asks:
        return json.dumps({"field": parts["asked"], "value": parts["message"].rstrip(".").rpartition(" is ")[2]})
    if "about" in asks:
        return json.dumps({"about": parts["missing"].split(",")[0]})
    return json.dumps({"question": f"What is the {parts['field']}?"})


def meeting(form: list[str], **facts: Any) -> dict[str, Any]:
    user = {"goal": "Hello.", "facts": facts}
    return {"service": "x", "form": form, "user": user, "person": "Ada", "personal": ["phone"]}


def test_facts_told_in_one_conversation_are_filled_in_in_another(tmp_path: Path) -> None:
    known = {"value": "555-1", "told_before": True}
    program = Converse(memory=Memory(tmp_path / "s.db"))
    with dspy.context(lm=scripted_lm(listening)):
        first = program(**meeting(["phone", "day"], phone="555-1", day="Friday"))
        second = program(**meeting(["phone", "day"], phone=known, day="Monday"))
        without = Converse()(**meeting(["phone", "day"], phone=known, day="Monday"))
    assert first.outcome == {"phone": "555-1", "day": "Friday"}
    assert second.outcome == {"phone": "555-1", "day": "Monday"}  # the day belongs to no person
    assert (second.ended, without.ended) == ("done", "gave_up")
