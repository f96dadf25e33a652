"""Versions, aliases, deployments, flags and routing, on both databases."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from production import artifact, two_versions

import assay
from assay.deployment.decisions import advance
from assay.deployment.deployments import Deployments
from assay.deployment.evidence import CANDIDATE, CHAMPION, unit_digest
from assay.deployment.plan import Metric, Plan, Step
from assay.deployment.registry import Registry, flag_history, flags_of, set_flag, write_flag
from assay.deployment.routing import Quality, Router, choice, probabilities, qualities, set_preference
from assay.deployment.settings import Preference
from assay.deployment.watching import status_of
from assay.errors import ConfigError, DeploymentError, StoreError
from assay.traces import Rollout, Store

PLAN = Plan(
    steps=(Step(weight=10, requests=20), Step(weight=50, decides=True, max_requests=400), Step(weight=95, requests=20)),
    metrics=(Metric(success_gain=0.1), Metric(name="tokens", failure_loss=1.0)),
)


@pytest.fixture
def deployments(own_folder: Path) -> Iterator[Deployments]:
    """The agent `support` with two versions, in SQLite: what the database has no part in."""
    with Store() as opened:
        yield two_versions(opened, own_folder)


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


def test_unknown_versions_are_named(deployments: Deployments) -> None:
    for name, message in (
        ("suport", "Did you mean 'support'"),
        ("support@7", "versions 1 to 2"),
        ("support@best", r"aliases champion \(@1\)"),
        ("", "no agent ''"),
        ("support@99999999999999999999", "versions 1 to 2"),
        ("support@" + "9" * 5000, "versions 1 to 2"),
    ):
        with pytest.raises(DeploymentError, match=message):
            deployments.registry.version(name)


def test_names_that_no_url_can_have_are_refused(deployments: Deployments) -> None:
    for name in ("", "a b", "../x", "x" * 64, "é", None):
        with pytest.raises(ConfigError, match=r"^agent="):
            deployments.registry.register(name, Path("one"))


def test_an_artifact_that_was_changed_or_replaced_is_refused(deployments: Deployments) -> None:
    registry = deployments.registry
    Path("one/report.md").write_text("changed")
    with pytest.raises(DeploymentError, match=r"support@1 cannot be loaded: .*report\.md was changed"):
        registry.folder_of(registry.version("support@1"))
    shutil.rmtree("two")
    shutil.rmtree("two-source")
    artifact(Path("two"), "return dspy.Prediction(answer='another')")
    with pytest.raises(DeploymentError, match="another artifact than the registered one"):
        registry.folder_of(registry.version("support@2"))


def test_a_folder_that_was_moved_is_found_by_its_name(
    deployments: Deployments, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, elsewhere = deployments.registry, own_folder / "elsewhere"
    elsewhere.mkdir()
    shutil.move("one", elsewhere / "one")
    with pytest.raises(DeploymentError, match="no artifact at"):
        registry.folder_of(registry.version("support@1"))
    monkeypatch.setenv("ASSAY_ARTIFACTS", str(elsewhere))
    assert registry.folder_of(registry.version("support@1")) == elsewhere / "one"


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


# -- agents in production


def test_a_deployed_agent_runs_the_version_of_its_unit(deployments: Deployments) -> None:
    deployments.start("support@2", PLAN)
    agent = assay.deployed("support")
    answers = {unit: agent(question="?", unit=unit).answer for unit in map(str, range(60))}
    assert set(answers.values()) == {"yes", "better"}
    assert all(agent(question="?", unit=unit).answer == answer for unit, answer in answers.items())
    prediction = agent(question="?", unit="7", task_type="billing")
    agent.store.flush()
    rollout = agent.store.rollout(prediction.rollout)
    assert rollout.deployment
    assert rollout.propensity in (0.1, 0.9)
    assert (rollout.version, rollout.task_type) == (f"support@{1 + (answers['7'] == 'better')}", "billing")
    with pytest.raises(ConfigError, match="takes the input"):
        agent(text="?")


def with_candidate(folder: Path, body: str) -> None:
    """The candidate has this body, and gets all units."""
    with Store() as opened:
        two_versions(opened, folder, body).start("support@2", PLAN)
        set_flag(opened.engine, "support", "percentage", 100)


def test_a_candidate_that_cannot_run_falls_back_and_is_counted(own_folder: Path) -> None:
    with_candidate(own_folder, "raise ConnectionError('down')")
    agent = assay.deployed("support")
    assert agent(question="?", unit="u").answer == "yes"
    Path("two/report.md").write_text("changed")
    fresh = assay.deployed("support")
    assert fresh(question="?", unit="u").answer == "yes"
    assert (agent.fallbacks, fresh.fallbacks) == ({"support@2": 1}, {"support@2": 1})


def test_a_failure_of_the_program_itself_is_not_hidden_by_the_champion(own_folder: Path) -> None:
    with_candidate(own_folder, "raise ValueError('a fault of the candidate')")
    agent = assay.deployed("support")
    with pytest.raises(ValueError, match="a fault of the candidate"):
        agent(question="?", unit="u")
    assert agent.fallbacks == {}
    agent.store.flush()
    rollout = next(agent.store.rollouts(limit=1))
    assert (rollout.arm, rollout.status, rollout.failure) == (CANDIDATE, "failed", "agent")


def test_a_champion_that_cannot_be_loaded_does_not_stop_an_agent_that_runs(deployments: Deployments) -> None:
    agent = assay.deployed("support", refresh_s=0)
    assert agent(question="?").version == "support@1"
    shutil.rmtree("two")
    deployments.registry.set_alias("support@2", "champion", why="by mistake")
    assert agent(question="?").version == "support@1"
    assert agent.fallbacks == {"support@2": 1}
    with pytest.raises(DeploymentError, match="support@2 cannot be loaded"):
        assay.deployed("support")


def test_a_call_takes_no_query_once_the_alias_is_resolved(deployments: Deployments) -> None:
    now, queries, engine = [0.0], list[str](), deployments.engine
    deployments.start("support@2", PLAN)
    router = Router(engine, "support", refresh_s=1.0, clock=lambda: now[0])
    sa.event.listen(engine, "before_cursor_execute", lambda _, __, statement, *___: queries.append(statement))
    versions = {router.assign(f"u{at}", task_type="t").version.name for at in range(200)}
    assert versions == {"support@1", "support@2"}
    assert queries == []
    now[0] = 1.0
    router.assign("u0")
    refresh = len(queries)
    assert refresh > 0
    for at in range(200):
        router.assign(f"u{at}")
    assert len(queries) == refresh


def test_a_read_only_store_is_named_and_nothing_changes(deployments: Deployments, own_folder: Path) -> None:
    registry, started = deployments.registry, deployments.start("support@2", PLAN)

    def read_only(connection: Any, _: object) -> None:
        connection.execute("PRAGMA query_only=ON")

    sa.event.listen(deployments.engine, "connect", read_only)
    deployments.engine.dispose()
    for what, write in (
        ("deployment", lambda: deployments.order(started.id, "promote")),
        ("alias", lambda: registry.set_alias("support@2", "champion")),
        ("flag", lambda: write_flag(deployments.engine, "support", "kill", value=True)),
        ("version", lambda: registry.register("support", artifact(own_folder / "three", "return None"))),
    ):
        with pytest.raises(StoreError, match=f"the {what} cannot be written to the store: attempt to write a read"):
            write()
    assert (deployments.get(started.id).state.status, registry.aliases("support")["champion"]) == ("running", 1)


# -- routing preferences, with exact propensities


BOTH = Preference(versions=(1, 2), floor=0.1)


def test_the_better_version_of_each_task_type_is_found_and_propensities_are_right() -> None:
    rates = {"sums": {1: 0.6, 2: 0.8}, "words": {1: 0.8, 2: 0.6}}
    random = np.random.default_rng(7)
    for kind, best in (("sums", 2), ("words", 1)):
        counts, totals, planned, gained, shares = {1: 0, 2: 0}, {1: 0.0, 2: 0.0}, 0.0, 0.0, dict[int, float]()
        for batch in range(20):
            shares = probabilities(BOTH, {n: Quality(count=counts[n], total=totals[n]) for n in (1, 2)})
            assert (sum(shares.values()), min(shares.values()) >= 0.1) == (pytest.approx(1), True)
            for at in range(100):
                number = choice(unit_digest(f"{batch}-{at}"), kind, shares, salt="a")
                score = float(random.random() < rates[kind][number])
                counts[number] += 1
                totals[number] += score
                planned += shares[best]
                gained += score * (number == best) / shares[number]
        assert shares[best] > 0.85
        # 2,000 rollouts: the count of the better version is its sum of propensities, up to 4 standard errors of at
        # most sqrt(2000 / 4) = 22; weighted by them its score is unbiased
        assert abs(counts[best] - planned) < 90
        assert gained / 2000 == pytest.approx(0.8, abs=0.05)


def test_a_unit_stays_with_its_version_and_the_cost_can_decide() -> None:
    units = [unit_digest(str(at)) for at in range(2000)]
    before = [choice(unit, "t", {1: 0.5, 2: 0.5}, salt="a") for unit in units]
    after = [choice(unit, "t", {1: 0.4, 2: 0.6}, salt="a") for unit in units]
    moved = [(b, a) for b, a in zip(before, after, strict=True) if b != a]
    assert set(moved) == {(1, 2)}
    assert 0.07 < len(moved) / 2000 < 0.13
    measured = {1: Quality(count=200, total=160, cost_usd=0.01), 2: Quality(count=200, total=170, cost_usd=0.2)}
    assert probabilities(BOTH, measured)[2] > 0.7
    assert probabilities(Preference(versions=(1, 2), floor=0.1, cost_weight=1.0), measured)[1] > 0.8


def test_a_preference_holds_without_a_deployment_and_is_logged(own_folder: Path) -> None:
    with Store() as store:
        deployments = two_versions(store, own_folder)
        with pytest.raises(DeploymentError, match="support@2 was never the champion"):
            set_preference(store.engine, "support", BOTH)
        with pytest.raises(ConfigError, match="versions: must be at least two versions"):
            Preference(versions=(1, 1))
        deployments.registry.set_alias("support@2", "champion")
        set_preference(store.engine, "support", BOTH, why="two good ones")
        for at in range(60):
            version = f"support@{1 + at % 2}"
            rollout = Rollout(task_id=f"t{at}", task_type="sums", status="done", score=float(at % 2), version=version)
            rollout.phase = "deployed"
            store.put_rollout(rollout)
        store.flush()
        assert qualities(store.engine, "support", BOTH)["sums"][2] == Quality(count=30, total=30.0)
        router = Router(store.engine, "support", refresh_s=0)
        assert router.shares()["sums"][2] == pytest.approx(0.9, abs=0.01)
        assignments = [router.assign(str(at), task_type="sums") for at in range(300)]
        assert sum(one.version.number == 2 for one in assignments) > 240
        assert {(one.arm, one.deployment) for one in assignments} == {("routed", None)}
        assert {router.assign(str(at), task_type="new").propensity for at in range(20)} == {0.5}
        deployments.start(
            "support@1", Plan(steps=(Step(weight=50, decides=True),), metrics=(Metric(success_gain=0.1),))
        )
        assert router.assign("u", task_type="sums").deployment is not None
