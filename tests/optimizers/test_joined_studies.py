"""Processes that join a search, on both databases: one cap for all, and one of them decides."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from assay.models.ledger import calls
from assay.testing.scripted_server import running
from assay.traces import Store
from assay.traces.store import tables as schema
from assay.traces.store.shares import leads
from rigs.command_line import assay_command
from rigs.studies import trials_in


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("empty_postgres_url") if request.param == "postgresql" else str(tmp_path / "s.db")


class Machines:
    """Equal commands of machines, each in a folder of its own."""

    def __init__(self, folder: Path, program: str, address: str, store: str) -> None:
        self.folder, self.store = folder, store
        (folder / "r.yaml").write_text("name: said\ncriteria:\n- {name: right, check: numeric}\n")
        rows = [{"id": str(at), "question": f"What is {at} + 1?", "answer": str(at + 1)} for at in range(60)]
        (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = ["--rubric", str(folder / "r.yaml"), "--data", str(folder / "d.jsonl"), "--prompt-format", "chat"]
        model = ["--model", "openai/m", "--api-base", address, "--no-cache", "--threads", "2"]
        self.command = ["tune", program, *files, *model, "--store", store, "--json"]
        self.environment = {**os.environ, "OPENAI_API_KEY": "none"}

    @contextmanager
    def started(self, name: str, *options: str) -> Iterator["subprocess.Popen[str]"]:
        place = self.folder / name
        place.mkdir(exist_ok=True)
        with (
            open(place / "errors.txt", "w") as errors,
            subprocess.Popen(
                [sys.executable, "-m", "assay", *self.command, *options], stdout=subprocess.PIPE, stderr=errors,
                text=True, cwd=place, env=self.environment,
            ) as process,
        ):  # fmt: skip
            try:
                yield process
            finally:
                process.kill()

    def ended(self, name: str, process: "subprocess.Popen[str]") -> dict[str, Any]:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, (self.folder / name / "errors.txt").read_text()
        report: dict[str, Any] = json.loads(output)
        return report

    def wait_for_leader(self) -> str:
        """The run of the process that leads, once others may join."""
        until = time.monotonic() + 120
        while time.monotonic() < until:
            with Store(self.store) as store, store.engine.connect() as connection:
                for run in connection.execute(sa.select(schema.runs.c.id)).scalars():
                    if leads(store.engine, run):
                        return str(run)
            time.sleep(0.5)
        raise AssertionError([path.read_text() for path in self.folder.glob("*/errors.txt")])

    def stored(self) -> int:
        """Number of calls in the store; answers of a cache are none."""
        t = schema.transitions
        with Store(self.store) as store, store.engine.connect() as connection:
            return int(connection.execute(sa.select(sa.func.count()).where(t.c.cached.is_(False))).scalar() or 0)


@pytest.mark.slow
def test_processes_that_join_share_the_cap_and_one_of_them_decides(
    store: str, tmp_path: Path, mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with running(tmp_path / "log", delay_ms=150) as address, ExitStack() as processes:
        machines = Machines(tmp_path, mine, address, store)
        first = processes.enter_context(machines.started("first", "--trials", "40", "--max-calls", "300"))
        run = machines.wait_for_leader()
        others = [processes.enter_context(machines.started(name, "--join")) for name in ("second", "third")]
        refused = assay_command(*machines.command)
        assert refused.code == 2
        assert "assay tune --join" in refused.stderr
        other_cap = assay_command(*machines.command, "--join", "--max-calls", "5")
        assert other_cap.code == 2
        assert "whose settings hold" in other_cap.stderr
        other_storage = assay_command(*machines.command, "--join", "--storage", str(tmp_path / "other.db"))
        assert other_storage.code == 2
        assert "--storage" in other_storage.stderr
        led = machines.ended("first", first)
        joined = [machines.ended(name, process) for name, process in zip(("second", "third"), others, strict=True)]
        sent = (tmp_path / "log").stat().st_size
    assert led["calls"] == sent == machines.stored() <= 300
    assert sent > 200
    assert led["unrecorded"] == 0
    assert [model["calls"] for model in led["models"]] == [sent]
    assert all(one["leads"] == run and one["trials"] for one in joined)
    with Store(store) as opened, opened.engine.connect() as connection:
        openings = connection.execute(sa.select(schema.test_openings.c.times)).scalars().all()
    assert list(openings) in ([], [1])


@pytest.mark.chaos
@pytest.mark.postgres
@pytest.mark.slow
def test_a_trial_of_a_killed_machine_is_closed_and_its_calls_are_counted(
    empty_postgres_url: str, tmp_path: Path, mine: str
) -> None:
    import optuna

    with running(tmp_path / "log", delay_ms=150) as address, ExitStack() as processes:
        machines = Machines(tmp_path, mine, address, empty_postgres_url)
        first = processes.enter_context(machines.started("first", "--trials", "12"))
        run = machines.wait_for_leader()
        second = processes.enter_context(machines.started("second", "--join"))
        url = empty_postgres_url.replace("postgresql://", "postgresql+psycopg://", 1)
        until = time.monotonic() + 120
        with Store(empty_postgres_url) as store, store.engine.connect() as connection:
            c = calls.c
            in_flight = sa.select(c.run).where(c.run != run, c.settled < c.sends)
            while not connection.execute(in_flight).first():
                connection.rollback()
                assert time.monotonic() < until
                assert first.poll() is None
                time.sleep(0.01)
        second.kill()
        led = machines.ended("first", first)
        sent, reserved = (tmp_path / "log").stat().st_size, 17  # of the killed one
    (study,) = optuna.get_all_study_names(url)
    states = {trial.state.name for trial in trials_in(url)}
    assert states <= {"COMPLETE", "PRUNED", "FAIL", "WAITING"}, study
    assert 0 < led["unrecorded"] <= reserved
    assert machines.stored() <= sent <= machines.stored() + led["unrecorded"] == led["calls"]
    with Store(empty_postgres_url) as store, store.engine.connect() as connection:
        assert "running" not in connection.execute(sa.select(schema.runs.c.status)).scalars().all()
        assert "running" not in connection.execute(sa.select(schema.rollouts.c.status)).scalars().all()


@pytest.mark.chaos
@pytest.mark.slow
def test_a_process_that_joined_goes_on_when_the_leading_one_is_killed(tmp_path: Path, mine: str) -> None:
    with running(tmp_path / "log", delay_ms=150) as address, ExitStack() as processes:
        machines = Machines(tmp_path, mine, address, str(tmp_path / "s.db"))
        first = processes.enter_context(machines.started("first", "--trials", "8", "--max-calls", "400"))
        run = machines.wait_for_leader()
        second = processes.enter_context(machines.started("second", "--join"))
        url, until = f"sqlite:///{tmp_path / 'studies.db'}", time.monotonic() + 120
        while not any(trial.user_attrs.get("run", run) != run for trial in trials_in(url)):
            assert time.monotonic() < until
            time.sleep(0.2)
        first.kill()
        joined = machines.ended("second", second)
        again = processes.enter_context(machines.started("first", "--trials", "8", "--max-calls", "400", "--resume"))
        led = machines.ended("first", again)
        sent = (tmp_path / "log").stat().st_size
    assert joined["complete"] + joined["pruned"] > 0
    assert led["complete"] + led["pruned"] >= 8
    assert {trial.state.name for trial in trials_in(url)} <= {"COMPLETE", "PRUNED", "FAIL"}
    assert led["calls"] - 2 <= sent <= led["calls"] + led["repeated_calls"]  # the kill may have left two unsent
    assert led["calls"] <= 400
