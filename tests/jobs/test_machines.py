"""Jobs of several machines on one store: one runs a job at a time, and who lost it changes nothing any more."""

import json
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import dspy
import pytest
import sqlalchemy as sa

import assay
from assay.commands.cycle import usage_since
from assay.commands.traces import list_rollouts
from assay.errors import ConfigError, FailureKind
from assay.evaluation import SilentProgress
from assay.jobs.members import settle_killed
from assay.jobs.opening import job_lease, new_run_id
from assay.jobs.studies import check_lease
from assay.jobs.trainings import open_training
from assay.models import Caps
from assay.models.unrecorded import Unrecorded
from assay.optimizers.parameters import SearchConfig, Space, open_study
from assay.support.addresses import DatabaseAddress
from assay.testing import scripted_lm
from assay.traces import Rollout, Store, Transition
from assay.traces.resuming import ledger_of, spent_in
from assay.traces.store.leases import LostLease, acquire
from assay.traces.store.listing import list_runs
from assay.traces.store.shares import CapShare, members_of
from assay.traces.store.tables import leases
from rigs.projects import write_project

CONFIG = {"algorithm": "sft", "rows": 3}


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def where(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return request.getfixturevalue("empty_postgres_url") if request.param == "postgresql" else str(tmp_path / "s.db")


def end_leases(store: Store) -> None:
    """As if the time of all leases had run out."""
    with store.engine.begin() as connection:
        connection.execute(sa.update(leases).values(until=0.0))


@pytest.mark.postgres
def test_a_job_that_runs_on_one_machine_is_refused_on_another(
    empty_postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for machine in ("one", "two"):
        (tmp_path / machine).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    with open_training(CONFIG, name="warm", progress=SilentProgress(), store=empty_postgres_url) as first:
        monkeypatch.chdir(tmp_path / "two")
        with (
            pytest.raises(ConfigError, match=r"running already on .+:\d+ since 20"),
            open_training(CONFIG, name="warm", progress=SilentProgress(), store=empty_postgres_url, resume=True),
        ):
            pass
        monkeypatch.chdir(tmp_path / "one")
    monkeypatch.chdir(tmp_path / "two")
    with open_training(CONFIG, name="warm", progress=SilentProgress(), store=empty_postgres_url) as second:
        assert (first.run_id[-2:], second.run_id[-2:]) == ("-1", "-2")


def test_a_job_that_was_killed_is_resumed_at_once_where_it_ran(where: str) -> None:
    with open_training(CONFIG, name="warm", progress=SilentProgress(), store=where) as first:
        pass
    with Store(where) as store:  # a killed process gives nothing back
        with store.engine.begin() as connection:
            later = leases.c.until + 1e9 + time.monotonic()
            connection.execute(sa.update(leases).values(until=later, length_s=2e9 + time.time()))
        store.put_run(first.run_id, kind="train", config=CONFIG, status="running", started_at=1.0)
    with open_training(CONFIG, name="warm", progress=SilentProgress(), store=where, resume=True) as second:
        assert second.run_id == first.run_id


@pytest.mark.postgres
def test_a_process_that_is_paused_while_it_writes_does_not_keep_its_job_from_others(
    empty_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assay.traces.store.connection.IDLE_MS", 100)
    with Store(empty_postgres_url) as paused, Store(empty_postgres_url) as other:
        lease = acquire(paused.engine, "job:x", 0.0)
        assert lease is not None
        paused.belong_to(lease)

        def stand_still() -> None:
            with paused.changing() as connection:
                assert acquire(other.engine, "job:x", 60.0) is not None
                connection.execute(sa.select(leases))

        with pytest.raises(sa.exc.DBAPIError, match="idle-in-transaction"):
            stand_still()
        with pytest.raises(LostLease), paused.changing():
            pass


def test_a_folder_that_two_machines_see_gives_neither_the_lease_of_the_other(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(where) as store:
        engine, home = store.engine, Path(".assay")
        with job_lease(engine, store.id, home, "x"):
            (lock,) = (home / "runs").glob("*.lock")
            lock.unlink()  # as if the file system did not lock
            monkeypatch.setattr("assay.jobs.opening.this_machine", lambda: "another one")
            with pytest.raises(ConfigError, match="running already"), job_lease(engine, store.id, home, "x"):
                pass
        with job_lease(engine, store.id, home, "x"):  # it was given back
            pass


def test_stores_that_were_created_in_the_same_minute_share_no_lock_in_a_folder(tmp_path: Path) -> None:
    with (
        Store(tmp_path / "a.db") as one,
        Store(tmp_path / "b.db") as other,
        job_lease(one.engine, one.id, tmp_path, "x"),
        job_lease(other.engine, other.id, tmp_path, "x"),
    ):
        assert len(list((tmp_path / "runs").glob("*.lock"))) == 2


def test_a_training_that_lost_its_job_stops_and_changes_its_run_no_more(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assay.jobs.opening.LEASE_S", 1.0)
    begun = []

    def train() -> None:
        with open_training(CONFIG, name="warm", progress=SilentProgress(), store=where) as run:
            begun.append(run.run_id)
            with Store(where) as store, store.engine.begin() as connection:
                connection.execute(sa.update(leases).values(token="of the next one"))
            assert run.log is not None
            for step in range(100):
                run.log.values(step, {"loss": 1.0}, {})
                time.sleep(0.1)

    with pytest.raises(LostLease, match="taken this job over"):
        train()
    with Store(where) as store:
        assert store.run_row(begun[0])["status"] == "running"  # as the next one left it


@pytest.mark.parametrize("ledger", [False, True], ids=["without its ledger", "by its ledger"])
def test_what_a_killed_process_of_a_job_used_is_counted(where: str, ledger: bool) -> None:
    if not ledger and where.startswith("postgres"):
        pytest.skip("a server has the ledger")
    caps = Caps(calls=100)
    with Store(where) as store:
        for run in ("job-1", "helper-1"):
            assert store.reserve_run(run, kind="tune", started_at=1.0)
        leader, helper = CapShare(store.engine, "job-1", "job-1"), CapShare(store.engine, "job-1", "helper-1")
        lease = acquire(store.engine, "job:helper", 0.0)
        assert lease is not None
        leader.reserve({"calls": 10}, caps)
        helper.reserve({"calls": 3}, caps)
        store.put_rollout(Rollout(id="r", run_id="helper-1", phase="search", status="running"))
        store.put_transition("r", Transition(t=0, model="m", request={}, prompt_tokens=7, cost_usd=0.25))
        store.flush()
        if ledger:
            calls = ledger_of(store, "helper-1")
            answered, _ = calls.send("aa", "search"), calls.send("bb", "search")
            before = replace(answered)
            answered.settle(prompt_tokens=7, completion_tokens=0, cost_usd=0.25, failed=False)
            calls.settled(answered, before)
            calls.close()
        (begun,) = members_of(store.engine, "job-1")
        settle_killed(store, "job-1")
        (member,) = members_of(store.engine, "job-1")
        used, killed = member.usage, store.rollout("r")
        assert used is not None
        assert (begun.usage, used.calls, used.prompt_tokens, used.cost_usd) == (None, 1 + ledger, 7, 0.25)
        assert member.unrecorded.seen == (1 if ledger else begun.calls - 1)
        assert member.calls == used.calls + member.unrecorded.calls
        assert (killed.status, killed.failure) == ("error", FailureKind.CAP)
        assert store.run_row("helper-1")["status"] == "failed"
        with pytest.raises(LostLease), lease.writing("a row"):  # if it was only cut off, it goes on no more
            pass


def test_calls_that_parts_of_a_job_sent_again_or_past_the_recorder_count_as_spent(where: str) -> None:
    with Store(where) as store:
        for run in ("improve-x.0.prompts-k", "improve-x.1.gate-k", "improve-y.0.prompts-k"):
            assert store.reserve_run(run, kind="compile", started_at=1.0)
            for _ in range(3):  # each process is killed before the answer
                calls = ledger_of(store, run)
                calls.send("aa", "search")
                calls.close()
        missed = Unrecorded(calls=5, lost=2)
        store.put_run(
            "improve-x.0.prompts-k", kind="compile", config={}, status="stopped", started_at=1.0, unrecorded=missed
        )
    assert spent_in(where, "improve-x", but="1.gate").calls == 3 + 5


def test_the_latest_run_of_a_job_is_that_of_the_largest_number_whatever_its_clock(where: str) -> None:
    with Store(where) as store:
        for number, started in ((9, 30.0), (10, 20.0), (2, 10.0)):  # the machine of the tenth is behind
            assert store.reserve_run(f"job-{number}", kind="tune", started_at=started)
        assert [run for run, _ in store.runs("job")] == ["job-2", "job-9", "job-10"]
        assert new_run_id(store, "job", kind="tune", started_at=5.0, resume=True, cache=True) == ("job-10", True)
        assert new_run_id(store, "job", kind="tune", started_at=5.0, resume=False, cache=True) == ("job-11", False)


def test_what_was_cut_off_is_removed_by_a_machine_whose_clock_is_behind(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {**write_project(), "lm": scripted_lm(lambda _: json.dumps({"answer": "3"})), "store": where, "threads": 1}
    job |= {"split": "val", "sizes": {"val": 6}, "n": 1}
    assert assay.collect("mine.py:Mine", **job, max_calls=3).stopped
    with Store(where) as store:
        (run,) = list_runs(store)
        at = store.clock.now()
        store.put_rollout(Rollout(id="cut", run_id=run["id"], status="error", failure=FailureKind.CAP, started_at=at))
    if where.startswith("postgres"):  # the clock of SQLite is that of the machine
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() - 7200)
    assert assay.collect("mine.py:Mine", **job, resume=True).stopped is None
    with Store(where) as store:
        assert "cut" not in [rollout.id for rollout in store.rollouts()]


@pytest.mark.postgres
def test_runs_of_machines_with_other_clocks_have_the_times_of_the_server(
    empty_postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = {**write_project(), "lm": scripted_lm(lambda _: json.dumps({"answer": "3"})), "store": empty_postgres_url}
    job |= {"split": "val", "sizes": {"val": 6}, "n": 1, "threads": 1}
    real = time.time
    with Store(empty_postgres_url) as store:
        times = [store.clock.now()]
        for hours, more in ((3, {"max_calls": 3}), (-3, {"resume": True})):
            monkeypatch.setattr(time, "time", lambda ahead=hours * 3600: real() + ahead)
            assay.collect("mine.py:Mine", **job, **more)
            (run,) = list_runs(store)
            times.append(store.clock.now())
        assert times[0] <= run["started_at"] <= times[1] <= run["resumed_at"] <= run["ended_at"] <= times[2]
        shown = list_rollouts(store=empty_postgres_url, since="1h").rollouts
    assert len(shown) == 6
    # what a loop's budget counts of the time since its improvement began
    assert [usage_since(empty_postgres_url, at)[0] for at in (times[0], times[2])] == [12, 0]


def test_who_lost_a_job_tells_its_study_nothing(where: str) -> None:
    space = Space(programs=["p"], acting={"p": ["temperature"]})
    with Store(where) as old:
        lease = acquire(old.engine, "job:x", 60.0)
        assert lease is not None
        old.belong_to(lease)
        url = DatabaseAddress.of("studies.db").url
        study = open_study("s", url, space, SearchConfig(), guard=lambda: check_lease(old))
        told, lost = study.ask(), study.ask()
        study.tell(told, 0.5)
        with old.engine.begin() as connection:
            connection.execute(sa.update(leases).values(token="of the next one"))
        for change in (lambda: study.tell(lost, 1.0), lambda: lost.set_user_attr("a", 1), study.ask):
            with pytest.raises(LostLease):
                change()
    assert [trial.state.name for trial in study.get_trials()] == ["COMPLETE", "RUNNING"]


def test_who_lost_a_job_changes_nothing_and_its_answered_calls_are_kept(where: str) -> None:
    with Store(where) as old, Store(where) as new:
        first = acquire(old.engine, "job:x", 60.0)
        assert first is not None
        old.belong_to(first)
        assert old.reserve_run("x-1", kind="collect", started_at=1.0)
        old.put_rollout(Rollout(id="r", run_id="x-1", phase="collect"))
        old.put_transition("r", Transition(t=0, model="m", request={}, cost_usd=0.25))
        old.flush()
        end_leases(old)
        second = acquire(new.engine, "job:x", 60.0)
        assert second is not None
        new.belong_to(second)
        new.put_rollout(Rollout(id="r", run_id="x-1", phase="collect", status="done", score=1.0))
        new.flush()

        old.put_rollout(Rollout(id="r", run_id="x-1", phase="collect", status="done", score=0.0))
        old.put_transition("r", Transition(t=1, model="m", request={}, output="late", cost_usd=0.5))
        old.put_run("x-1", kind="collect", config={}, status="failed", started_at=1.0)
        old.flush()
        assert old.obstacle
        old.put_rollout(Rollout(id="begun later", run_id="x-1", phase="collect"))
        old.flush()
        old.put_transition("begun later", Transition(t=0, model="m", request={}, cost_usd=0.25))  # in another batch
        old.flush()
        for change in (lambda: old.reserve_run("x-2", kind="collect", started_at=1.0), lambda: old.put_meta("a", "b")):
            with pytest.raises(LostLease):
                change()
        assert new.obstacle is None
        *beside, kept = sorted(new.rollouts(run_id="x-1"), key=lambda rollout: rollout.id == "r")
        (late,) = [rollout for rollout in beside if new.rollout(rollout.id).transitions[0].t == 1]
        assert len(beside) == 2
        assert (kept.status, kept.score) == ("done", 1.0)
        assert [step.t for step in new.rollout("r").transitions] == [0]
        assert (late.status, late.failure, late.score) == ("error", FailureKind.LATE, None)
        assert [(step.t, step.output) for step in new.rollout(late.id).transitions] == [(1, "late")]
        assert new.run_row("x-1")["status"] == "running"
        assert new.spent("x-1")["collect"].cost_usd == 1.0


def test_waiting_rows_of_who_lost_a_job_change_nothing(tmp_path: Path) -> None:
    path, old = tmp_path / "s.db", Store(tmp_path / "s.db")
    first = acquire(old.engine, "job:x", 60.0)
    assert first is not None
    old.belong_to(first)
    old.put_rollout(Rollout(id="r", run_id="x-1", status="running"))
    old.flush()
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        old.put_rollout(Rollout(id="r", run_id="x-1", status="done", score=0.0))
        old.put_transition("r", Transition(t=1, model="m", request={}, cost_usd=0.5))
        with pytest.raises(Exception, match="wait in"):
            old.close(0.5)
        other.execute("UPDATE leases SET until = 0")
        other.execute("UPDATE rollouts SET status = 'done', score = 1")
        other.execute("UPDATE leases SET token = 'of the next one'")
        other.execute("COMMIT")
    other.close()
    with Store(path) as store:
        late, kept = sorted(store.rollouts(), key=lambda rollout: rollout.id == "r")
        assert (kept.score, late.failure) == (1.0, FailureKind.LATE)


def test_equal_jobs_of_two_stores_in_one_folder_are_two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d.jsonl").write_text('{"question": "1 + 1?", "answer": "2", "split": "val"}\n')
    runs = []
    for store in ("a.db", "b.db", "a.db"):
        evaluated = assay.evaluate(
            dspy.Predict("question -> answer"),
            rubric="exact",
            data="d.jsonl",
            lm=scripted_lm(lambda prompt: "2"),
            store=store,
        )
        runs.append(evaluated.run_id)
    assert len(set(runs)) == 3
    assert sorted(path.name for path in Path("runs").iterdir() if path.is_dir()) == sorted(runs)
