"""Takes the screenshots of `assay view` that the documentation shows: of what a store has.

    python docs/page_images.py STORE [FOLDER]

Needs Debian's Chromium and Playwright. The newest compile, its evaluations compared, a rollout of its search, the
newest deployment, study and training, and the judge with most labels are shown.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

CHROMIUM = "/usr/bin/chromium"
WIDE, PHONE = (1100, 760), (360, 640)
MOST_BYTES = 150_000
PATIENCE_MS = 60_000
ANCHORS = {"judge": "Agreement with raters", "training": "Curves"}  # headings to which pages are scrolled


def pages_of(tab: Any, base: str) -> dict[str, str]:
    """Addresses of the pages that the store has, by the name of the picture."""

    def first(path: str, pattern: str) -> str | None:
        tab.goto(base + path)
        match = re.search(pattern, tab.content())
        return match[1].replace("&amp;", "&") if match else None

    run = first("/runs?kind=compile", r'href="(/runs/[^"?]+)"')
    of_run = "" if run is None else f"&phase=search&run={run.rpartition('/')[2]}"  # has the same task by other versions
    rollout = first(f"/rollouts?split=val&status=done{of_run}", r'href="(/rollouts/[^"]+)"')
    deployment = first("/deployments", r'href="(/deployments/[^"]+)"')
    judge = first("/judges", r'href="(/judges/[0-9a-f]+)"')
    study = first("/runs?kind=tune", r'href="(/runs/[^"?]+)"')
    training = first("/runs?kind=train", r'href="(/runs/[^"?]+)"')
    compare = None if run is None else f"/compare?a={run.rpartition('/')[2]}&b={run.rpartition('/')[2]}"
    places = {
        "runs": "/runs", "compile": run, "rollout": rollout, "deployment": deployment, "judge": judge,
        "label": None if judge is None else f"{judge}/label?rater=ann", "study": study,
        "training": training, "compare": compare,
    }  # fmt: skip
    return {name: place for name, place in places.items() if place is not None}


def take(tab: Any, file: Path, anchor: str = "") -> None:
    """One picture of what the window shows.

    Args:
        anchor: text of a heading to which it is scrolled.
    """
    if anchor and tab.get_by_role("heading", name=anchor).count():
        tab.get_by_role("heading", name=anchor).first.scroll_into_view_if_needed()
        tab.get_by_role("heading", name=anchor).first.evaluate("element => element.scrollIntoView()")
    tab.screenshot(path=str(file))
    if (size := file.stat().st_size) > MOST_BYTES:
        raise SystemExit(f"{file} has {size:,} bytes, more than {MOST_BYTES:,}")
    print(f"{file}: {size:,} bytes")


def main(store: str, folder: str = "docs/images") -> None:
    """Starts the page over a store, and writes the pictures."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "assay", "view", "--json", "--port", "0", "--store", store]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = json.loads(server.stdout.readline())["address"]
        base = address.partition("/?")[0]
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
            tab = browser.new_context(viewport={"width": WIDE[0], "height": WIDE[1]}).new_page()
            tab.set_default_timeout(PATIENCE_MS)
            tab.goto(address)
            places = pages_of(tab, base)
            for name, place in places.items():
                tab.goto(base + place)
                take(tab, target / f"page-{name}.png", ANCHORS.get(name, ""))
                if name == "compile":
                    for part in ("Prompt before and after", "Candidates"):
                        tab.evaluate("document.querySelectorAll('details').forEach(part => (part.open = !part.open))")
                        if tab.get_by_role("heading", name=part).count():
                            take(tab, target / f"page-{part.split()[0].lower()}.png", part)
            tab.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
            tab.emulate_media(color_scheme="dark")
            if "compile" in places:
                tab.goto(base + places["compile"])
                take(tab, target / "page-phone.png")
            tab.goto(base + places["runs"])
            take(tab, target / "page-phone-runs.png")
            browser.close()
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    main(*sys.argv[1:])
