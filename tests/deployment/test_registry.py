"""Versions, aliases, deployments, flags and routing, on both databases."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from production import artifact, two_versions

import assay
from assay.deployment.decisions import advance
from assay.deployment.deployments import Deployments
from assay.deployment.evidence import CANDIDATE, CHAMPION
from assay.deployment.plan import Metric, Plan, Step
from assay.deployment.registry import Registry, flag_history, flags_of, set_flag, write_flag
from assay.deployment.routing import Router
from assay.deployment.watching import status_of
from assay.errors import ConfigError, DeploymentError, StoreError
from assay.traces import Rollout, Store

PLAN = Plan(
    steps=(Step(weight=10, requests=20), Step(weight=50, decides=True, max_requests=400), Step(weight=95, requests=20)),
    metrics=(Metric(success_gain=0.1), Metric(name="tokens", failure_loss=1.0)),
)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    where = tmp_path / "s.db"
    if request.param == "postgresql":
        where = request.getfixturevalue("postgres_url")
    with Store(where) as opened:
        with opened.engine.begin() as connection:  # the PostgreSQL of all tests is one
            for table in ("agent_versions", "agent_aliases", "agent_flags", "deployments", "deployment_decisions"):
                connection.execute(sa.text(f"DELETE FROM {table}"))
        yield opened


def serve(store: Store, agent: str, requests: int, score: dict[str, float], start: int = 0) -> None:
    """Rollouts as production writes them: assigned by the router, scored at random around `score` of their arm."""
    router = Router(store.engine, agent)
    for at in range(start, start + requests):
        assignment = router.assign(f"user-{at}")
        wins = (at * 7919) % 100 < 100 * score[assignment.arm or CHAMPION]
        store.put_rollout(
            Rollout(
                task_id=f"t{at}", status="done", score=float(wins), ended_at=1000.0 + at, started_at=999.0 + at,
                phase="deployed", **assignment.fields(),
            )
        )  # fmt: skip
    store.flush()


def test_versions_are_counted_and_the_same_artifact_is_the_same_version(store: Store, tmp_path: Path) -> None:
    registry = Registry(store.engine)
    first = registry.register("support", artifact(tmp_path / "a"), evidence={"gate": 1})
    assert (first.name, first.evidence, registry.register("support", tmp_path / "a")) == (
        "support@1", {"gate": 1}, first,
    )  # fmt: skip
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    assert registry.register("support", tmp_path / "copy") == first
    assert registry.register("support", artifact(tmp_path / "b"), parent="support@1").parent == 1
    assert registry.agents() == ["support"]


def test_aliases_keep_their_history(store: Store, tmp_path: Path) -> None:
    registry = two_versions(store, tmp_path).registry
    registry.set_alias("support@2", "champion", why="better", by="ann")
    assert registry.version("support").number == registry.version("support@champion").number == 2
    assert [(change.number, change.why) for change in registry.alias_history("support")] == [
        (1, "the first"), (2, "better"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("suport", "Did you mean 'support'"),
        ("support@7", "versions 1 to 2"),
        ("support@best", r"aliases champion \(@1\)"),
        ("", "no agent ''"),
        ("support@99999999999999999999", "versions 1 to 2"),
        pytest.param("support@" + "9" * 5000, "versions 1 to 2", id="5000 digits"),
    ],
)
def test_unknown_versions_are_named(store: Store, tmp_path: Path, name: str, message: str) -> None:
    registry = two_versions(store, tmp_path).registry
    with pytest.raises(DeploymentError, match=message):
        registry.version(name)


@pytest.mark.parametrize("name", ["", "a b", "../x", "x" * 64, "é", None])
def test_names_that_no_url_can_have_are_refused(store: Store, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^agent="):
        Registry(store.engine).register(name, artifact(tmp_path / "a"))


def test_an_artifact_that_was_changed_or_replaced_is_refused(store: Store, tmp_path: Path) -> None:
    registry = two_versions(store, tmp_path).registry
    (tmp_path / "one" / "report.md").write_text("changed")
    with pytest.raises(DeploymentError, match=r"support@1 cannot be loaded: .*report\.md was changed"):
        registry.folder_of(registry.version("support@1"))
    shutil.rmtree(tmp_path / "two")
    shutil.rmtree(tmp_path / "two-source")
    artifact(tmp_path / "two", "return dspy.Prediction(answer='another')")
    with pytest.raises(DeploymentError, match="another artifact than the registered one"):
        registry.folder_of(registry.version("support@2"))


def test_a_folder_that_was_moved_is_found_by_its_name(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = two_versions(store, tmp_path).registry
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "one", tmp_path / "elsewhere" / "one")
    with pytest.raises(DeploymentError, match="no artifact at"):
        registry.folder_of(registry.version("support@1"))
    monkeypatch.setenv("ASSAY_ARTIFACTS", str(tmp_path / "elsewhere"))
    assert registry.folder_of(registry.version("support@1")) == tmp_path / "elsewhere" / "one"


def test_a_better_candidate_goes_through_all_steps(store: Store, tmp_path: Path) -> None:
    deployments = two_versions(store, tmp_path)
    deployment, served, actions = deployments.start("support@2", PLAN), 0, []
    while (status := deployments.get("support").state.status) == "running" and served < 2000:
        serve(store, "support", 50, {CHAMPION: 0.5, CANDIDATE: 0.95}, served)
        served += 50
        decision = advance(deployments, "support", now=2e9)
        actions += [decision.action] if decision.action != "continue" else []
    assert (status, actions) == ("promoted", ["next", "next", "promote"])
    assert deployments.registry.aliases("support") == {"champion": 2, "candidate": 2, "previous": 1}
    history = deployments.history(deployment.id)
    assert [entry["rule"] for entry in history] == ["step", "success", "step"]
    assert history[1]["readings"][0]["gain"] > 0.2
    standing = status_of(deployments, deployment.id, 2e9).to_dict()
    assert standing["readings"] == history[2]["readings"]  # the numbers that it was promoted on stay readable
    assert (standing["requests"], standing["rule"]) == (history[2]["requests"], "step")
    deployments.order(deployment.id, "rollback", reason="complaints")
    ordered = status_of(deployments, deployment.id, 2e9).to_dict()
    assert ordered["reason"] == "complaints"
    assert ordered["readings"][0]["candidate"] == pytest.approx(0.95, abs=0.1)  # of its rollouts


def test_a_worse_candidate_is_rolled_back_and_gets_no_more_rollouts(store: Store, tmp_path: Path) -> None:
    deployments = two_versions(store, tmp_path)
    deployments.start("support@2", PLAN)
    serve(store, "support", 1000, {CHAMPION: 0.9, CANDIDATE: 0.1})
    assert advance(deployments, "support", now=2e9).rule == "failure_loss"
    assert advance(deployments, "support", now=2e9).rule == "status"
    assert deployments.registry.version("support").number == 1
    router = Router(store.engine, "support")
    assert {router.assign(f"u{at}").version.number for at in range(100)} == {1}


def test_only_one_of_many_concurrent_decisions_is_written(store: Store, tmp_path: Path) -> None:
    deployments = two_versions(store, tmp_path)
    deployment = deployments.start("support@2", PLAN)
    serve(store, "support", 30, {CHAMPION: 0.9, CANDIDATE: 0.9})
    ready, results = threading.Barrier(8), []

    def decide() -> None:
        ready.wait()
        results.append(advance(Deployments(store.engine), "support", now=2e9).action)

    threads = [threading.Thread(target=decide) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count("next") == 1
    assert len(deployments.history(deployment.id)) == 1


def test_a_second_deployment_of_an_agent_is_refused(store: Store, tmp_path: Path) -> None:
    deployments = two_versions(store, tmp_path)
    with pytest.raises(DeploymentError, match="is already the champion"):
        deployments.start("support@1", PLAN)
    deployments.start("support@2", PLAN)
    with pytest.raises(DeploymentError, match=r"is active already: .* Promote it or roll it back first"):
        deployments.start("support@2", PLAN)


def test_manual_interventions_are_recorded_as_decisions(store: Store, tmp_path: Path) -> None:
    deployments = two_versions(store, tmp_path)
    deployment = deployments.start("support@2", PLAN)
    deployments.order(deployment.id[:12], "pause", reason="lunch", by="ann")
    with pytest.raises(DeploymentError, match="is paused: pause is not possible"):
        deployments.order(deployment.id, "pause")
    deployments.order(deployment.id, "resume")
    deployments.order("support", "promote")
    assert deployments.registry.version("support").number == 2
    deployments.order("support", "rollback", reason="complaints")
    assert deployments.registry.version("support").number == 1
    assert deployments.history("support")[0]["by"] == "ann"
    with pytest.raises(ConfigError, match="must be pause, resume"):
        deployments.order("support", "explode")


def test_flags_hold_at_once_and_every_change_is_a_row(store: Store, tmp_path: Path) -> None:
    deployments = two_versions(store, tmp_path)
    deployments.start("support@2", PLAN)
    router = Router(store.engine, "support", refresh_s=0)
    candidates = [unit for unit in map(str, range(400)) if router.assign(unit).arm == CANDIDATE]
    set_flag(store.engine, "support", f"exclude:unit:{candidates[0]}", True)
    assert (router.assign(candidates[0]).version.number, router.assign(candidates[0]).deployment) == (1, None)
    set_flag(store.engine, "support", "pin:tenant:acme", 2)
    assert router.assign("new", tenant="acme").version.number == 2
    set_flag(store.engine, "support", "percentage", 100)
    assert router.assign("anyone").arm == CANDIDATE
    set_flag(store.engine, "support", "kill", True, why="alarm")
    assert router.assign(candidates[1]).version.number == 1
    set_flag(store.engine, "support", "kill", None)
    assert "kill" not in flags_of(store.engine, "support")
    assert [change["name"].split(":")[0] for change in flag_history(store.engine, "support")] == [
        "exclude", "pin", "percentage", "kill", "kill",
    ]  # fmt: skip
    for name, value in (("kil", True), ("pin:unit:", 1), ("kill", 3), ("percentage", 120), ("pin:tenant:a", 9)):
        with pytest.raises((ConfigError, DeploymentError)):
            set_flag(store.engine, "support", name, value)


def test_a_deployed_agent_runs_the_version_of_its_unit(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as opened:
        deployments = two_versions(opened, tmp_path)
        deployments.start("support@2", PLAN)
        agent = assay.deployed("support", store=tmp_path / "s.db")
        answers = {unit: agent(question="?", unit=unit).answer for unit in map(str, range(60))}
        assert set(answers.values()) == {"yes", "better"}
        assert all(agent(question="?", unit=unit).answer == answer for unit, answer in answers.items())
        prediction = agent(question="?", unit="7", task_type="billing")
        agent.store.flush()
        rollout = opened.rollout(prediction.rollout)
        assert rollout.deployment
        assert rollout.propensity in (0.1, 0.9)
        assert (rollout.version, rollout.task_type) == (f"support@{1 + (answers['7'] == 'better')}", "billing")
        with pytest.raises(ConfigError, match="takes the input"):
            agent(text="?")


def test_a_candidate_that_cannot_run_falls_back_and_is_counted(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as opened:
        deployments = two_versions(opened, tmp_path, "raise ConnectionError('down')")
        deployments.start("support@2", PLAN)
        set_flag(opened.engine, "support", "percentage", 100)
        agent = assay.deployed("support", store=tmp_path / "s.db")
        assert agent(question="?", unit="u").answer == "yes"
        (tmp_path / "two" / "report.md").write_text("changed")
        fresh = assay.deployed("support", store=tmp_path / "s.db")
        assert fresh(question="?", unit="u").answer == "yes"
        assert (agent.fallbacks, fresh.fallbacks) == ({"support@2": 1}, {"support@2": 1})


def test_a_champion_that_cannot_be_loaded_does_not_stop_an_agent_that_runs(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as opened:
        deployments = two_versions(opened, tmp_path)
        agent = assay.deployed("support", store=tmp_path / "s.db", refresh_s=0)
        assert agent(question="?").version == "support@1"
        shutil.rmtree(tmp_path / "two")
        deployments.registry.set_alias("support@2", "champion", why="by mistake")
        assert agent(question="?").version == "support@1"
        assert agent.fallbacks == {"support@2": 1}
        with pytest.raises(DeploymentError, match="support@2 cannot be loaded"):
            assay.deployed("support", store=tmp_path / "s.db")


def test_a_failure_of_the_program_itself_is_not_hidden_by_the_champion(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as opened:
        two_versions(opened, tmp_path, "raise ValueError('a fault of the candidate')").start("support@2", PLAN)
        set_flag(opened.engine, "support", "percentage", 100)
        agent = assay.deployed("support", store=tmp_path / "s.db")
        with pytest.raises(ValueError, match="a fault of the candidate"):
            agent(question="?", unit="u")
        assert agent.fallbacks == {}
        agent.store.flush()
        rollout = next(opened.rollouts(limit=1))
    assert (rollout.arm, rollout.status, rollout.failure) == (CANDIDATE, "failed", "agent")


def test_a_read_only_store_is_named_and_nothing_changes(own_folder: Path) -> None:
    with Store() as store:
        deployments = two_versions(store, own_folder)
        plan = Plan(steps=(Step(weight=50, decides=True),), metrics=(Metric(success_gain=0.1),))
        started = deployments.start("support@2", plan)

        def read_only(connection: Any, _: object) -> None:
            connection.execute("PRAGMA query_only=ON")

        sa.event.listen(store.engine, "connect", read_only)
        store.engine.dispose()
        registry = deployments.registry
        for what, write in (
            ("deployment", lambda: deployments.order(started.id, "promote")),
            ("alias", lambda: registry.set_alias("support@2", "champion")),
            ("flag", lambda: write_flag(store.engine, "support", "kill", value=True)),
            ("version", lambda: registry.register("support", artifact(own_folder / "three", "return None"))),
        ):
            with pytest.raises(StoreError, match=f"the {what} cannot be written to the store: attempt to write a read"):
                write()
        assert (deployments.get(started.id).state.status, registry.aliases("support")["champion"]) == ("running", 1)
