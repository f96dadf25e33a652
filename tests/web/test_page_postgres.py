"""Every page on a real PostgreSQL."""

import pytest
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
