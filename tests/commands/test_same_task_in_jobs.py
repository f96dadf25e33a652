"""One task is one task in every job: twins share a split, the store's split stands, few rows fill all splits."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.datasets.tasks import task_key
from assay.errors import DataError
from assay.testing import scripted_lm
from assay.traces import Store
from assay.traces.store.sealing import SplitFinder, known_splits, store_splits
from rigs.command_line import assay_command
from rigs.projects import write_project, write_rows

SEALED = ("gate", "test")
PLACES = [f"{name} {kind}" for name in ("Oak", "Elm", "Ash", "Bay", "Fig") for kind in ("Road", "Lane", "Hill", "Gate")]
Rows = list[dict[str, Any]]


def question(at: int) -> str:
    return f"Which parcels for {PLACES[at % 20]} number {7919 * at % 1000} are still on their way?"


def rows(count: int, **more: Any) -> Rows:
    return [{"question": question(at), "answer": "7", **more} for at in range(count)]


@pytest.fixture
def job(own_folder: Path) -> dict[str, Any]:
    write_project()
    return {"rubric": "r.yaml", "lm": scripted_lm(lambda _: json.dumps({"answer": "7"})), "store": "s.db"}


def evaluate(job: dict[str, Any], data: Rows, split: str = "val", file: str = "d.csv", **more: Any) -> Any:
    return assay.evaluate("mine.py:Mine", data=write_rows(file, data), split=split, **job, **more)


def compile(job: dict[str, Any], data: Rows) -> Any:
    return assay.compile("mine.py:Mine", data=write_rows("d.csv", data), optimizer="labeled", out="a", **job)


def tasks_of_artifact() -> dict[str, list[str]]:
    return dict(json.loads(Path("a/splits.json").read_text())["tasks"])


def plain(text: str) -> str:
    return " ".join(text.casefold().split())


def rollouts_by_split() -> dict[str, set[str]]:
    """Plain questions of the recorded rollouts by split."""
    by_split: dict[str, set[str]] = {}
    with Store("s.db") as store:
        for rollout in store.rollouts():
            if rollout.source == "program":
                by_split.setdefault(rollout.split, set()).add(plain(rollout.inputs["question"]))
    return by_split


def test_twins_of_test_tasks_are_never_learned_from(job: dict[str, Any]) -> None:
    spellings = (str, str.upper, lambda text: f" {text.lower()}\n", lambda text: text.replace(" ", "  "))
    twins = [
        {**row, "question": spell(row["question"])}
        for spell, first in zip(spellings, (0, 0, 10, 20), strict=True)
        for row in rows(40)[first:]
    ]
    report = compile(job, twins).to_dict()
    assert "test" not in rollouts_by_split()  # the baseline is kept
    tasks = tasks_of_artifact()
    assert sum(map(len, tasks.values())) == len(twins)
    assert not {key for name in SEALED for key in tasks[name]} & {*tasks["train"], *tasks["val"]}
    assert report["data"]["repeated"]["count"] == len(twins) - 40
    assert any("with the inputs of an earlier row" in note for note in report["notes"])


LATER: dict[str, tuple[Rows, dict[str, Any]]] = {
    "upper case": ([{**row, "question": row["question"].upper()} for row in rows(60)], {}),
    "another split column": (rows(60, split="train"), {}),
    "other sizes": (rows(60), {"sizes": {"train": 50, "val": 5, "gate": 5, "test": 5}}),
}


@pytest.mark.parametrize("changed", LATER)
def test_a_later_job_keeps_the_splits_of_the_store(job: dict[str, Any], changed: str) -> None:
    evaluate(job, rows(60), split="test", file="d.jsonl")
    tested = rollouts_by_split()["test"]
    again, options = LATER[changed]
    data = write_rows("e.csv", again)
    report = assay.collect("mine.py:Mine", data=data, n=1, split="train", **job, **options).to_dict()
    kept = report["data"]["split_kept"]
    assert not tested & rollouts_by_split()["train"]
    if changed == "another split column":
        assert {row["split"] for row in kept["rows"]} == {"val", "gate", "test"}
        assert {row["wanted"] for row in kept["rows"]} == {"train"}
        of_test = [row["row"] for row in kept["rows"] if row["split"] == "test"]
        lines = Path(data).read_text().splitlines()
        assert {plain(lines[int(place.rpartition(":")[2]) - 1].split(",")[0]) for place in of_test} == tested
        assert any("e.csv:" in note for note in report["notes"])
    else:
        assert kept["count"] == 0


def test_a_named_split_stands_for_a_later_file_without_one(job: dict[str, Any]) -> None:
    evaluate(job, [{**row, "split": ("train", "val", "gate", "test")[at % 4]} for at, row in enumerate(rows(60))])
    evaluate(job, rows(60), split="test", file="e.jsonl")
    assert rollouts_by_split()["test"] == {plain(question(at)) for at in range(3, 60, 4)}


TYPED = """
import dspy, datetime, pydantic

class Parcel(pydantic.BaseModel):
    place: str
    urgent: bool = False

class Typed(dspy.Module):
    def forward(self, parcel: Parcel, sent: datetime.datetime):
        return dspy.Prediction(answer="7")

class Plain(dspy.Module):
    def forward(self, parcel, sent):
        return dspy.Prediction(answer="7")
"""


@pytest.mark.parametrize("count", [12, 48])
@pytest.mark.parametrize("programs", [("Typed", "Plain"), ("Plain", "Typed")])
def test_a_task_keeps_its_split_in_a_program_with_other_types(
    job: dict[str, Any], programs: tuple[str, str], count: int
) -> None:
    Path("t.py").write_text(TYPED)
    inputs: Rows = [
        {"parcel": json.dumps({"place": question(at)}), "sent": f"2024-02-{at % 28 + 1:02} 10:30"}
        for at in range(count)
    ]
    data = write_rows("d.jsonl", [{"id": f"t{at}", **row, "answer": "7"} for at, row in enumerate(inputs)])
    splits: list[dict[str, str]] = []
    for program in programs:
        assay.evaluate(f"t.py:{program}", data=data, split="all", preflight=False, **job)
        with Store("s.db") as store:
            splits.append({r.task_id: r.split for r in store.rollouts() if r.program == f"t.py:{program}"})
            finder = SplitFinder(store)
            assert {f"t{at}": finder.of_inputs(row) for at, row in enumerate(inputs)} == splits[0]
    assert len(splits[0]) == count
    assert splits[0] == splits[1]


def test_rows_with_one_key_are_scored_each(job: dict[str, Any]) -> None:
    twins = [
        {"question": question(0).upper(), "answer": "8", "split": "val"},
        {"question": question(1), "answer": "8", "split": "val"},
        {"question": question(1), "answer": "7", "split": "val"},
    ]
    report = evaluate(job, [*rows(5, split="val"), *twins])
    assert sorted(report.evaluation.scores.values()) == [0.0, 0.0, *[1.0] * 6]
    assert (report.to_dict()["result"]["n"], report.to_dict()["result"]["score"]) == (8, 0.75)
    repeated = report.to_dict()["data"]["repeated"]
    assert [(row["row"], row["first"], row["differs"]) for row in repeated["rows"]] == [
        ("d.csv:7", "d.csv:2", ["answer"]), ("d.csv:8", "d.csv:3", ["answer"]), ("d.csv:9", "d.csv:3", []),
    ]  # fmt: skip


def test_near_duplicates_across_splits_are_counted_and_shown(job: dict[str, Any]) -> None:
    others = [f"{question(at)} Thanks!" for at in range(2)] + [f"Something else, {at * 7919}" for at in range(4)]
    data = [*rows(6, split="train"), *({"question": text, "answer": "7", "split": "val"} for text in others)]
    near = evaluate(job, data).to_dict()["data"]["near_duplicates"]
    assert near["count"] == 4
    assert {(row["row"], row["other"]) for row in near["examples"]} <= {
        (f"d.csv:{a}", f"d.csv:{b}") for at in range(2) for a, b in ((at + 2, at + 8), (at + 8, at + 2))
    }
    words = ["evaluate", "mine.py:Mine", "--rubric", "r.yaml", "--data", "d.csv", "--store", "s.db", "--dry-run"]
    ended = assay_command(*words)
    assert re.search("d.csv:[23]", ended.stdout + ended.stderr)


# -- small files


@pytest.mark.parametrize("count", [4, 10, 39])
@pytest.mark.parametrize("named", [False, True])
def test_few_rows_compile(job: dict[str, Any], count: int, named: bool) -> None:
    compile(job, rows(count, **({"split": ""} if named else {})))
    sizes = [len(keys) for keys in tasks_of_artifact().values()]
    assert (min(sizes) >= 1, sum(sizes)) == (True, count)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_too_few_rows_are_refused_with_the_number_that_is_needed(job: dict[str, Any], count: int) -> None:
    with pytest.raises(DataError, match=rf"d\.csv has {count} distinct tasks?.* at least 4 are needed"):
        compile(job, rows(count) * 2)
    assert len(evaluate(job, rows(count) * 2).evaluation) == 2


def test_splits_of_few_rows_stay_when_the_file_grows(job: dict[str, Any]) -> None:
    known: dict[str, str] = {}
    for count in (10, 12, 39, 50):
        evaluate(job, rows(count))
        now = known_splits("s.db")
        assert len(now) == count
        assert known.items() <= now.items()
        known = now


def test_all_rows_are_scored_and_the_score_is_not_held_out(job: dict[str, Any]) -> None:
    data = [{**row, "answer": "7" if at % 2 else "8"} for at, row in enumerate(rows(10))]
    report = evaluate(job, [*data, data[3]], split="all")
    stored = report.to_dict()
    assert (stored["split"], stored["result"]["n"], stored["held_out"]) == ("all", 11, False)
    assert stored["test_openings"] == {"this_job": 1, "this_store": 1}
    assert any("not held out" in note for note in stored["notes"])
    again = evaluate(job, [*data, data[3]], split="test").to_dict()
    assert (again["test_openings"], again["held_out"]) == ({"this_job": 1, "this_store": 2}, True)
    assert {split for split in rollouts_by_split() if split} == {"train", "val", "gate", "test"}
    assert "not held out" in report.write_page("page.html", store="s.db").read_text()
    many = evaluate(job, rows(310, split="test"), split="all", preflight=False)
    assert len(many.evaluation) == 310  # it has no limit of rows


# -- labels


def test_a_judge_is_not_tested_on_twins_of_what_it_learned_from(job: dict[str, Any]) -> None:
    texts = [f"{'Lovely' if at % 2 else 'Awful'} parcel for {PLACES[at % 20]} {7919 * at % 1000}" for at in range(60)]
    items = [
        {"output": spell(text), "label": "yes" if at % 2 else "no", "split": ("train", "test")[which]}
        for which, spell in enumerate((str, lambda text: f"{text.upper()} "))
        for at, text in enumerate(texts[:20])
    ]
    items += [{"output": text, "label": "yes" if at % 2 else "no", "split": ""} for at, text in enumerate(texts[20:])]

    def friendly(request: Any) -> Any:
        return {"yes": 0.9, "no": 0.1} if "lovely" in str(request.messages[-1]).lower() else {"yes": 0.2, "no": 0.8}

    def compiled(labels: str, out: str, store: str = "s.db") -> tuple[Any, dict[str, set[str]]]:
        report = assay.compile_judge(
            "Is it friendly?", labels=labels, lm=scripted_lm(friendly, logprobs=True), scale=["no", "yes"], out=out,
            store=store, optimizer="calibrate",
        )  # fmt: skip
        stored = json.loads((report.artifact / "splits.json").read_text())["items"]
        assert sum(map(len, stored.values())) == len(items)
        return report, {name: set(keys) for name, keys in stored.items()}

    report, splits = compiled(write_rows("l.csv", items), "j")
    assert not splits["test"] & (splits["train"] | splits["val"] | splits["gate"])
    kept = report.to_dict()["data"]["split_kept"]
    assert {(row["wanted"], row["split"]) for row in kept["rows"]} == {("test", "train")}
    assert kept["count"] == 20
    other = write_rows("m.csv", [{**row, "split": "train"} for row in items])
    with pytest.raises(DataError, match="no items in the splits"):
        compiled(other, "none", store="t.db")
    assert compiled(other, "k")[1] == splits


# -- jobs at the same time


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("empty_postgres_url"))
    return str(tmp_path / "shared.db")


def test_jobs_that_assign_splits_at_the_same_time_agree(where: str) -> None:
    keys = [task_key({"question": question(at)}) for at in range(60)]
    Store(where).close()
    others: dict[str, dict[str, str]] = {}

    def assign(split: str) -> None:
        with Store(where) as store:
            others[split] = store_splits(store, {split: keys if split == "train" else keys[::-1]})

    threads = [threading.Thread(target=assign, args=(split,)) for split in ("train", "val", "test")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    known = known_splits(where)
    assert known.keys() == set(keys)
    for split, differing in others.items():
        assert differing == {key: name for key, name in known.items() if name != split}
