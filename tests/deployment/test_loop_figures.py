"""The seven figures of a loop, on rollouts and deployments with known values, and what an improvement says."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from production import artifact, two_versions

import assay
from assay.commands.cycle import Order, improved
from assay.commands.loop_file import LoopLimits, LoopSettings
from assay.deployment.deployments import Deployments
from assay.deployment.loops import Figure, loop_figures
from assay.deployment.plan import Plan, Step
from assay.traces import Rollout, Store
from assay.traces.records import Verdict
from assay.traces.resuming import ledger_of
from rigs.serving import chat_completion, served

NOW = time.time()
PLAN = Plan(steps=(Step(weight=50, decides=True),))


@pytest.fixture
def store(own_folder: Path) -> Iterator[Store]:
    with Store() as opened:
        deployments = two_versions(opened, own_folder)
        deployments.registry.register("support", artifact(own_folder / "three"))
        for alias, number in (("previous", 1), ("champion", 2)):
            deployments.registry.set_alias(f"support@{number}", alias)
        yield opened


def put(store: Store, version: int, task_type: str, scores: list[float], **fields: Any) -> None:
    for score in scores:
        values: dict[str, Any] = {
            "task_type": task_type, "status": "done", "phase": "deployed", "version": f"support@{version}",
            "inputs": {"q": "?"}, "score": score, "started_at": NOW - 60, "ended_at": NOW,
        }  # fmt: skip
        store.put_rollout(Rollout(**{**values, **fields}))


def figures(store: Store, **limits: float) -> dict[str, Figure]:
    store.flush()
    rows = loop_figures(store.engine, "support", [], LoopLimits(**limits), now=NOW)  # type: ignore[arg-type]
    return {figure.name: figure for figure in rows}


def test_loop_figures_without_data_are_null_and_raise_no_alarm(store: Store) -> None:
    loop_figures = figures(store)
    assert [figure.value for name, figure in loop_figures.items() if name != "hacks"] == [None] * 6
    assert [name for name, figure in loop_figures.items() if figure.ok is False] == []


def test_a_task_type_that_was_forgotten_alarms_though_the_mean_has_risen(store: Store) -> None:
    put(store, 1, "bills", [1.0, 0.0] * 50)
    put(store, 1, "parcels", [1.0] * 50)
    put(store, 2, "bills", [1.0] * 100)
    put(store, 2, "parcels", [1.0, 0.0] * 25)
    loop_figures = figures(store)
    assert (loop_figures["forgetting"].value, loop_figures["forgetting"].ok) == (0.5, False)
    assert loop_figures["forgetting"].detail == {"bills": -0.5, "parcels": 0.5}
    assert loop_figures["live"].value == pytest.approx(125 / 150)
    assert (loop_figures["live"].limit, loop_figures["live"].ok) == (pytest.approx(100 / 150), True)
    assert figures(store, live=0.95)["live"].ok is False
    assert figures(store, forgetting=0.4)["forgetting"].ok is True  # 0.5 with an error of 0.07: not shown to be above


def test_after_a_rollback_the_version_that_serves_is_not_compared_with_the_one_taken_back(store: Store) -> None:
    deployments = Deployments(store.engine)
    deployment = deployments.start("support@3", PLAN)
    deployments.order(deployment.id, "promote")
    put(store, 1, "bills", [1.0, 0.0] * 25)
    put(store, 2, "bills", [1.0, 1.0, 0.0] * 20)
    put(store, 3, "bills", [1.0] * 50)  # it scores high, and was too slow
    before = figures(store)
    assert (before["live"].value, before["live"].limit) == (1.0, pytest.approx(2 / 3))
    deployments.order(deployment.id, "rollback", reason="too slow")
    after = figures(store)
    assert (after["live"].value, after["live"].limit, after["live"].ok) == (pytest.approx(2 / 3), 0.5, True)
    assert after["forgetting"].ok is True
    deployments.registry.set_alias("support@1", "champion", why="the first again")
    assert (figures(store)["live"].limit, figures(store)["live"].ok) == (None, None)


def test_only_rollouts_of_the_last_days_count_as_live_and_replays_do_not(store: Store) -> None:
    put(store, 2, "bills", [1.0] * 10)
    put(store, 2, "bills", [0.0] * 10, started_at=NOW - 8 * 86400)
    put(store, 2, "bills", [0.0] * 10, phase="shadow")
    assert (figures(store)["live"].value, figures(store)["live"].n) == (1.0, 10)


def test_rollouts_that_hacked_the_rubric_are_counted(store: Store) -> None:
    for grade in (0.0, 1.0, None):
        verdict = Verdict(criterion="no_hacks", grade=grade)
        put(store, 2, "code", [1.0], verdicts=[verdict])
    put(store, 2, "code", [1.0], verdicts=[Verdict(criterion="no_hacks", grade=0.0)], started_at=NOW - 9 * 86400)
    assert (figures(store)["hacks"].value, figures(store)["hacks"].ok) == (1.0, False)


def test_deployments_taken_back_later_or_ended_by_hand_did_not_succeed(store: Store) -> None:
    deployments = Deployments(store.engine)
    deployment = deployments.start("support@3", PLAN)
    assert figures(store)["deployments"].n == 0  # it runs
    deployments.order(deployment.id, "promote")
    assert figures(store)["deployments"].detail == {
        "promoted": 0, "rolled back": 0, "taken back later": 0, "ended by hand": 1,
    }  # fmt: skip
    deployments.order(deployment.id, "rollback")
    ended = figures(store)["deployments"]
    assert (ended.value, ended.ok, ended.detail["taken back later"]) == (0.0, False, 1)  # type: ignore[index]


# -- improvements


def order_of(champion: Path, data: Path, out: Path, **more: Any) -> Order:
    rest: dict[str, Any] = {"store": None, "max_calls": None, "max_cost_usd": None, **more}
    return Order(name="n", champion=champion, data=data, out=out, began=NOW, **rest)


@pytest.mark.parametrize(("converged", "expected"), [(True, True), (None, True), (False, False)])
def test_an_improvement_whose_training_did_not_converge_says_so(
    store: Store, monkeypatch: pytest.MonkeyPatch, converged: bool | None, expected: bool
) -> None:
    steps = [
        {"step": "prompts", "kept": False, "converged": None},
        {"step": "grpo", "kept": True, "converged": converged},
    ]
    report = {"artifact": "better", "steps": steps, "stopped": None, "notes": [], "test": None}
    monkeypatch.setattr("assay.commands.cycle.improve", lambda *_, **__: SimpleNamespace(to_dict=lambda: report))
    order = order_of(Path("one"), Path("pool.jsonl"), Path("better"), store=store.url)
    detail = improved(LoopSettings(rubric="r.yaml", method="improve"), order, None)
    assert (detail["artifact"], detail["converged"]) == ("better", expected)
    assert detail["reason"] == "prompts not kept; grpo kept" + ("" if expected else ", not converged")


def test_an_improvement_counts_what_it_sent_not_what_was_stored(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def improves(*_: Any, **__: Any) -> Any:
        run = "improve-x.0.prompts-k"
        assert store.reserve_run(run, kind="compile", started_at=NOW + 1)
        ledger = ledger_of(store, run)
        for number in range(3):
            ledger.send(f"{number:064x}", "search", owner="")
        ledger.close()
        report = {"artifact": None, "steps": [], "stopped": None, "notes": [], "test": None}
        return SimpleNamespace(to_dict=lambda: report)

    monkeypatch.setattr("assay.commands.cycle.improve", improves)
    order = order_of(Path("one"), Path("pool.jsonl"), Path("better"), store=store.url)
    assert improved(LoopSettings(rubric="r.yaml", method="improve"), order, None)["calls"] == 3


PROGRAM = """
import dspy

class Asks(dspy.Module):
    def __init__(self):
        super().__init__()
        self.ask = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.ask(question=question)
"""


async def answers(request: web.Request) -> web.Response:
    return chat_completion("m", "[[ ## answer ## ]]\nParis\n\n[[ ## completed ## ]]")


@pytest.mark.slow
def test_a_cycle_that_keeps_the_champion_says_why_in_words(own_folder: Path) -> None:
    (own_folder / "asks.py").write_text(PROGRAM)
    (own_folder / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    (own_folder / "d.jsonl").write_text(
        "".join(json.dumps({"question": f"Capital of {n}?", "answer": "Paris"}) + "\n" for n in range(40))
    )
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answers)
    with served(app) as url:
        options = {"optimizer": "labeled", "api_base": f"{url}/v1", "model": "openai/m"}
        assay.compile("asks.py:Asks", rubric="r.yaml", data="d.jsonl", out="one", **options)
        order = order_of(own_folder / "one", own_folder / "d.jsonl", own_folder / "two", max_calls=200)
        settings = LoopSettings(rubric="r.yaml", method="compile", options=options)
        result = improved(settings, order, None)
    assert result["artifact"] is None
    assert result["reason"]
    assert not {"null", "None", "NaN", "{"} & set(result["reason"].replace("{", " { ").split())
