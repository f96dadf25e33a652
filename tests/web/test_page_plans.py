"""Every page reads rollouts and transitions by an index, as SQLite plans its queries."""

import pytest
from pages import Browser, Scans, browse, rollout_of_sums

from assay.traces import Store
from assay.traces.store.paging import Cursor, RolloutFilters, rollout_page

ROLLOUT = f"{2:032x}"
PLACE = f"1750000002.0~{ROLLOUT}"
PATHS = [
    "/runs", "/runs?kind=evaluate&program=p&status=done&since=1d", "/runs/run-1", "/runs/run-1?count=all", "/rollouts",
    "/rollouts?text=a&program=b&least=0.1&most=1&since=1d", "/rollouts?status=failed&split=val&failure=parse&phase=x",
    f"/rollouts?source=judge&before={PLACE}", f"/rollouts?after={PLACE}", "/rollouts?run=run-1",
    "/rollouts?task=task-1", f"/rollouts/{ROLLOUT}", f"/rollouts/{ROLLOUT}?status=done&run=run-1",
    f"/rollouts/{ROLLOUT}/json", f"/rollouts/{ROLLOUT}/calls/0", "/compare", "/compare?a=run-1&b=run-1",
]  # fmt: skip


def test_no_page_scans_rollouts_or_transitions(store: Store) -> None:
    store.put_run("run-1", kind="evaluate", config={}, status="running", started_at=1.0)
    for number in (1, 2, 3):
        rollout_of_sums(store, number)
    store.flush()

    async def visit(browser: Browser) -> dict[str, list[str]]:
        found = {}
        for path in PATHS:
            with Scans(store) as scans:
                status, text = await browser.get(path)
            assert status == 200, text
            found[path] = list(scans)
        with Scans(store) as scans:
            data = {"rating": "1", "csrf": browser.access.csrf}
            assert (await browser.send("POST", f"/rollouts/{ROLLOUT}/rating", data=data)).status == 200
        return {**found, "rating": list(scans)}

    assert {path: scans for path, scans in browse(store, visit).items() if scans} == {}


@pytest.mark.parametrize("place", [{}, {"before": Cursor(107.0, "x")}, {"after": Cursor(107.0, "x")}])
@pytest.mark.parametrize("column", ["run_id", "task_id", "status"])
def test_large_runs_and_tasks_are_read_by_time(store: Store, column: str, place: dict[str, Cursor]) -> None:
    for number in range(5):
        rollout_of_sums(store, number, task_id="task-1")
    store.flush()
    value = {"run_id": "run-1", "task_id": "task-1", "status": "done"}[column]
    with Scans(store) as scans:
        rollout_page(store, RolloutFilters(equal={column: value}), window=2, **place)
    assert scans == []


def test_a_scan_is_noticed(store: Store) -> None:
    with Scans(store) as scans:
        list(store.rollouts(limit=1))
    assert scans != []
