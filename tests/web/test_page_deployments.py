"""The pages of deployments: what they show, and that an order needs a confirmation which is not out of date."""

from typing import Any

from compiles import HOSTILE
from deployed import DEPLOYMENT, put_deployment
from pages import Browser, Scans, browse, got, links_in, read

from assay.deployment.deployments import Deployments
from assay.traces import Store

ESCAPED = "&lt;script&gt;alert(1)&lt;/script&gt;[U+202E][U+0007]"


def test_a_deployment_shows_stage_metrics_and_decision(store: Store) -> None:
    assert "The store holds no deployments yet" in read(store, "/deployments")
    put_deployment(store, agent=f"support{HOSTILE}")
    address = f"/deployments/{DEPLOYMENT}"
    assert address in links_in(read(store, "/deployments"), "/deployments/")
    with Scans(store) as scans:
        text = read(store, address)
    assert scans == []
    for part in (
        "50 % of the units on the candidate", '<li aria-current="step">50 %</li>', "<strong>Wait</strong>",
        "<li>70 %, decides</li>", f"support{ESCAPED}", "0.500", "0.733", "error_rate", "No decision so far.",
    ):  # fmt: skip
        assert part in text, part
    assert "<script>" not in text
    orders = [link.rpartition("/")[2] for link in links_in(text, f"{address}/order/")]
    assert orders == ["promote", "pause", "rollback"]


def test_an_order_is_confirmed_and_kept(store: Store) -> None:
    put_deployment(store, rollouts=2)
    address = f"/deployments/{DEPLOYMENT}"

    async def visit(browser: Browser) -> dict[str, Any]:
        answers: dict[str, Any] = {"confirm": await browser.get(f"{address}/order/rollback")}
        answers["unknown"] = await browser.get(f"{address}/order/resume")
        form = {"action": "rollback", "reason": f"it is slow {HOSTILE}", "decided": "0", "csrf": browser.access.csrf}
        sent = {"no token": {"csrf": ""}, "late": {"decided": "7"}, "done": {}, "again": {"decided": "1"}}
        for name, more in sent.items():
            answer = await browser.send("POST", f"{address}/order", data={**form, **more})
            answers[name] = answer.status, await answer.text()
        return answers

    answers = browse(store, visit)
    assert "All units get the champion now." in answers["confirm"][1]
    assert 'name="decided" value="0"' in answers["confirm"][1]
    statuses = {name: status for name, (status, _) in answers.items()}
    assert statuses == {"confirm": 200, "unknown": 400, "no token": 403, "late": 400, "done": 200, "again": 400}
    assert "something was decided since" in answers["late"][1]
    assert "<strong>Rolled back</strong>: <bdi>it is slow &lt;script&gt;" in answers["done"][1]
    assert "assay deploy advance" not in answers["done"][1]
    assert "<h2>Metrics</h2>" in answers["done"][1]
    assert "error_rate" in answers["done"][1]
    deployments = Deployments(store.engine)
    assert deployments.get(DEPLOYMENT).state.status == "rolled_back"
    assert [row["action"] for row in deployments.history(DEPLOYMENT)] == ["rollback"]


def test_an_unknown_deployment_is_not_found(store: Store) -> None:
    pages = got(store, *(f"/deployments/{name}" for name in ("nowhere", "%00", "nowhere/order/promote")))
    assert [status for status, _ in pages] == [404, 404, 404]
