"""Every page reads rollouts and transitions by an index, as SQLite plans its queries."""

import pytest
from pages import PATHS, ROLLOUT, Browser, Scans, browse, rollout_of_sums, three_rollouts

from assay.traces import Store
from assay.traces.store.paging import Cursor, RolloutFilters, rollout_page


def test_no_page_scans_rollouts_or_transitions(store: Store) -> None:
    three_rollouts(store)

    async def visit(browser: Browser) -> dict[str, list[str]]:
        scans_by_page = {}
        for path in PATHS:
            with Scans(store) as scans:
                status, text = await browser.get(path)
            assert status == 200, text
            scans_by_page[path] = list(scans)
        with Scans(store) as scans:
            data = {"rating": "1", "csrf": browser.access.csrf}
            assert (await browser.send("POST", f"/rollouts/{ROLLOUT}/rating", data=data)).status == 200
        return {**scans_by_page, "rating": list(scans)}

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


def test_a_full_table_scan_is_detected(store: Store) -> None:
    with Scans(store) as scans:
        list(store.rollouts(limit=1))
    assert scans != []
