"""One salt per store, splits by content in every command, sealed tasks in any spelling, counted openings of the test
split, non-inferiority."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from export_rows import LOOSE, add_rollout, rows, store as store, turn

import assay
from assay.commands.tune import Tune, cheaper
from assay.datasets.splits import load_splits, split_of
from assay.datasets.tasks import Task, task_key
from assay.errors import ConfigError, SealedSplit
from assay.evaluation.comparison import Comparison
from assay.evaluation.evaluation import Evaluation
from assay.evaluation.statistics import paired_gain
from assay.testing import scripted_lm
from assay.traces import Store
from assay.traces.shown import TaskTexts
from assay.traces.store.erasure import erase_subject
from assay.traces.store.sealing import (
    SplitFinder,
    known_splits,
    open_test,
    resolve_salt,
    salt_of,
    store_splits,
    store_tasks,
)

QUESTIONS = [f"How far is place {at} from here?" for at in range(120)]


@pytest.fixture
def job() -> dict[str, Any]:
    Path("p.py").write_text("import dspy\n\nP = lambda: dspy.Predict('question -> answer')\n")
    tasks = [json.dumps({"question": question, "answer": "7"}) + "\n" for question in QUESTIONS]
    Path("d.jsonl").write_text("".join(tasks))
    sizes = {"train": 6, "val": 4, "gate": 4, "test": 9}
    lm = scripted_lm(lambda _: json.dumps({"answer": "7"}))
    return {"rubric": "exact", "data": "d.jsonl", "lm": lm, "store": "s.db", "sizes": sizes}


def recorded(store: Store, inputs: dict[str, Any], task: str, **fields: Any) -> None:
    """A rollout as a gateway records it: its split is that of its inputs."""
    fields = {"split": "", "source": "gateway", **fields}
    add_rollout(store, turn(0, json.dumps(inputs), "7"), inputs=inputs, task=task, **fields)


def exported(store: Store, out: str) -> set[str]:
    """Tasks in an export of all transitions."""
    store.flush()
    report = assay.export("transitions", out, store=store.url, gates=LOOSE, privacy="off")
    return {row["task"] for row in rows(report.path)}


# -- one salt


def test_a_store_has_one_salt_in_every_command_and_another_is_refused(job: dict[str, Any]) -> None:
    assay.evaluate("p.py:P", salt="mine", split="val", **job)
    with Store("s.db") as store:
        assert salt_of(store) == "mine"
    for command in (
        lambda: assay.evaluate("p.py:P", salt="other", split="test", **job),
        lambda: assay.collect("p.py:P", salt="other", **job),
        lambda: assay.compile("p.py:P", salt="other", optimizer="labeled", **job),
        lambda: assay.tune("p.py:P", salt="other", trials=1, **job),
    ):
        with pytest.raises(ConfigError, match=r"salt='other'.*this store has the salt 'mine'.*store=…"):
            command()
    assert len(assay.evaluate("p.py:P", split="train", **job).evaluation) == 6  # without a salt it is the store's
    splits = load_splits("d.jsonl", salt="mine", limits=job["sizes"]).parts()
    with Store("s.db") as store:
        keys = {task_key(rollout.inputs) for rollout in store.rollouts(split="train")}
        assert keys == {task.key for task in splits["train"]}
        finder = SplitFinder(store)  # knows the data set's splits, though no sealed task was run
        assert {finder.of_inputs({"prompt": task.inputs["question"]}) for task in splits["test"]} == {"test"}


def test_a_new_store_gets_the_artifacts_salt_and_a_store_with_another_refuses_it(job: dict[str, Any]) -> None:
    artifact = str(assay.compile("p.py:P", salt="mine", optimizer="labeled", out="a", **job).artifact)
    fresh = {**job, "store": "new/s.db"}
    with pytest.raises(ConfigError, match=r"salt='other' is not the artifact's 'mine'"):
        assay.collect(artifact, salt="other", **fresh)
    assay.collect(artifact, n=1, **fresh)
    sealed = {q for q in QUESTIONS if split_of(task_key({"question": q}), "mine")[0] in ("gate", "test")}
    with Store("new/s.db") as store:
        assert salt_of(store) == "mine"
        assert not {rollout.inputs["question"] for rollout in store.rollouts()} & sealed
        for question in sealed:
            recorded(store, {"question": question}, question)
        questions = exported(store, "out2")
        assert questions
        assert not questions & sealed
    with Store("third.db") as store:
        store.put_meta("salt", "theirs")
    with pytest.raises(ConfigError, match=r"was compiled with the salt 'mine', and this store has 'theirs'"):
        assay.evaluate(artifact, split="test", **{**job, "store": "third.db"})


# -- exports compute the split


def test_sealed_tasks_of_every_source_reach_no_export(store: Store) -> None:
    sealed = {q for q in QUESTIONS if split_of(task_key({"question": q}), "assay")[0] in ("gate", "test")}
    for at, question in enumerate(QUESTIONS):
        source = ("gateway", "langfuse", "program")[at % 3]
        recorded(store, {"question": question}, question, split=("", "none")[at % 2], source=source)
    assert exported(store, "out") == set(QUESTIONS) - sealed
    assert len(sealed) > 30
    manifest = json.loads(Path("out/manifest.json").read_text())
    assert manifest["left_out"]["with the inputs of a sealed task"] == len(sealed)
    assert set(manifest["splits"]) == {"train", "val"}
    assert salt_of(store) == "assay"  # training data was made by it: it stays
    with pytest.raises(ConfigError, match="this store has the salt 'assay'"):
        resolve_salt("other", store.url)


QUESTION = "Which of the two parcels to Ulm weighs 12 kg?"
PROMPTS = (
    "question: {}",
    "  {}  ",
    "Please answer this.\n\n{}\n\nThank you.",
    "Answer in one word.\n\nQ: {}\nA:",
    "[[ ## question ## ]]\n{}\n\nRespond with the field `[[ ## answer ## ]]`.",
)
SPELLINGS: list[dict[str, Any]] = [
    {"question": f" {QUESTION}\n"},
    {"question": QUESTION.lower()},
    {"prompt": QUESTION.upper()},
    {"input": QUESTION.replace(" ", "\u00a0")},
    {"input": "Ｗｈｉｃｈ" + QUESTION[5:]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION.lower()}]},
    *({"prompt": prompt.format(QUESTION.upper())} for prompt in PROMPTS),
]


@pytest.mark.parametrize("split", ["gate", "test"])
def test_spellings_of_a_sealed_task_reach_no_export(store: Store, split: str) -> None:
    kept = [{"question": f"How heavy is parcel number {at} to Bonn?"} for at in range(4)]
    store_tasks(store, {split: [Task(id="s", inputs={"question": QUESTION})]})
    store_tasks(store, {"train": [Task(id=str(at), inputs=inputs) for at, inputs in enumerate(kept)]})
    for at, inputs in enumerate(SPELLINGS):
        recorded(store, inputs, f"sealed {at}")
    for at, inputs in enumerate(kept):
        recorded(store, {"question": inputs["question"].upper()}, f"kept {at}")
    assert exported(store, "out") == {f"kept {at}" for at in range(4)}
    finder = SplitFinder(store)
    assert {finder.of_inputs(inputs) for inputs in SPELLINGS} <= {split, "test"}
    assert all(finder.knows_as_sealed(inputs) for inputs in SPELLINGS)
    for prompt in PROMPTS:
        assert not finder.knows_as_sealed({"prompt": prompt.format(QUESTION.replace("12", "13"))})


def test_a_task_keeps_its_first_split_in_any_spelling(store: Store) -> None:
    first = Task(id="a", inputs={"question": QUESTION, "weight": 12})
    assert store_tasks(store, {"train": [first]}) == {}
    other = Task(id="b", inputs={"weight": "12.0", "question": f"{QUESTION.upper()} "})
    assert store_tasks(store, {"test": [other]}) == {first.key: "train"}
    assert known_splits(store) == {first.key: "train"}


def test_owners_of_all_rows_of_a_task_are_kept(store: Store) -> None:
    owned = Task(id="a", inputs={"question": QUESTION}, metadata={"data_subject": "Ann"})
    store_tasks(store, {"train": [owned, Task(id="b", inputs={"question": QUESTION.lower()})]})
    assert erase_subject(store, "ann").tasks == {owned.key}


def test_a_demonstration_in_another_spelling_shows_the_same_task() -> None:
    texts, spellings = TaskTexts(), [{"question": QUESTION}, {"question": QUESTION.upper()}]
    key = Task(id="a", inputs=spellings[0]).key
    for inputs in spellings:
        texts.add(key, inputs)
    for inputs in spellings:
        prompt = f"This is an example.\nQuestion: {inputs['question']}\nAnswer: the second"
        assert texts.tasks_in([prompt, "Question: How far is Bonn from Ulm?"]) == (key,)
    assert texts.tasks_in([f"Question: {spellings[1]['question']}"], own_task=key) == ()


def test_a_split_that_a_file_names_counts_and_a_sealed_task_stays_sealed(store: Store) -> None:
    mine, theirs = (
        next({"question": q} for q in QUESTIONS if split_of(task_key({"question": q}), "assay")[0] == name)
        for name in ("train", "test")
    )
    store_splits(store, {"test": [task_key(mine)], "train": [task_key(theirs)]})
    splits = SplitFinder(store)
    assert (splits.of_inputs(mine), splits.of_inputs(theirs)) == ("test", "train")
    store_splits(store, {"train": [task_key(mine)]})  # a file that was changed since
    assert SplitFinder(store).of_inputs(mine) == "test"
    assert splits.of_inputs({"question": "new"}, recorded="Test ") == "test"  # the stricter of record and hash
    assert splits.of_inputs({}) == ""


# -- the test split is opened once


def test_openings_of_the_test_split_are_counted_by_job_and_by_task(store: Store) -> None:
    for job, data, tasks, by_job, by_task in (
        ("job", "d", ["a", "b"], 1, 1),
        ("job", "d", ["a", "b"], 2, 2),  # a resumed job
        ("other", "elsewhere", ["b", "a"], 1, 3),
        ("third", "elsewhere", ["c"], 1, 2),  # the same data
        ("fourth", "clean.csv", ["b", "c", "d"], 1, 5),  # some of its tasks
        ("fifth", "frame", ["x"], 1, 1),
    ):
        openings = open_test(store, job, data=data, tasks=tasks).to_dict()
        assert openings == {"this_job": by_job, "this_store": by_task}, job


def test_opening_the_test_split_is_notified_once() -> None:
    splits, openings = load_splits("arithmetic:size=60"), list[int]()
    splits.on_open = lambda: openings.append(1)
    with pytest.raises(SealedSplit):
        _ = splits.test
    assert splits.unseal() is splits.unseal() is splits.test
    assert openings == [1]


# -- equal quality at less cost


def evaluation(scores: list[float], tokens: list[int]) -> Evaluation:
    result = Evaluation()
    result.scores.update({str(at): score for at, score in enumerate(scores)})
    result.tokens.update({str(at): count for at, count in enumerate(tokens)})
    return result


def test_fewer_tokens_replace_only_where_the_margin_excludes_a_loss() -> None:
    rng = random.Random(0)
    before = [float(rng.random() < 0.5) for _ in range(40)]
    other = [float(rng.random() < 0.5) for _ in range(40)]
    many, few = [100 + at % 7 for at in range(40)], [50 + at % 5 for at in range(40)]
    wide = Comparison(
        evaluation(before, many),
        evaluation(other, few),
        paired_gain(dict(enumerate(before)), dict(enumerate(other))),
        40,
    )
    assert wide.gain.low < -0.15
    assert not cheaper(wide, 0.02)  # about [-0.2, +0.2]: undecided
    same = Comparison(
        evaluation([1.0] * 400, many * 10),
        evaluation([1.0] * 400, few * 10),
        paired_gain(dict.fromkeys(range(400), 1.0), dict.fromkeys(range(400), 1.0)),
        400,
    )
    assert same.gain.low > -0.02
    assert cheaper(same, 0.02)
    assert not cheaper(same, 0.0)  # no margin: only a gain replaces the parent
    assert not cheaper(Comparison(same.before, same.before, same.gain, 400), 0.02)  # it must be cheaper


def test_a_margin_out_of_range_is_refused_and_another_margin_is_another_job() -> None:
    options: dict[str, Any] = {"program": "p", "rubric": "r", "data": "d"}
    for margin in (-0.1, 1.0):
        with pytest.raises(ConfigError, match="margin: must be"):
            Tune(**options, margin=margin)
    assert Tune(**options).margin == 0.02
    assert Tune(**options).key != Tune(**options, margin=0.05).key
