"""What may not pass for a gain: covariates, which are fitted before live traffic, and shares that change."""

import time
from pathlib import Path

import numpy as np
import pytest
from production import two_versions

from assay.commands.deploy import deployment_status
from assay.deployment.evidence import CANDIDATE, CHAMPION, cell_of, difference
from assay.deployment.plan import Metric, Plan, Step
from assay.deployment.rollout_values import FEWEST, Covariate, covariate_of
from assay.deployment.routing import Router
from assay.traces import Rollout, Store

PLAN = Plan(steps=(Step(weight=50, decides=True),), metrics=(Metric(success_gain=0.1),))
Row = tuple[str, str, str, float, bool]


def rows(count: int, *, replayed: bool = False) -> list[Row]:
    """Of each unit's tasks one of two is easy; users differ too. Values are 0, 0.25, … without noise."""
    return [(f"t{at % 6}", f"u{at % 7}", "k", 0.5 * (at % 2) + 0.25 * (at % 7 == 0), replayed) for at in range(count)]


def test_tasks_and_units_explain_what_they_scored_before() -> None:
    covariate = covariate_of(rows(1050))
    # mean of the task type: 0.25 + 0.25 / 7
    assert covariate.of("t1", "u3") == pytest.approx(0.5 - 0.25 - 0.25 / 7, abs=0.02)
    assert covariate.of("t0", "u0") == pytest.approx(0.25 - 0.25 - 0.25 / 7, abs=0.02)
    assert covariate.of("t1", "new") == pytest.approx(0.25, abs=0.02)
    assert covariate.of("new", "new") == 0


@pytest.mark.parametrize(
    "known",
    [
        pytest.param(rows(FEWEST - 1), id="too few"),
        pytest.param([*rows(FEWEST - 1), *rows(500, replayed=True)], id="replays do not count as recorded"),
        pytest.param([(f"t{at}", f"u{at}", "k", float(at % 2), False) for at in range(500)], id="all new"),
        pytest.param([(*row[:3], 1.0, False) for row in rows(500)], id="all equal"),
        pytest.param([], id="none"),
    ],
)
def test_without_something_to_learn_from_there_is_no_covariate(known: list[Row]) -> None:
    assert covariate_of(known) == Covariate()


def test_chance_is_not_taken_for_an_effect() -> None:
    random = np.random.default_rng(1)
    covariates = 0
    for _ in range(50):
        draws = random.random(600) < 0.7
        known = [(f"t{random.integers(60)}", f"u{random.integers(80)}", "k", float(draw), False) for draw in draws]
        covariates += covariate_of(known) != Covariate()
    assert covariates <= 3


def test_a_replay_tells_about_its_task_and_not_about_its_unit() -> None:
    recorded = [(f"t{at % 40}", f"u{at}", "k", float(at % 2), False) for at in range(400)]
    replayed = [("hard", "somebody", "k", 0.0, True)] * 30 + [("easy", "nobody", "k", 1.0, True)] * 30
    covariate = covariate_of([*recorded, *replayed])
    assert covariate.of("hard", "x") < -0.3
    assert covariate.of("easy", "x") > 0.3
    assert covariate.of("new", "somebody") == 0


def test_differences_subtract_the_covariate_and_show_the_champion_as_it_is() -> None:
    # two values of each unit, 0.9 and 0.1 by the task; the candidate happens to have more easy tasks
    def arm(name: str, easy: int, gain: float) -> list[tuple[str, int, float, float]]:
        return [(f"{name}{at}", 1, (0.8 if at < easy else 0.2) + gain, 0.3 if at < easy else -0.3) for at in range(100)]

    arms = {
        (0, "k"): {
            CANDIDATE: cell_of(arm("c", 60, 0.1), salt="s"), CHAMPION: cell_of(arm("k", 40, 0.0), salt="s"),
        }
    }  # fmt: skip
    adjusted, raw = difference(arms), difference(arms, covariate=False)
    assert raw.mean == pytest.approx(0.1 + 0.6 * 0.2)  # 20 of 100 tasks more are easy
    assert adjusted.mean == pytest.approx(0.1)
    assert adjusted.champion == raw.champion == pytest.approx(0.2 + 0.6 * 0.4)
    assert adjusted.variance < 0.2 * raw.variance


def test_the_covariate_of_production_is_what_was_recorded_before_the_start(own_folder: Path) -> None:
    with Store("a.db") as store:
        deployments = two_versions(store, own_folder)

        def put(at: int, **fields: object) -> None:
            kind = {"task_id": f"t{at % 5}", "task_type": "default", "inputs": {"q": "?"}, "status": "done"}
            score = (at % 5) / 4
            made = {**kind, "phase": "deployed", "version": "support@1", "score": score, "ended_at": 1.0, **fields}
            store.put_rollout(Rollout(**made))

        for at in range(FEWEST):
            put(at, unit=f"before-{at}")
        store.flush()
        started = deployments.start("support@2", PLAN)
        router = Router(store.engine, "support")
        for at in range(200):
            put(at, started_at=2e9, **{**router.assign(f"u{at}").fields(), "ended_at": 2e9})
        store.flush()
        arms = deployments.evidence(started.id, PLAN.metrics[0], 3e9)
        assert difference(arms).variance < 0.5 * difference(arms, covariate=False).variance
        for at in range(FEWEST):  # ratings that come late do not change it
            put(at, unit=f"late-{at}", score=0.5)
        store.flush()
        later = deployments.evidence(started.id, PLAN.metrics[0], 3e9)
        assert difference(later).variance == difference(arms).variance
        report = deployment_status(started.id, store="a.db", now=3e9)
    assert report.variance_removed is not None
    assert report.variance_removed > 0.5


# -- shares that a flag changes within a step, while the base rate of production drifts


def serve(store: Store, deployment: str, *, share: float, rate: float, name: str) -> None:
    """200 rollouts without an effect: exactly this share is on the candidate, and both arms succeed at this rate."""
    for number in range(200):
        arm = "candidate" if number % 10 < 10 * share else "champion"
        store.put_rollout(Rollout(
            task_id=f"{name}{number}", inputs={}, phase="deployed", version="support@1", status="done",
            started_at=time.time() - 5, ended_at=time.time() - 4, unit=f"{name}{number}", deployment=deployment,
            stage=0, arm=arm, propensity=share if arm == "candidate" else 1 - share,
            score=float(number // 10 % 10 < 10 * rate),
        ))  # fmt: skip


def test_a_percentage_set_by_a_flag_does_not_make_a_gain(own_folder: Path) -> None:
    with Store() as store:
        deployments = two_versions(store, own_folder)
        deployment = deployments.start("support@2", PLAN)
        serve(store, deployment.id, share=0.1, rate=0.3, name="a")  # percentage=10
        serve(store, deployment.id, share=0.9, rate=0.8, name="b")  # percentage=90, some days later
        store.flush()
        cells = deployments.evidence(deployment.id, PLAN.metrics[0], time.time())
        assert sorted(cells) == [(0, "default"), (0, "default, 90.0000% on the candidate")]
        estimate = difference(cells)
    # pooled: (0.1 * 0.3 + 0.9 * 0.8) - (0.9 * 0.3 + 0.1 * 0.8) = 0.4
    assert estimate.mean == pytest.approx(0.0, abs=1e-9)
