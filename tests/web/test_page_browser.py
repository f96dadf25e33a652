"""The page in a real browser: Debian's Chromium, driven by Playwright. Skipped where either is missing.

No browser is downloaded: `apt-get install chromium` and `pip install playwright` bring what these tests need. Tests of
accessibility need `pip install axe-playwright-python`, which holds axe-core.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from compiles import put_compile
from deployed import DEPLOYMENT, put_deployment
from judged import put_judge
from pages import NOW, rollout_of_sums
from trained import put_training

from assay.deployment.deployments import Deployments
from assay.judges.questions import known_questions
from assay.reports.training import TrainingLog
from assay.traces import Store
from assay.traces.store import tables as schema

pytestmark = pytest.mark.slow
HOSTILE = "<script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">\u202e"
PATHS = ("/runs", "/runs/run-1", "/rollouts", f"/rollouts/{2:032x}", "/compare?a=run-1&b=run-1", "/runs/compiled",
         "/runs/training", "/compare?a=compiled&b=compiled", "/deployments", f"/deployments/{DEPLOYMENT}",
         f"/deployments/{DEPLOYMENT}/order/rollback", "/judges", "/judges/{judge}", "/judges/{judge}/label",
         "/judges/{judge}/label?rater=ann", "/judges/{judge}/label?rater=eve", "/data",
         "/data?kind=sft&balance=down")  # fmt: skip
EMPTY = ("/runs", "/rollouts", "/compare", "/judges", "/data", "/deployments")


@pytest.fixture
def tab(tabs: Any, store: Store, tmp_path: Path) -> Iterator[Any]:
    """A tab on a store with everything, in which every text of the user's is hostile or long."""
    store.put_run("run-1", kind="evaluate", config={"program": HOSTILE}, status="running", started_at=NOW)
    for number in (1, 2, 3):
        rollout_of_sums(store, number, inputs={"question": HOSTILE + "long" * 500})
    put_compile(store, tmp_path, text=HOSTILE, run_id="compiled")
    put_deployment(store, agent=HOSTILE[:60], rollouts=4)
    put_judge(store, tmp_path, text=HOSTILE)
    put_training(store, tmp_path, text=HOSTILE)
    yield from tabs.open(store, tmp_path / "page.db")


@pytest.fixture
def empty_tab(tabs: Any, store: Store, tmp_path: Path) -> Iterator[Any]:
    yield from tabs.open(store, tmp_path / "page.db")


def severe(tab: Any, *rules: str) -> list[tuple[str, str, str]]:
    """Rules of axe-core, of all or some, that a page breaks seriously or critically: element and what is wrong."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python")
    options = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
    broken = axe.Axe().run(tab, options=options).response["violations"]
    return [
        (rule["id"], node["html"][:200], node["failureSummary"])
        for rule in broken
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]


def paths(store: Store) -> list[str]:
    (judge,) = known_questions(store)
    return [path.format(judge=judge) for path in PATHS]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1000), ("dark", 1000), ("light", 1600)])
def test_axe_finds_nothing_serious_and_nothing_hostile_runs(tab: Any, store: Store, scheme: str, width: int) -> None:
    tab.emulate_media(color_scheme=scheme)
    tab.set_viewport_size({"width": width, "height": 700})
    changed = ("color-contrast",) if scheme == "dark" else ()
    for path in paths(store):
        tab.goto(tab.base + path)
        assert tab.title().endswith("– assay")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, path
        assert width == 1600 or severe(tab, *changed) == [], path
    assert tab.problems == []
    tab.evaluate("document.querySelector('main').append(document.createElement('input'))")
    assert [rule for rule, _, _ in severe(tab)] == ["label"]  # what is wrong is found


def test_a_phone_shows_every_column_of_a_list_and_pages_fit_its_window(tab: Any, store: Store) -> None:
    beyond = []
    for path in paths(store):
        tab.goto(tab.base + path)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360, path
        assert tab.locator("img").count() == 0
        right = "cells => cells.map(cell => [cell.getBoundingClientRect().right, cell.innerText])"
        cells = tab.locator("table.list tbody :is(td, th):not(.none)").evaluate_all(right)
        beyond += [(path, text) for edge, text in cells if edge > 360]
    assert beyond == []
    assert tab.problems == []


def test_a_phone_cuts_no_text_of_a_chart(tab: Any, store: Store) -> None:
    (judge,) = known_questions(store)
    with store.engine.begin() as connection:  # replays of one minute, whose axis has the longest name
        runs = schema.runs
        connection.execute(sa.update(runs).where(runs.c.id == "judge-drift-before").values(started_at=NOW - 11))
    for path in ("/judges/{judge}", "/runs/training"):
        tab.goto(tab.base + path.format(judge=judge))
        texts = tab.locator("svg.chart text")
        assert texts.count() > 0, path
        beyond = """texts => texts.filter(text => {
            const box = text.getBBox(), view = text.ownerSVGElement.viewBox.baseVal;
            return box.x < view.x || box.x + box.width > view.x + view.width;
        }).map(text => text.textContent)"""
        assert texts.evaluate_all(beyond) == [], path


def test_a_printed_comparison_says_what_was_compared(tab: Any) -> None:
    tab.goto(f"{tab.base}/compare?a=compiled&b=compiled")
    names = tab.locator("dl.printed")
    assert not names.is_visible()
    tab.emulate_media(media="print")
    assert names.is_visible()
    assert not tab.locator("form").is_visible()
    assert "run compiled, sums.py:Sums, test · baseline" in names.inner_text()


def test_a_printed_judge_has_one_wrong_case_of_each_attack(tab: Any, store: Store) -> None:
    (judge,) = known_questions(store)
    tab.goto(f"{tab.base}/judges/{judge}")
    cases, data = tab.locator("details.first").first, tab.locator("details.data")
    assert cases.locator("li").count() > 1
    assert data.count() > 0
    assert data.first.is_visible()
    tab.emulate_media(media="print")
    assert [case.is_visible() for case in cases.locator("li").all()] == [
        True,
        *[False] * (cases.locator("li").count() - 1),
    ]
    assert re.search(r"^1 of \d+\n", cases.locator("xpath=..").inner_text())
    assert not any(part.is_visible() for part in data.all())
    color = "element => getComputedStyle(element, '::before').printColorAdjust"
    assert set(tab.locator(".key").evaluate_all(f"keys => keys.map({color})")) == {"exact"}


def test_pages_of_an_empty_store_say_what_fills_them(empty_tab: Any) -> None:
    for path in EMPTY:
        empty_tab.goto(empty_tab.base + path)
        assert empty_tab.title().endswith("– assay")
        assert len(empty_tab.locator("main").inner_text()) > 40, path
        assert empty_tab.evaluate("document.documentElement.scrollWidth") <= 360
        assert severe(empty_tab) == [], path
    assert {link.inner_text().lower() for link in empty_tab.locator("nav[aria-label=Pages] a").all()} == {
        path.strip("/") for path in EMPTY
    }
    assert empty_tab.problems == []


def test_outputs_are_labelled_with_the_keyboard_alone(tab: Any, store: Store) -> None:
    (judge,) = known_questions(store)
    before = len(list(store.labels(judge)))
    tab.goto(f"{tab.base}/judges/{judge}/label")
    tab.wait_for_function("document.activeElement.name === 'rater'")
    tab.keyboard.type("eve")
    tab.keyboard.press("Enter")
    tab.get_by_text("0 labelled by eve").wait_for()
    tab.keyboard.press("3")
    tab.get_by_text("1 labelled by eve").wait_for()
    tab.get_by_label("Why").focus()
    tab.keyboard.type("1 rude\n")  # digits and Enter in a field are text
    tab.keyboard.press("Escape")
    tab.keyboard.press("1")
    tab.get_by_text("2 labelled by eve").wait_for()
    rows = [row for row in store.labels(judge) if row["rater"] == "eve"]
    assert [(row["label"], row["rationale"]) for row in rows] == [("kind", ""), ("rude", "1 rude")]
    assert len(list(store.labels(judge))) == before + 2
    assert tab.problems == []


def test_a_digit_rates_without_leaving_the_page(tab: Any, store: Store) -> None:
    tab.goto(f"{tab.base}/rollouts/{2:032x}")
    tab.keyboard.press("9")
    tab.get_by_text("rated 1.00").wait_for()
    assert store.rollout(f"{2:032x}").human_rating == 1.0
    tab.keyboard.press("ArrowRight")
    tab.wait_for_url(f"**/{1:032x}")
    assert tab.problems == []


def test_a_key_adds_the_task_to_a_dataset(tab: Any, tmp_path: Path) -> None:
    tab.goto(f"{tab.base}/rollouts/{2:032x}")
    tab.get_by_label("Dataset").fill("mine")
    tab.get_by_label("Dataset").blur()
    tab.keyboard.press("d")
    tab.get_by_text("has 1 task").wait_for()
    tab.get_by_label("its answer").check()
    tab.keyboard.press("d")
    tab.get_by_text("replaced").wait_for()
    (row,) = map(json.loads, (tmp_path / "datasets" / "mine.jsonl").read_text().splitlines())
    assert row["expected"] == {"answer": "3"}
    assert tab.problems == []


def test_a_list_shows_runs_added_since_the_last_request(tab: Any, store: Store) -> None:
    tab.goto(f"{tab.base}/rollouts")
    rollout_of_sums(store, 9)
    store.flush()
    tab.locator(f"#rollout-{9:032x}").wait_for(timeout=60_000)
    assert tab.problems == []


def test_a_training_draws_new_steps_and_leaves_open_what_is_open(tab: Any, tmp_path: Path) -> None:
    log = TrainingLog(tmp_path / "runs" / "training")
    log.values(3, {"reward": 0.75, "score": 0.5}, {"kl": HOSTILE})
    tab.goto(f"{tab.base}/runs/training")
    tab.locator("summary", has_text="Data").first.click()
    log.values(4, {"reward": 0.875, "score": 0.5}, {"kl": HOSTILE})
    tab.get_by_text("4 of 9").wait_for(timeout=60_000)
    assert tab.locator("details[open] th", has_text="4").count() == 1
    assert tab.locator("svg.chart .end.first").first.evaluate("e => getComputedStyle(e).fill") != "rgb(0, 0, 0)"
    assert tab.problems == []


def test_the_json_of_a_call_is_loaded_when_it_is_opened(tab: Any) -> None:
    tab.goto(f"{tab.base}/rollouts/{2:032x}")
    tab.get_by_text("JSON of this call").click()
    tab.locator("details.json pre").first.wait_for()
    assert '"latency_ms": 40.0' in tab.locator("details.json pre").first.inner_text()
    assert tab.problems == []


def test_a_deployment_is_rolled_back_with_the_keyboard_alone(tab: Any, store: Store) -> None:
    tab.goto(f"{tab.base}/deployments/{DEPLOYMENT}")
    focus(tab, "Roll back …")
    tab.keyboard.press("Enter")
    tab.wait_for_url("**/order/rollback")
    tab.get_by_label("Reason").focus()
    tab.keyboard.type("slow")
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")
    tab.wait_for_url(f"**/deployments/{DEPLOYMENT}")
    (row,) = Deployments(store.engine).history(DEPLOYMENT)
    assert (row["action"], row["reason"]) == ("rollback", "slow")
    assert tab.problems == []


def focus(tab: Any, text: str) -> None:
    """Presses Tab until the element with this text has the focus."""
    for _ in range(60):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.textContent").strip() == text:
            return
    raise AssertionError(f"Tab does not reach {text!r}")
