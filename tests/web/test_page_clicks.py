"""How many clicks an answer takes, in a real browser: the column `assay view` of docs/explanation/page.md."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from compiles import put_compile
from judged import put_judge
from pages import NOW, put_report, rollout_of_sums
from test_page_studies import TUNED
from trained import put_before_and_after, put_training

from assay.traces import Store

pytestmark = pytest.mark.slow
TABLE = Path(__file__).parents[2] / "docs" / "explanation" / "page.md"


@dataclass
class Person:
    """Clicks on the page, counted."""

    tab: Any
    clicks: int = 0

    def click(self, name: str) -> None:
        self.clicks += 1
        self.tab.locator("main, nav").get_by_role("link", name=name, exact=True).first.click()

    def press(self, name: str) -> None:
        self.clicks += 1
        self.tab.get_by_role("button", name=name, exact=True).click()

    def sees(self, text: str) -> None:
        """The text is on the page, and not inside a part that is folded."""
        self.tab.get_by_text(text).first.wait_for(state="visible", timeout=60_000)


def documented() -> dict[str, str]:
    """The cells of `assay view` by question."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \|", TABLE.read_text(), re.M)
    return {question: cell for question, cell in rows if question != "question"}


@pytest.fixture(scope="module")
def tab(tabs: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A tab on a store that has one run of each kind."""
    folder = tmp_path_factory.mktemp("clicks")
    with Store(folder / "page.db") as store:
        fill(store, folder)
        yield from tabs.open(store, folder / "page.db", width=1280, height=800)


@pytest.fixture
def person(tab: Any) -> Person:
    """At the list of runs."""
    tab.goto(f"{tab.base}/runs")
    return Person(tab)


def fill(store: Store, folder: Path) -> None:
    for run, start, score in (("before", 500, 0.5), ("after", 600, 1.0)):
        store.put_run(run, kind="evaluate", config={"program": "sums.py:Sums"}, status="done", started_at=NOW + start)
        for task in range(6):
            fields = {"run_id": run, "task_id": f"t{task}", "phase": "evaluate", "score": 0.0 if task == 3 else score}
            rollout_of_sums(store, start + task, **fields)
    put_compile(store, folder, run_id="compiled")
    put_judge(store, folder)
    put_training(store, folder, status="done")
    put_before_and_after(store)
    store.put_run("study", kind="tune", config={"program": "p"}, status="done", started_at=NOW)
    put_report(store, TUNED, run_id="study")
    store.flush()


QUESTIONS = {
    "Which tasks got worse in this compile, and in which criteria?": (["compiled"], "right 1 → 0"),
    "Which tasks does this evaluation fail?": (["after"], "Tasks, the lowest score first"),
    "Is the gain more than noise?": (["compiled"], "95 % interval"),
    "Is this judge to be trusted?": (["Judges", "{judge}"], "Is it to be trusted?"),
    "Where does the judge disagree with people?": (["Judges", "{judge}"], "Where it disagrees with people"),
    "Has the judge drifted?": (["Judges", "{judge}"], "Drift"),
    "What did this cost?": (["after"], "LM calls"),
    "What changed in the prompt?": (["compiled"], "Prompt before and after"),
    "Which parameter mattered?": (["study"], "Importance"),
    "Does the training learn, and where does it go wrong?": (["training"], "the KL is high"),
    "Which tasks got better or worse by this training?": (["training", "sums.py:Sums, greedy"], "+0.250 on 6 tasks"),
    "What should I do next?": (["compiled"], "Commands"),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_answer_takes_as_many_clicks_as_the_table_says(person: Person, question: str) -> None:
    names, answer = QUESTIONS[question]
    for name in names:
        if name == "{judge}":
            name = person.tab.locator("main table a").first.inner_text()
        person.click(name)
    person.sees(answer)
    assert documented()[question].startswith(f"{person.clicks}:")


def test_two_evaluations_are_compared_in_four_clicks(person: Person) -> None:
    person.click("before")
    person.click("Compare with another run")
    person.tab.locator("input[name=b]").fill("after")  # chosen from the list of the field
    person.clicks += 1
    person.press("Compare")
    person.sees("5 better, 0 worse, 1 the same")
    assert documented()["Which tasks differ between two evaluations?"].startswith(f"{person.clicks}:")


def test_the_other_version_of_a_task_is_one_click_from_its_rollout(person: Person) -> None:
    person.click("compiled")
    person.click("1.000")  # the task that got worse, before
    person.clicks = 0
    person.click("winner: two demonstrations")
    person.sees("baseline")
    assert documented()["What did the other version do on this task?"].startswith(f"{person.clicks} more:")


def test_a_failed_task_is_one_click_from_its_rollout_and_one_key_from_a_dataset(person: Person) -> None:
    person.click("after")
    person.clicks = 0
    person.click("0.000")
    person.sees("How much is 603 + 1?")
    person.sees("the sum is right")  # the reason of the verdict
    assert documented()["Why did this task fail?"].startswith(f"{person.clicks} more:")
    person.tab.keyboard.press("d")
    person.sees("has 1 task")
    assert documented()["Keep this failure as a test"].startswith("1: a key")
