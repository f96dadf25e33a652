"""An empty store for each test, and a browser."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from assay.traces import Store
from assay.web.server import LocalPage, PageAccess
from rigs.serving import served

CHROMIUM = Path("/usr/bin/chromium")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "page.db") as opened:
        yield opened


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if not CHROMIUM.is_file():
        pytest.skip(f"there is no {CHROMIUM}: apt-get install chromium")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


class Tabs:
    """Opens the printed address of a page. Errors of scripts and refused requests end up in the tab's `problems`."""

    def __init__(self, chromium: Any) -> None:
        self.chromium = chromium

    def open(self, store: Store, where: Path, *, width: int = 360, height: int = 700) -> Iterator[Any]:
        access = PageAccess(None, host="127.0.0.1")
        with served(LocalPage(store, access, where=where).app()) as url:
            context = self.chromium.new_context(viewport={"width": width, "height": height})
            tab = context.new_page()
            tab.base, tab.problems = url, []
            problems = tab.problems
            tab.on("pageerror", lambda error: problems.append(str(error)))
            tab.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
            tab.on("request", lambda request: problems.append(request.url) if "127.0.0.1" not in request.url else None)
            tab.goto(f"{url}/?token={access.token}")
            yield tab
            context.close()


@pytest.fixture(scope="module")
def tabs(chromium: Any) -> Tabs:
    return Tabs(chromium)
