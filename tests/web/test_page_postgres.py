"""Every page on a real PostgreSQL, and read by an index as SQLite plans its queries."""

import re
from pathlib import Path

import pytest
from judged import put_judge
from pages import PATHS, ROLLOUT, Browser, Scans, browse, got, posted, rollout_of_sums, three_rollouts

from assay.traces import Store
from assay.traces.store.paging import Cursor, RolloutFilters, rollout_page


@pytest.mark.slow
def test_every_page_works_on_postgresql(postgres_url: str, tmp_path: Path) -> None:
    with Store(postgres_url) as store:
        three_rollouts(store)
        key = put_judge(store, tmp_path)
        label = f"/judges/{key}/label?rater=eve"
        paths = [*PATHS, "/judges", f"/judges/{key}", label, "/data?kind=transitions"]
        pages = dict(zip(paths, got(store, *paths), strict=True))
        assert {path: status for path, (status, _) in pages.items() if status != 200} == {}
        assert posted(store, f"/rollouts/{ROLLOUT}/rating", rating="0.5").status == 303
        assert store.rollout(ROLLOUT).human_rating == 0.5
        fields = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', pages[label][1]))
        del fields["csrf"]
        assert posted(store, f"/judges/{key}/labels", label="rude", **fields).status == 303
        assert [row["label"] for row in store.labels(key) if row["rater"] == "eve"] == ["rude"]


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


def test_large_runs_and_tasks_are_read_by_time(store: Store) -> None:
    for number in range(5):
        rollout_of_sums(store, number, task_id="task-1")
    store.flush()
    with Scans(store) as scans:
        for column, value in {"run_id": "run-1", "task_id": "task-1", "status": "done"}.items():
            for place in ({}, {"before": Cursor(107.0, "x")}, {"after": Cursor(107.0, "x")}):
                rollout_page(store, RolloutFilters(equal={column: value}), window=2, **place)
    assert scans == []


def test_a_full_table_scan_is_detected(store: Store) -> None:
    with Scans(store) as scans:
        list(store.rollouts(limit=1))
    assert scans != []
