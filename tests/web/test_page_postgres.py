"""Every page on a real PostgreSQL."""

import re
from pathlib import Path

import pytest
from judged import put_judge
from pages import PATHS, ROLLOUT, Browser, browse, three_rollouts

from assay.traces import Store


@pytest.mark.slow
def test_every_page_works_on_postgresql(postgres_url: str) -> None:
    with Store(postgres_url) as store:
        three_rollouts(store)

        async def visit(browser: Browser) -> dict[str, int]:
            statuses = {path: (await browser.get(path))[0] for path in PATHS}
            data = {"rating": "0.5", "csrf": browser.access.csrf}
            rated = await browser.send("POST", f"/rollouts/{ROLLOUT}/rating", data=data)
            return {**statuses, "rating": rated.status}

        assert {path: status for path, status in browse(store, visit).items() if status != 200} == {}
        assert store.rollout(ROLLOUT).human_rating == 0.5


@pytest.mark.slow
def test_judges_are_shown_and_outputs_labelled_on_postgresql(postgres_url: str, tmp_path: Path) -> None:
    with Store(postgres_url) as store:
        key = put_judge(store, tmp_path)

        async def visit(browser: Browser) -> list[int]:
            paths = ("/judges", f"/judges/{key}", f"/judges/{key}/label?rater=eve", "/data?kind=transitions")
            pages = [await browser.get(path) for path in paths]
            fields = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', pages[2][1]))
            data = {**fields, "label": "rude"}
            stored = await browser.send("POST", f"/judges/{key}/labels", data=data, follow=False)
            return [*(status for status, _ in pages), stored.status]

        assert browse(store, visit) == [200, 200, 200, 200, 303]
        assert [row["label"] for row in store.labels(key) if row["rater"] == "eve"] == ["rude"]
