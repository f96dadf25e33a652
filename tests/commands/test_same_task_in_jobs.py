"""One task is one task in every job: twins share a split, the store's split stands, few rows fill all splits."""

import csv
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import assay
from assay.cli.main import group
from assay.datasets.tasks import task_key
from assay.errors import DataError
from assay.testing import scripted_lm
from assay.traces import Store
from assay.traces.store.sealing import SplitFinder, known_splits, store_splits

SEALED = ("gate", "test")
PLACES = [f"{name} {kind}" for name in ("Oak", "Elm", "Ash", "Bay", "Fig") for kind in ("Road", "Lane", "Hill", "Gate")]


def question(at: int) -> str:
    return f"Which parcels for {PLACES[at % 20]} number {7919 * at % 1000} are still on their way?"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    Path("p.py").write_text(
        "import dspy\n\nclass P(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.ask = dspy.Predict('question -> answer')\n\n"
        "    def forward(self, question):\n        return self.ask(question=question)\n"
    )
    Path("r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:exact'}\n")
    return {"rubric": "r.yaml", "lm": scripted_lm(lambda _: json.dumps({"answer": "7"})), "store": "s.db"}


def write(name: str, rows: list[dict[str, Any]]) -> str:
    if name.endswith(".csv"):
        with open(name, "w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)
    else:
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def plain(text: str) -> str:
    return " ".join(text.casefold().split())


def rollouts_by_split(where: str) -> dict[str, set[str]]:
    """Plain questions of the recorded rollouts by split."""
    by_split: dict[str, set[str]] = {}
    with Store(where) as store:
        for rollout in store.rollouts():
            if rollout.source == "program":
                by_split.setdefault(rollout.split, set()).add(plain(rollout.inputs["question"]))
    return by_split


def test_twins_of_test_tasks_are_never_learned_from(job: dict[str, Any]) -> None:
    spellings = (str, str.upper, lambda text: f" {text.lower()}\n", lambda text: text.replace(" ", "  "))
    rows = [
        {"question": spell(question(at)), "answer": "7"}
        for spell, first in zip(spellings, (0, 0, 10, 20), strict=True)
        for at in range(first, 40)
    ]
    report = assay.compile("p.py:P", data=write("d.jsonl", rows), optimizer="labeled", out="a", **job).to_dict()
    splits = rollouts_by_split("s.db")
    assert "test" not in splits  # the baseline is kept
    tasks = json.loads(Path("a/splits.json").read_text())["tasks"]
    assert sum(map(len, tasks.values())) == len(rows)
    sealed = {key for name in SEALED for key in tasks[name]}
    assert not sealed & {*tasks["train"], *tasks["val"]}
    assert report["data"]["repeated"]["count"] == len(rows) - 40
    assert any("with the inputs of an earlier row" in note for note in report["notes"])


@pytest.mark.parametrize("changed", ["upper case in CSV", "another split column", "other sizes"])
def test_a_later_job_keeps_the_splits_of_the_store(job: dict[str, Any], changed: str) -> None:
    rows = [{"question": question(at), "answer": "7"} for at in range(60)]
    assay.evaluate("p.py:P", data=write("d.jsonl", rows), split="test", **job)
    tested = rollouts_by_split("s.db")["test"]
    if changed == "upper case in CSV":
        again, options = [{"answer": "7", "question": row["question"].upper()} for row in rows], {}
    elif changed == "another split column":
        again, options = [{**row, "split": "train"} for row in rows], {}
    else:
        again, options = rows, {"sizes": {"train": 50, "val": 5, "gate": 5, "test": 5}}
    report = assay.collect("p.py:P", data=write("e.csv", again), n=1, split="train", **job, **options)
    kept = report.to_dict()["data"]["split_kept"]
    assert not tested & rollouts_by_split("s.db")["train"]
    if changed == "another split column":
        assert {row["split"] for row in kept["rows"]} == {"val", "gate", "test"}
        assert {row["wanted"] for row in kept["rows"]} == {"train"}
        of_test = [row["row"] for row in kept["rows"] if row["split"] == "test"]
        lines = Path("e.csv").read_text().splitlines()
        assert {plain(lines[int(place.rpartition(":")[2]) - 1].split(",")[0]) for place in of_test} == tested
        assert any("e.csv:" in note for note in report.to_dict()["notes"])
    else:
        assert kept["count"] == 0


def test_a_named_split_stands_for_a_later_file_without_one(job: dict[str, Any]) -> None:
    rows = [{"question": question(at), "answer": "7"} for at in range(60)]
    named = [{**row, "split": ("train", "val", "gate", "test")[at % 4]} for at, row in enumerate(rows)]
    assay.evaluate("p.py:P", data=write("d.csv", named), split="val", **job)
    assay.evaluate("p.py:P", data=write("e.jsonl", rows), split="test", **job)
    assert rollouts_by_split("s.db")["test"] == {plain(question(at)) for at in range(3, 60, 4)}


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
    rows = [
        {"id": f"t{at}", "parcel": json.dumps({"place": question(at)}), "sent": f"2024-02-{at % 28 + 1:02} 10:30"}
        for at in range(count)
    ]
    data = write("d.jsonl", [{**row, "answer": "7"} for row in rows])
    splits: list[dict[str, str]] = []
    for program in programs:
        assay.evaluate(f"t.py:{program}", data=data, split="all", preflight=False, **job)
        with Store("s.db") as store:
            splits.append({r.task_id: r.split for r in store.rollouts() if r.program == f"t.py:{program}"})
            finder = SplitFinder(store)
            as_recorded = {row["id"]: finder.of_inputs({key: row[key] for key in ("parcel", "sent")}) for row in rows}
        assert as_recorded == splits[0]
    assert len(splits[0]) == count
    assert splits[0] == splits[1]


def test_rows_with_one_key_are_scored_each(job: dict[str, Any]) -> None:
    rows = [{"question": question(at), "answer": "7", "split": "val"} for at in range(5)]
    rows += [
        {"question": question(0).upper(), "answer": "8", "split": "val"},
        {"question": question(1), "answer": "8", "split": "val"},
        {"question": question(1), "answer": "7", "split": "val"},
    ]
    report = assay.evaluate("p.py:P", data=write("d.csv", rows), split="val", **job)
    assert sorted(report.evaluation.scores.values()) == [0.0, 0.0, *[1.0] * 6]
    assert (report.to_dict()["result"]["n"], report.to_dict()["result"]["score"]) == (8, 0.75)
    repeated = report.to_dict()["data"]["repeated"]
    assert [(row["row"], row["first"], row["differs"]) for row in repeated["rows"]] == [
        ("d.csv:7", "d.csv:2", ["answer"]), ("d.csv:8", "d.csv:3", ["answer"]), ("d.csv:9", "d.csv:3", []),
    ]  # fmt: skip


def test_near_duplicates_across_splits_are_counted_and_shown(job: dict[str, Any]) -> None:
    rows = [{"question": question(at), "answer": "7", "split": "train"} for at in range(6)]
    rows += [{"question": f"{question(at)} Thanks!", "answer": "7", "split": "val"} for at in range(2)]
    rows += [{"question": f"Something else entirely, {at * 7919}", "answer": "7", "split": "val"} for at in range(4)]
    report = assay.evaluate("p.py:P", data=write("d.csv", rows), split="val", **job).to_dict()
    near = report["data"]["near_duplicates"]
    assert near["count"] == 4
    assert {(row["row"], row["other"]) for row in near["examples"]} <= {
        (f"d.csv:{a}", f"d.csv:{b}") for at in range(2) for a, b in ((at + 2, at + 8), (at + 8, at + 2))
    }
    words = ["evaluate", "p.py:P", "--rubric", "r.yaml", "--data", "d.csv", "--store", "s.db", "--dry-run"]
    ended = CliRunner().invoke(group, words, standalone_mode=False, catch_exceptions=False)
    assert "d.csv:2" in ended.output or "d.csv:3" in ended.output


# -- small files


@pytest.mark.parametrize("count", [4, 10, 39])
@pytest.mark.parametrize("named", [False, True])
def test_few_rows_compile(job: dict[str, Any], count: int, named: bool) -> None:
    rows = [{"question": question(at), "answer": "7", **({"split": ""} if named else {})} for at in range(count)]
    report = assay.compile("p.py:P", data=write("d.csv", rows), optimizer="labeled", out="a", **job)
    tasks = json.loads((report.artifact / "splits.json").read_text())["tasks"]
    assert min(map(len, tasks.values())) >= 1
    assert sum(map(len, tasks.values())) == count


@pytest.mark.parametrize("count", [1, 2, 3])
def test_too_few_rows_are_refused_with_the_number_that_is_needed(job: dict[str, Any], count: int) -> None:
    rows = [{"question": question(at), "answer": "7"} for at in range(count)]
    data = write("d.csv", [*rows, *rows])
    with pytest.raises(DataError, match=rf"d\.csv has {count} distinct tasks?.* at least 4 are needed"):
        assay.compile("p.py:P", data=data, **job)
    report = assay.evaluate("p.py:P", data=data, split="val", **job)
    assert len(report.evaluation) == 2


def test_splits_of_few_rows_stay_when_the_file_grows(job: dict[str, Any]) -> None:
    rows = [{"question": question(at), "answer": "7"} for at in range(50)]
    known: dict[str, str] = {}
    for count in (10, 12, 39, 50):
        assay.evaluate("p.py:P", data=write("d.csv", rows[:count]), split="val", **job)
        now = known_splits("s.db")
        assert len(now) == count
        assert known.items() <= now.items()
        known = now


def test_all_rows_are_scored_and_the_score_is_not_held_out(job: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"question": question(at), "answer": "7" if at % 2 else "8"} for at in range(10)]
    report = assay.evaluate("p.py:P", data=write("d.csv", [*rows, rows[3]]), split="all", **job)
    data = report.to_dict()
    assert (data["split"], data["result"]["n"], data["held_out"]) == ("all", 11, False)
    assert data["test_openings"] == {"this_job": 1, "this_store": 1}
    assert any("not held out" in note for note in data["notes"])
    again = assay.evaluate("p.py:P", data="d.csv", split="test", **job).to_dict()
    assert (again["test_openings"], again["held_out"]) == ({"this_job": 1, "this_store": 2}, True)
    assert {split for split in rollouts_by_split("s.db") if split} == {"train", "val", "gate", "test"}
    page = report.write_page("page.html", store="s.db")
    assert "not held out" in Path(page).read_text()


def test_all_has_no_limit_of_rows(job: dict[str, Any]) -> None:
    rows = [{"question": question(at), "answer": "7", "split": "test"} for at in range(310)]
    report = assay.evaluate("p.py:P", data=write("d.csv", rows), split="all", preflight=False, **job)
    assert len(report.evaluation) == 310


# -- labels


def test_a_judge_is_not_tested_on_twins_of_what_it_learned_from(job: dict[str, Any]) -> None:
    texts = [f"{'Lovely' if at % 2 else 'Awful'} parcel for {PLACES[at % 20]} {7919 * at % 1000}" for at in range(60)]
    rows = [
        {"output": spell(text), "label": "yes" if at % 2 else "no", "split": ("train", "test")[which]}
        for which, spell in enumerate((str, lambda text: f"{text.upper()} "))
        for at, text in enumerate(texts[:20])
    ]
    rows += [{"output": text, "label": "yes" if at % 2 else "no", "split": ""} for at, text in enumerate(texts[20:])]

    def friendly(request: Any) -> Any:
        return {"yes": 0.9, "no": 0.1} if "lovely" in str(request.messages[-1]).lower() else {"yes": 0.2, "no": 0.8}

    model, shared = scripted_lm(friendly, logprobs=True), {"store": "s.db", "optimizer": "calibrate"}
    data = write("l.csv", rows)
    report = assay.compile_judge("Is it friendly?", labels=data, lm=model, scale=["no", "yes"], out="j", **shared)
    splits = json.loads((report.artifact / "splits.json").read_text())["items"]
    assert sum(map(len, splits.values())) == len(rows)
    assert not set(splits["test"]) & {*splits["train"], *splits["val"], *splits["gate"]}
    kept = report.to_dict()["data"]["split_kept"]
    assert {(row["wanted"], row["split"]) for row in kept["rows"]} == {("test", "train")}
    assert kept["count"] == 20
    other = write("m.csv", [{**row, "split": "train"} for row in rows])
    with pytest.raises(DataError, match="no items in the splits"):
        assay.compile_judge("Is it friendly?", labels=other, lm=model, scale=["no", "yes"], store="t.db")
    again = assay.compile_judge("Is it friendly?", labels=other, lm=model, scale=["no", "yes"], out="k", **shared)
    items = json.loads((again.artifact / "splits.json").read_text())["items"]
    assert {name: set(keys) for name, keys in items.items()} == {name: set(keys) for name, keys in splits.items()}


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
