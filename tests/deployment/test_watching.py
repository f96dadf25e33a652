"""Watches: alarms on the candidate's rollouts, and on judges, whose anchors are replayed."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from production import two_versions

from assay.commands.advancing import Advancer, advanced
from assay.commands.deploy import deployment_status, start_deployment
from assay.commands.judge_audit import replay_anchors
from assay.deployment.deployments import Deployments
from assay.deployment.plan import Metric, Plan, Step, Watch, load_plan
from assay.deployment.watching import judge_alarm, watched
from assay.errors import ConfigError
from assay.rubrics.checks import refusal
from assay.traces import Rollout, Store, Transition
from rigs.serving import chat_completion, served

WATCH = (
    {"name": "parse_error_rate", "above": 0.1},
    {"name": "input_drift", "above": 0.3, "action": "pause"},
    {"name": "error_rate", "above": 0.2, "action": "rollback"},
)
PLAN = Plan(steps=(Step(weight=50, decides=True),), metrics=(Metric(success_gain=0.1),), watch=WATCH)


def serve(store: Store, version: int, kind: str, *, failed: int = 0, unparsed: int = 0, age_s: float = 0.0) -> None:
    """120 rollouts in production, some of them failed or with a parse failure."""
    at = time.time() - age_s
    for number in range(120):
        rollout = Rollout(
            task_id=f"{kind}{number}", task_type=kind, inputs={"question": "?"}, phase="deployed", started_at=at,
            version=f"support@{version}", ended_at=at, status="failed" if number < failed else "done",
        )  # fmt: skip
        store.put_rollout(rollout)
        if unparsed:
            call = Transition(t=0, model="m", request={}, response={}, output="?", started_at=at)
            call.failure = "parse" if number < unparsed else None  # type: ignore[assignment]
            store.put_transition(rollout.id, call)
    store.flush()


def test_a_promoted_version_that_fails_is_taken_back_and_each_alarm_is_given_once(own_folder: Path) -> None:
    with Store() as store:
        deployments = two_versions(store, own_folder)
        serve(store, 1, "bills", age_s=3600)
        deployment = deployments.start("support@2", Plan(**PLAN.to_dict()))
        assert watched(deployments, deployment) is None
        deployments.order(deployment.id, "promote")
        serve(store, 2, "bills", unparsed=60)
        advancer = Advancer(store, "support")
        assert advancer.once() > 0
        assert [row["action"] for row in deployments.history(deployment.id)] == ["promote", "alarm"]
        serve(store, 2, "parcels")
        advancer.once()  # what was an alarm is not given again; a pause of a promoted version is an alarm
        last = deployments.history(deployment.id)[-1]
        assert (last["action"], last["watch"]) == ("alarm", "input_drift above 0.3")
        assert "new: parcels" in last["reason"]
        serve(store, 2, "bills", failed=120)
        advancer.once()
        last = deployments.history(deployment.id)[-1]
        assert (last["action"], last["rule"], last["watch"]) == ("rollback", "watch", "error_rate above 0.2")
        assert deployments.registry.aliases("support")["champion"] == 1
        assert advancer.once() == 0.0
        assert Deployments(store.engine).get(deployment.id).state.status == "rolled_back"


@pytest.mark.parametrize(
    ("watch", "reason"),
    [
        ({"name": "latency_s", "above": 2.0}, "the median of latency_s of support@2 is 3, above 2 (50 values)"),
        ({"name": "cost_usd", "above": 0.01}, "the median of cost_usd of support@2 is 0.02, above 0.01 (50 values)"),
        ({"name": "tokens", "above": 2000}, "the median of tokens of support@2 is 2.5e+03, above 2000 (50 values)"),
    ],
)
def test_a_slow_or_expensive_version_is_taken_back(own_folder: Path, watch: dict[str, Any], reason: str) -> None:
    with Store() as store:
        deployments = two_versions(store, own_folder)
        plan = Plan(**{**PLAN.to_dict(), "watch": ({**watch, "action": "rollback"},)})
        deployment = deployments.start("support@2", plan)
        deployments.order(deployment.id, "promote")
        for size in (0.1, 1.0):
            assert watched(deployments, deployments.get(deployment.id)) is None  # cheap so far
            for number in range(10 if size < 1 else 40):
                at = time.time()
                rollout = Rollout(
                    task_id=f"{number}", inputs={}, phase="deployed", version="support@2", started_at=at,
                    ended_at=at + 3 * size + 500 * (number == 0), status="done",
                )  # fmt: skip
                store.put_rollout(rollout)
                call = Transition(t=0, model="m", request={}, response={}, output="?", started_at=at)
                call.cost_usd, call.prompt_tokens = 0.02 * size, int(2500 * size)
                store.put_transition(rollout.id, call)
            store.flush()
        alarm = watched(deployments, deployments.get(deployment.id))
        assert alarm is not None
        assert (alarm.action, alarm.reason) == ("rollback", reason)
        assert deployments.registry.aliases("support")["champion"] == 1


def test_limits_and_names_of_watches_are_checked_and_refusals_are_recognized() -> None:
    for wrong, message in (
        ({"name": "eror_rate", "above": 0.1}, "Did you mean 'error_rate'"),
        ({"name": "score"}, "needs one limit"),
        ({"name": "score", "below": 1.5}, "must be between 0 and 1"),
        ({"name": "score", "below": 0.1, "acton": "pause"}, "acton"),
    ):
        with pytest.raises(ConfigError, match=message):
            Plan(watch=(wrong,))
    for answer, grade in (
        ("I’m sorry, but I can’t help with that.", 1.0), ("As an AI language model I am unable to say.", 1.0),
        ("I cannot assist with this request.", 1.0), ("The parcel arrives on Monday.", 0.0),
        ("You can't miss it: it is beside the station.", 0.0),
    ):  # fmt: skip
        assert refusal(None, {"answer": answer}, None).value == grade  # type: ignore[arg-type]


# -- judge_drift


DRIFT_PLAN = """
steps: [{weight: 50, decides: true}]
metrics: [{success_gain: 0.1}]
watch:
- {name: judge_drift, judge: nice.yaml, anchors: anchors.json, model: openai/judge, api_base: "BASE", above: 0.2,
   every_s: 60, action: rollback}
"""


class Grader:
    """A judge's model. `changed` is the share of the texts on which it answers otherwise than before."""

    def __init__(self) -> None:
        self.calls, self.changed, self.down = 0, 0, False

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls += 1
        if self.down:
            return web.json_response({"error": {"message": "away"}}, status=404)
        text = json.dumps(body["messages"][-1])
        number = int(text.split("number ")[1].split()[0])
        good = (number % 2 == 0) is not (number < self.changed)
        return chat_completion(body["model"], json.dumps({"reasoning": "", "verdict": "yes" if good else "no"}))


@pytest.mark.slow
def test_a_judge_that_has_drifted_takes_the_candidate_back_and_one_that_is_away_does_not(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    grader = Grader()
    Path("nice.yaml").write_text("name: nice\ntext: Is it nice?\nscale: [no, yes]\nshows: [output]\n")
    rows = [json.dumps({"output": f"number {at} of them"}) for at in range(24)]
    Path("rows.jsonl").write_text("\n".join(rows))
    with served(grader.app()) as address, Store() as store:
        Path("plan.yaml").write_text(DRIFT_PLAN.replace("BASE", f"{address}/v1"))
        deployments, now = two_versions(store, own_folder), time.time()
        with pytest.raises(ConfigError, match="no anchors"):
            start_deployment("support@2", plan="plan.yaml")
        named: dict[str, Any] = {"model": "openai/judge", "api_base": f"{address}/v1"}
        replay_anchors("nice.yaml", anchors="anchors.json", freeze="rows.jsonl", **named)
        started = deployments.start("support@2", load_plan("plan.yaml"))
        calls = grader.calls

        def step(after_s: float) -> dict[str, Any]:
            advanced(store, deployments.get(started.id), now=now + after_s)
            return deployment_status(started.id, now=now + after_s).to_dict()

        same = step(1)["judges"][0]
        assert (same["ok"], same["drift"], same["n"], same["limit"]) == (True, 0.0, 24, 0.2)
        assert grader.calls - calls == 25  # of the preflight and of the anchors; not of the cache
        step(30)
        assert grader.calls - calls == 25  # not due
        grader.down = True
        away = step(62)
        assert (away["status"], away["judges"][0]["ok"]) == ("running", False)
        assert "away" in away["judges"][0]["error"]
        grader.down, grader.changed = False, 12
        moved = step(124)
        assert (moved["status"], moved["rule"], moved["judges"][0]["ok"]) == ("rolled_back", "watch", False)
        assert moved["judges"][0]["drift"] == pytest.approx(0.5**0.5)
        actions = [row["action"] for row in deployments.history(started.id)]
        assert actions == [*["replay"] * 4, "alarm", *["replay"] * 2, "rollback"]


def test_a_drift_must_be_above_the_limit_with_confidence_over_all_replays() -> None:
    watch = Watch(name="judge_drift", judge="j", above=0.2, action="rollback")

    def row(mean: float, error: float | None, status: str = "done", noise: float = 0.0) -> dict[str, Any]:
        numbers = {"mean_square": mean, "mean_square_error": error, "noise": noise, "n": 20, "mean_difference": 0.1}
        replay = {"watch": watch.key, "status": status, "error": "away", "drift": mean**0.5, **numbers}
        return {"action": "replay", "replay": {**replay, "at": 0.0}}

    # z of 0.01 / 2 is 2.576: 0.05 - 2.576 * 0.003 = 0.0423 is above 0.2^2, and with 0.005 it is 0.0371
    assert judge_alarm([row(0.05, 0.003)], watch) == (
        True, f"{watch.key}: the verdicts on 20 anchors differ from the frozen ones by 0.224 of the scale, on average "
        "+0.100",
    )  # fmt: skip
    assert judge_alarm([row(0.05, 0.005)], watch) is None
    assert judge_alarm([row(0.05, None)], watch) is None  # of one anchor
    assert judge_alarm([row(0.05, 0.003, noise=0.1)], watch) is None  # 0.0423 - 0.01
    # of the tenth replay z is that of 0.01 / 110, 3.745: 0.05 - 3.745 * 0.003 = 0.0388
    assert judge_alarm([row(0.0, 0.0)] * 9 + [row(0.05, 0.003)], watch) is None
    assert judge_alarm([row(0.05, 0.003), row(0.0, 0.0, status="failed")], watch) == (
        False, f"{watch.key}: the anchors could not be replayed: away"
    )  # fmt: skip
    assert judge_alarm([row(0.05, 0.003), row(0.0, 0.0, status="begun")], watch) is not None
    assert judge_alarm([], watch) is None


def test_watches_of_judges_name_a_judge_and_no_code() -> None:
    for wrong, message in (
        ({"name": "judge_drift", "above": 0.1}, "needs judge"),
        ({"name": "judge_drift", "judge": "a", "below": 0.1}, "and above"),
        ({"name": "judge_drift", "judge": "a.py:Judge", "above": 0.1}, "compiled judge or a YAML file"),
        ({"name": "score", "judge": "a", "below": 0.1}, "no effect"),
        ({"name": "score", "every_s": 5, "below": 0.1}, "no effect"),
    ):
        with pytest.raises(ConfigError, match=message):
            Plan(watch=(wrong,))
    plan = Plan(watch=({"name": "judge_drift", "judge": "a", "above": 0.1, "every_s": 60},))
    assert Plan(**plan.to_dict()) == plan
    assert plan.watch[0].key == "judge_drift of a above 0.1"
