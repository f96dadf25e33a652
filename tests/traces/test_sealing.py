"""One salt per store, splits by content in every command, counted openings of the test split, non-inferiority."""

import json
import random
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.commands.evaluate import Evaluate
from assay.commands.tune import Tune, cheaper
from assay.datasets.splits import load_splits, split_of
from assay.datasets.tasks import make_task, task_key
from assay.errors import ConfigError
from assay.evaluation.comparison import Comparison
from assay.evaluation.evaluation import Evaluation
from assay.evaluation.statistics import paired_gain
from assay.testing import scripted_lm
from assay.traces import Rollout, Store, Transition
from assay.traces.export.settings import Gates
from assay.traces.store.sealing import SplitFinder, open_test, resolve_salt, salt_of, store_splits, store_tasks

LOOSE = Gates(min_transitions=0, min_clean=0.0, min_task_types=0)
QUESTIONS = [f"How far is place {at} from here?" for at in range(120)]


def answering(request: Any) -> str:
    return json.dumps({"answer": "7"})


@pytest.fixture
def job(working_folder: Path) -> dict[str, Any]:
    Path("p.py").write_text(
        "import dspy\n\nclass P(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.ask = dspy.Predict('question -> answer')\n\n"
        "    def forward(self, question):\n        return self.ask(question=question)\n"
    )
    Path("d.jsonl").write_text(
        "".join(json.dumps({"question": question, "answer": "7"}) + "\n" for question in QUESTIONS)
    )
    Path("r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:exact'}\n")
    return {
        "rubric": "r.yaml",
        "data": "d.jsonl",
        "lm": scripted_lm(answering),
        "store": "s.db",
        "sizes": {"train": 6, "val": 4, "gate": 4, "test": 9},
    }


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def exported(where: str, out: str) -> set[str]:
    """Questions in an export of all transitions."""
    report = assay.export("transitions", out, store=where, gates=LOOSE, privacy="off")
    return {json.loads(line)["task"] for line in (report.path / "data.jsonl").read_text().splitlines()}


def recorded(store: Store, question: str, **options: Any) -> None:
    request = {"dialect": "chat", "body": {"model": "m", "messages": [{"role": "user", "content": question}]}}
    response = {"body": {"choices": [{"message": {"role": "assistant", "content": "7"}, "finish_reason": "stop"}]}}
    fields = {
        "status": "done",
        "score": 1.0,
        "inputs": {"question": question},
        "task_id": question,
        "group_id": question,
        **options,
    }
    rollout = Rollout(
        model="m",
        transitions=[Transition(t=0, model="m", weights="w", request=request, response=response, output="7")],
        **fields,
    )
    store.put_rollout(rollout)
    store.put_transition(rollout.id, rollout.transitions[0])


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
    report = assay.evaluate("p.py:P", split="train", **job)  # without a salt it is the store's
    hashes = {task.key for task in load_splits("d.jsonl", salt="mine", limits={"train": 6}).train}
    assert {task_key({"question": f"{q}"}) for q in QUESTIONS} >= hashes
    with Store("s.db") as store:
        recorded_hashes = {task_key(rollout.inputs) for rollout in store.rollouts(split="train")}
    assert recorded_hashes == hashes
    assert len(report.evaluation) == 6


def test_a_new_store_gets_the_artifacts_salt_and_a_store_with_another_refuses_it(job: dict[str, Any]) -> None:
    made = assay.compile("p.py:P", salt="mine", optimizer="labeled", out="a", **job)
    artifact, fresh = str(made.artifact), {**job, "store": "new/s.db"}
    with pytest.raises(ConfigError, match=r"salt='other' is not the artifact's 'mine'"):
        assay.collect(artifact, salt="other", **fresh)
    assay.collect(artifact, n=1, **fresh)
    with Store("new/s.db") as store:
        assert salt_of(store) == "mine"
        sealed = {
            task_key({"question": q})
            for q in QUESTIONS
            if split_of(task_key({"question": q}), "mine")[0] in ("gate", "test")
        }
        assert not {task_key(r.inputs) for r in store.rollouts()} & sealed
    with Store("third.db") as store:
        store.put_meta("salt", "theirs")
    with pytest.raises(ConfigError, match=r"was compiled with the salt 'mine', and this store has 'theirs'"):
        assay.evaluate(artifact, split="test", **{**job, "store": "third.db"})


def test_only_a_different_salt_changes_the_jobs_key() -> None:
    def key(**salt: str) -> str:
        return Evaluate("p", rubric="r", data="d", **salt).key

    assert key() == key(salt="assay") != key(salt="b")


# -- exports compute the split


def test_sealed_tasks_of_every_source_reach_no_export(working_folder: Path) -> None:
    sealed = {q for q in QUESTIONS if split_of(task_key({"question": q}), "assay")[0] in ("gate", "test")}
    with Store("s.db") as store:
        for at, question in enumerate(QUESTIONS):
            recorded(
                store, question, split=("", "train", "none")[at % 3], source=("gateway", "langfuse", "program")[at % 3]
            )
        store.flush()
        questions = exported("s.db", "out")
        assert questions == set(QUESTIONS) - sealed
        assert len(sealed) > 30
        manifest = json.loads(Path("out/manifest.json").read_text())
        assert manifest["left_out"]["with the inputs of a sealed task"] == len(sealed)
        assert set(manifest["splits"]) == {"train", "val"}
        assert salt_of(store) == "assay"  # training data was made by it: it stays
    with pytest.raises(ConfigError, match="this store has the salt 'assay'"):
        resolve_salt("other", "s.db")


def test_sealed_questions_are_recognised_under_other_field_names_and_in_prompts(job: dict[str, Any]) -> None:
    assay.evaluate("p.py:P", split="val", **job)  # the store now knows the data set's splits; no sealed task was run
    sealed = [task.inputs["question"] for task in load_splits("d.jsonl", limits=job["sizes"]).parts()["test"]]
    prompt = (
        "[[ ## question ## ]]\n{}\n\n"
        "Respond with the corresponding output fields, starting with the field `[[ ## answer ## ]]`."
    )
    with Store("s.db") as store:
        splits = SplitFinder(store)
        assert {splits.of_inputs({"prompt": question}) for question in sealed} == {"test"}
        assert {splits.of_inputs({"prompt": prompt.format(question)}) for question in sealed} == {"test"}


def test_a_split_that_a_file_names_counts_and_a_sealed_task_stays_sealed(working_folder: Path) -> None:
    by_hash = {
        name: next(q for q in QUESTIONS if split_of(task_key({"question": q}), "assay")[0] == name)
        for name in ("train", "test")
    }
    with Store("s.db") as store:
        store_splits(
            store,
            {
                "test": [task_key({"question": by_hash["train"]})],
                "train": [task_key({"question": by_hash["test"]})],
            },
        )
        splits = SplitFinder(store)
        assert splits.of_inputs({"question": by_hash["train"]}) == "test"
        assert splits.of_inputs({"question": by_hash["test"]}) == "train"
        store_splits(store, {"train": [task_key({"question": by_hash["train"]})]})  # a file that was changed since
        assert SplitFinder(store).of_inputs({"question": by_hash["train"]}) == "test"
        assert splits.of_inputs({"question": "new"}, recorded="Test ") == "test"  # the stricter of record and hash
        assert splits.of_inputs({}) == ""


def test_questions_of_an_artifacts_sealed_split_are_not_exported_from_a_new_store(job: dict[str, Any]) -> None:
    made = assay.compile("p.py:P", optimizer="labeled", out="a", salt="mine", **job)
    sealed = load_splits("d.jsonl", salt="mine", limits=job["sizes"]).parts()["test"]
    with Store("fresh.db") as store:
        assay.evaluate(str(made.artifact), split="val", **{**job, "store": "fresh.db"})
        for task in sealed:
            recorded(store, task.inputs["question"], source="gateway")
        store.flush()
        questions = exported("fresh.db", "out2")
        assert questions
        assert not questions & {question for task in sealed for question in (task.inputs["question"], task.id)}


# -- the test split is opened once


def test_a_resumed_job_counts_its_second_opening(working_folder: Path) -> None:
    with Store("s.db") as store:
        assert open_test(store, "job", data="d", tasks=["a", "b"]).to_dict() == {"this_job": 1, "this_store": 1}
        assert open_test(store, "job", data="d", tasks=["a", "b"]).to_dict() == {"this_job": 2, "this_store": 2}
        assert open_test(store, "other", data="elsewhere", tasks=["b", "a"]).to_dict() == {
            "this_job": 1,
            "this_store": 3,
        }
        assert open_test(store, "third", data="elsewhere", tasks=["c"]).to_dict() == {
            "this_job": 1,
            "this_store": 2,
        }  # the same data


def test_an_opening_counts_where_some_of_its_tasks_are_the_same(working_folder: Path) -> None:
    with Store("s.db") as store:
        open_test(store, "one", data="tickets.csv", tasks=["a", "b", "c"])
        assert open_test(store, "two", data="clean.csv", tasks=["b", "c", "d"]).to_dict() == {
            "this_job": 1,
            "this_store": 2,
        }
        assert open_test(store, "three", data="frame", tasks=["b"]).to_dict() == {"this_job": 1, "this_store": 3}
        assert open_test(store, "four", data="elsewhere", tasks=["x"]).to_dict() == {"this_job": 1, "this_store": 1}


def test_opening_the_test_split_is_notified_once() -> None:
    splits, openings = load_splits("arithmetic:size=60"), list[int]()
    splits.on_open = lambda: openings.append(1)
    assert splits.unseal() is splits.unseal() is splits.test
    assert openings == [1]


def test_improve_opens_the_test_split_only_at_its_end(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    openings: list[tuple[str, str]] = []
    original = assay.runs.jobs.open_test

    def counting(store: Store, opens_as: str, **options: Any) -> Any:
        openings.append((opens_as, str(len(list(store.rollouts(split="test"))))))
        return original(store, opens_as, **options)

    monkeypatch.setattr("assay.runs.jobs.open_test", counting)
    options = {key: value for key, value in job.items() if key != "lm"} | {
        "sizes": {"train": 10, "val": 6, "gate": 24, "test": 9}
    }
    with dspy.context(lm=None):
        monkeypatch.setattr("assay.runs.opening.get_lm", lambda name, **shared: with_shared(shared))
        report = assay.improve(
            "p.py:P", name="x", order=["prompts", "prompts"], optimizer="labeled", model="scripted", **options
        )
    kept_steps = [step for step in report.steps if step["kept"]]
    assert kept_steps
    assert [tasks for _, tasks in openings] == ["0"]  # opened once, and no test task had been run before
    assert report.test_openings == {"this_job": 1, "this_store": 1}


def with_shared(shared: dict[str, Any]) -> Any:
    from assay.models import with_recording

    def answer(request: Any) -> str:  # right only where a demonstration shows the way
        return json.dumps({"answer": "7" if len(request.messages) > 2 else "8"})

    return with_recording(scripted_lm(answer), **{key: shared[key] for key in ("cache", "meter", "observers")})


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "prompt",
    [
        "question: {}",
        "Answer briefly.\nQ: {}\nA:",
        "  {}  ",
        "Please answer this.\n\n{}\n\nThank you.",
        "[[ ## question ## ]]\n{}",
    ],
)
def test_a_sealed_question_is_recognised_in_every_prompt_format(tmp_path: Path, prompt: str) -> None:
    sealed, other = "Which town is number 7 of the atlas?", "Which town is number 8 of the atlas?"
    with Store(tmp_path / "s.db") as store:
        known = {
            name: [make_task({"inputs": {"question": text}})] for name, text in (("test", sealed), ("train", other))
        }
        store_tasks(store, known)
        splits = SplitFinder(store)
        by_hash = {task.key: name for name, (task,) in known.items()}
        splits.of_key = lambda key: by_hash.get(key, "")  # not by the prompt's own hash
        assert splits.of_inputs({"input": prompt.format(sealed)}) == "test"
        assert splits.of_inputs({"input": prompt.format(other)}) in ("", "train")
