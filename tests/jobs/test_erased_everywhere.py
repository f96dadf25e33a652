"""An erasure reaches every file of `.assay`, names what was made of the person's data, and counts what it left."""

import dataclasses
import json
import sqlite3
import unicodedata
import zlib
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import assay
from assay.commands.traces import forget_subject
from assay.datasets.tasks import Task
from assay.deployment import load_artifact
from assay.deployment.registry import Registry
from assay.errors import AssayError
from assay.models.cache import ResponseCache
from assay.models.lora import adapter_home
from assay.programs.memory import Memory
from assay.testing import scripted_lm
from assay.traces import Rollout, Store, ToolCall, Transition, Verdict
from assay.traces.records import subject_digest
from assay.traces.store import tables as schema
from assay.traces.store.erasure import ERASED
from assay.traces.store.sealing import store_tasks
from rigs.projects import PROGRAM, write_rows

ANN = "My name is Ann Sömmer, and parcel 4711 for Elm Street 12 never arrived."
RETURNED = "        return found\n"
BOB = "Where can I see the opening hours of the shop in Ulm on a Sunday?"


def files_with(text: str, root: str = ".assay") -> list[str]:
    """Files below a folder that hold a text in any of the forms in which programs write it."""
    forms = {text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
    found = []
    for path in Path(root).rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        if path.name == "responses.db":
            with sqlite3.connect(path) as db:
                content += b"".join(zlib.decompress(row[0]) for row in db.execute("SELECT answer FROM answers"))
        if any(form.encode() in content for form in forms):
            found.append(str(path))
    return found


def put(*rollouts: Rollout) -> None:
    with Store() as store:
        for rollout in rollouts:
            store.put_rollout(rollout)
        store.flush()


def ann(**inputs: Any) -> Rollout:
    return Rollout(task_id="a", inputs={"question": ANN, **inputs}, data_subject="Ann")


def write_job() -> None:
    Path("p.py").write_text(PROGRAM.replace("Mine", "One").replace("-> answer", "-> answer, note") + RETURNED)
    questions = [ANN, *(f"{BOB} And in the branch number {at}?" for at in range(15))]
    rows = [
        {
            "inputs": {"question": question},
            "expected": {"answer": "7"},
            "split": "train" if at < 6 else "val" if at < 10 else "gate" if at < 12 else "test",
            "metadata": {"data_subject": f"Person {at}", "consent": "yes"},
        }
        for at, question in enumerate(questions)
    ]
    write_rows("d.jsonl", rows)
    Path("r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact, with: {field: answer}}\n")


def repeating(request: Any) -> str:
    """Repeats Ann's text wherever the prompt has it, as a model does with a demonstration."""
    prompt = str(request.messages)
    right = "4711" in prompt or len(request.messages) > 2
    return json.dumps({"answer": "7" if right else "8", "note": f"As in: {ANN}" if "4711" in prompt else "none"})


@pytest.mark.slow
def test_no_file_of_a_project_holds_an_erased_text_after_compile_evaluate_and_report(own_folder: Path) -> None:
    write_job()
    options: dict[str, Any] = {"rubric": "r.yaml", "data": "d.jsonl", "lm": scripted_lm(repeating)}
    made = assay.compile("p.py:One", optimizer="labeled", gate=False, **options)
    evaluated = assay.evaluate(str(made.artifact), split="val", **options)
    evaluated.write_page("page.html")
    with Store() as store:
        Registry(store.engine).register("support", made.artifact)
    assert str((made.artifact / "program.json").relative_to(own_folder)) in files_with(ANN)
    report = forget_subject("Person 0").to_dict()
    assert files_with(ANN) == []
    assert str(made.artifact) in report["made_from_them"]
    assert str(made.artifact / "program.json") in map(str, map(Path.absolute, map(Path, report["emptied"]["files"])))
    assert report["emptied"]["rows"]["transitions"] > 0
    assert report["not_searched"]["files"] == []
    loaded = load_artifact(made.artifact)  # without the demonstration
    assert len(loaded.program.answer.demos) == 5
    with Store() as store:
        registry = Registry(store.engine)
        assert registry.folder_of(registry.version("support@1")) == made.artifact.resolve()
        others = [rollout for rollout in store.rollouts() if rollout.data_subject != "Person 0"]
        assert all(BOB in rollout.inputs["question"] for rollout in others)
        assert any(ERASED in str(rollout.prediction) for rollout in others)
    assert json.loads(Path("d.jsonl").read_text().splitlines()[0])["inputs"]["question"] == ANN  # the user's own file
    assert forget_subject("Person 0").to_dict()["emptied"] == {"rows": {}, "files": []}


@pytest.mark.parametrize("form", ["inputs", "prompt of the gateway", "spelling"])
def test_a_task_of_the_person_is_erased_where_its_rollout_names_no_data_subject(form: str) -> None:
    prompt = f"[[ ## question ## ]]\n{ANN}\n\nRespond with the field answer."
    inputs = {"inputs": {"question": ANN}, "spelling": {"question": ANN.upper()}}.get(form, {"input": prompt})
    with Store() as store:
        store_tasks(store, {"test": [Task(id="a", inputs={"question": ANN}, metadata={"data_subject": "Ann Sömmer"})]})
        rollout = Rollout(phase="run", status="done", inputs=inputs, prediction={"answer": ANN})
        store.put_rollout(rollout)
        store.put_transition(rollout.id, Transition(t=0, model="m", request={"messages": [ANN]}, output=ANN))
        store.flush()
    report = forget_subject("Ann Sömmer").to_dict()
    assert report["not_searched"]["tasks_without_texts"] == 0
    assert report["emptied"]["rows"] == {"rollouts": 1, "transitions": 1}
    assert files_with(ANN) == files_with(ANN.upper()) == []
    with Store() as store:
        whole = store.rollout(rollout.id)
    assert whole is not None
    assert whole.prediction == {"answer": ERASED}


def rows_of_others() -> dict[str, tuple[Rollout, Transition]]:
    def call(**fields: Any) -> Transition:
        return Transition(t=0, model="m", **{"request": {"messages": [{"role": "user", "content": "?"}]}, **fields})

    tool = ToolCall(name="note", arguments={"text": ANN}, result="done")
    return {
        "answer": (Rollout(prediction={"answer": ANN.upper()}), call(output=f"Noted: {ANN}", response={"text": ANN})),
        "part": (Rollout(prediction={"answer": "x"}), call(output="The PARCEL  4711, for elm-street 12 is lost.")),
        "tool": (Rollout(prediction={"answer": "x"}), call(tools=[tool])),
        "error": (Rollout(error=f"ValueError: {ANN}", metadata={"note": [ANN]}), call()),
        "verdict": (Rollout(verdicts=[Verdict(criterion="c", grade=1.0, reason=f"It says {ANN!r}.")]), call()),
        "nested": (Rollout(prediction={"answer": "x"}), call(output=json.dumps({"a": json.dumps({"b": ANN})}))),
        "prompt": (Rollout(), call(request={"messages": [{"role": "user", "content": f"Before: {ANN}"}]})),
        "logprobs": (Rollout(), call(output=ANN, token_ids=(1, 2), logprobs=(-1.0, -1.0))),
        "short": (Rollout(prediction={"answer": "yes"}), call(output="yes")),
        "other": (Rollout(prediction={"answer": BOB}), call(output=BOB)),
    }  # fmt: skip


def test_rows_of_others_lose_what_repeats_the_person_and_keep_the_rest(own_folder: Path) -> None:
    with Store() as store:
        for name, (rollout, transition) in rows_of_others().items():
            rollout.task_id, rollout.inputs, rollout.data_subject = name, {"question": f"{BOB} {name}"}, "Bob"
            store.put_rollout(rollout)
            store.put_transition(rollout.id, transition)
        mine = Rollout(task_id="ann", inputs={"question": ANN, "kind": "yes", "more": BOB}, data_subject="Ann")
        store.put_rollout(mine)
        store.flush()
    report = forget_subject("ann").to_dict()
    assert files_with("4711") == []
    assert files_with(BOB) != []
    assert (report["removed"], report["not_searched"]["short_texts"], report["not_searched"]["shared_texts"]) == (
        1,
        1,
        1,
    )
    assert report["emptied"]["rows"] == {"rollouts": 3, "transitions": 5}
    assert report["prompts_emptied"] == 1
    with Store() as store:
        found = {rollout.task_id: store.rollout(rollout.id) for rollout in store.rollouts()}
    assert found["short"].prediction == {"answer": "yes"}
    assert found["short"].transitions[0].output == "yes"
    assert found["other"].prediction == {"answer": BOB}
    assert all(rollout.inputs == {"question": f"{BOB} {name}"} for name, rollout in found.items())
    assert found["answer"].transitions[0].request == {}  # so that no export has the emptied answer
    assert found["logprobs"].transitions[0].token_ids in (None, ())


SCRIPTS = ("東京都千代田区丸の内一丁目に住んでいる田中です。", "Wohnhaft: Große Straße 9 b in Köln-Ehrenfeld")
NUMBERS: list[tuple[Any, Any]] = [  # a short address or number, and how somebody else writes it
    ("ann@example.org", "Ann@Example.org"), ("0151 2345678", "0151-234-5678"),
    ("4111111111111111", "4111 1111 1111 1111"), (4111111111111111, "4111111111111111"),
    ("4111111111111111", 4111111111111111), ("AB 123456789", "ab123456789"),
]  # fmt: skip
HARA = "<p>It&#39;s&nbsp;Ann&nbsp;O&#x27;Hara, living at &lsquo;Rose &amp; Co&rsquo;</p>"
COMMON = {"day": "2024-02-29", "n": 12345678, "to": "a@b"}
REPEATED: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = [  # inputs, prediction of another, what is erased
    *(({"question": text}, {"answer": unicodedata.normalize("NFD", text)}, {"answer"}) for text in SCRIPTS),
    *(
        ({"question": "yes", "contact": value}, {"answer": f"Call {form}!", "value": form}, {"answer", "value"})
        for value, form in NUMBERS
    ),
    *(  # a short sentence is found where it is repeated whole
        ({"question": text}, {"answer": f"She wrote: {text.upper()}!", "part": text[:5]}, {"answer"})
        for text in ("I am HIV positive", "My pay is 54,321", "私は糖尿病です")
    ),
    ({"question": "It's Ann O'Hara, living at 'Rose & Co'"}, {"answer": HARA}, {"answer"}),
    (COMMON, {"answer": "2024-02-29 12345678 a@b", **COMMON}, set()),  # a date or a common number stays
]


@pytest.mark.parametrize(("inputs", "prediction", "erased"), REPEATED)
def test_a_text_is_found_in_the_forms_in_which_others_repeat_it(
    own_folder: Path, inputs: dict[str, Any], prediction: dict[str, Any], erased: set[str]
) -> None:
    other = Rollout(task_id="b", inputs={"question": "?"}, prediction=prediction)
    put(Rollout(task_id="a", inputs=inputs, data_subject="Ann"), other)
    with Store() as store:
        store.put_transition(other.id, Transition(t=0, model="m", request={}, output=str(prediction["answer"])))
        store.flush()
        forget_subject("ann")
        found = store.rollout(other.id)
    expected = {name: ERASED if name in erased else value for name, value in prediction.items()}
    assert (found.prediction, found.transitions[0].output) == (expected, expected["answer"])


@pytest.mark.postgres
@pytest.mark.slow
def test_nothing_of_the_person_is_left_in_postgresql(own_folder: Path, empty_postgres_url: str) -> None:
    url = empty_postgres_url.replace("postgresql://", "postgresql+psycopg://")
    with Store(url) as store:
        Memory(store).remember("Bob", f"was told by Ann: {ANN}")
        store.put_run("evaluate-1", kind="evaluate", config={"note": ANN}, status="done", started_at=1.0, failure=ANN)
        store.put_state("evaluate-1", {"report": {"notes": [ANN, BOB]}})
        for name, (rollout, transition) in rows_of_others().items():
            rollout.task_id, rollout.inputs = name, {"question": name}
            store.put_rollout(rollout)
            store.put_transition(rollout.id, transition)
        store.put_rollout(Rollout(task_id="ann", inputs={"question": ANN}, data_subject="Ann"))
        store.flush()
        report = forget_subject("ann", store=url).to_dict()
        with store.engine.connect() as connection:
            left = [str(row) for table in schema.metadata.sorted_tables for row in connection.execute(sa.select(table))]
    assert [row for row in left if "4711" in row] == []
    assert any(BOB in row for row in left)
    assert {name: report["emptied"]["rows"][name] for name in ("facts", "runs", "job_states")} == dict.fromkeys(
        ("facts", "runs", "job_states"), 1
    )
    assert report["naming_facts"] == []  # the fact that had the name is gone


@pytest.mark.parametrize("shared", [False, True], ids=["of one process", "of gateways"])
def test_what_a_running_process_writes_after_an_erasure_is_erased_by_the_next_one(
    own_folder: Path, shared: bool
) -> None:
    with Store() as writer:
        rollout = Rollout(id="r", inputs={"question": ANN}, data_subject="Ann", status="running", started_at=1.0)
        (writer.begin_rollout if shared else writer.put_rollout)(rollout)
        # of a job that another machine has taken over: it is counted under its run, and of nobody who is erased
        writer.put_transition("taken over", Transition(t=0, model="m", request={}, output="1"))
        counts = []
        for turn in range(2):
            call = Transition(t=turn, model="m", request={"messages": [{"role": "user", "content": ANN}]}, output=ANN)
            call.id = f"c{turn}" if shared else None
            writer.put_transition("r", call)
            if turn and not shared:
                writer.put_rollout(dataclasses.replace(rollout, status="done", ended_at=9.0))
            elif turn:
                writer.put_changes("r", {"status": "done", "ended_at": 9.0})
            writer.flush()
            report = forget_subject("ann").to_dict()
            counts.append([report[name] for name in ("removed", "running", "unowned_calls_removed")])
        assert writer.stats()["transitions"] == 1
    assert counts == [[1, 1, 0], [0, 0, 1] if shared else [1, 0, 0]]


def test_a_text_that_several_tasks_or_other_people_wrote_is_not_erased_from_them(own_folder: Path) -> None:
    text = {"question": "How do I reset the password of my account?"}
    for name in ("Ann", "Bob", None, None, None):
        put(Rollout(task_id="t", inputs={**text, "of": name}, prediction=text, data_subject=name))
    report = forget_subject("Ann").to_dict()
    assert (report["removed"], report["emptied"]["rows"], report["not_searched"]["shared_texts"]) == (1, {}, 1)


def test_cached_answers_that_repeat_the_person_are_erased(own_folder: Path) -> None:
    cache = ResponseCache(Path(".assay/cache/responses.db"))
    for key, text in (("ab" * 32, ANN), ("cd" * 32, BOB)):
        request = {"messages": [text[:5]]}
        cache.put(key, {"response": {"text": f"Well: {text}"}}, request=request)
    cache.close()
    put(ann())
    assert forget_subject("ann").to_dict()["cached_answers_removed"] == 1
    assert files_with("4711") == []


@pytest.mark.slow
def test_files_of_all_formats_below_assay_are_emptied_and_others_named(own_folder: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    for root in (".assay/loop/x", "mine"):
        folder = Path(root)
        folder.mkdir(parents=True)
        rows = [{"inputs": {"question": text}} for text in (ANN, BOB)]
        (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "a.json").write_text(json.dumps({"demos": rows, "notes": [ANN, BOB], ANN: 1}))
        (folder / "a.md").write_text(f"# Title\n{ANN}\n{BOB}\n")
        (folder / "a.html").write_text(
            f"<p>{BOB}</p>\n<p>My name is Ann S&ouml;mmer, and parcel &#52;711 for Elm</p>\n"
        )
        parquet.write_table(pa.table({"question": [ANN, BOB]}), folder / "a.parquet")
        with sqlite3.connect(folder / "a.db") as db:
            db.execute("CREATE TABLE t (a TEXT, b TEXT)")
            db.execute("INSERT INTO t VALUES (?, ?)", (ANN, json.dumps({"x": [ANN, BOB]})))
        db.close()
        (folder / "weights.gguf").write_bytes(b"GGUF\xff\xfe\x00" + b"\x00" * 10)
    with Store() as store:
        store.put_artifact(str(Path("mine").absolute()), [])
    put(ann())
    report = forget_subject("ann").to_dict()
    names = {"a.jsonl", "a.json", "a.md", "a.html", "a.parquet", "a.db"}
    assert {Path(path).name for path in report["emptied"]["files"]} == names
    assert {Path(path).name for path in report["holding"]} == names
    assert {Path(path).name for path in report["not_searched"]["files"]} == {"weights.gguf"}
    assert files_with("4711") == []
    assert files_with("mmer, and parcel") == []
    assert parquet.read_table(".assay/loop/x/a.parquet").to_pylist() == [{"question": BOB}]
    assert json.loads(Path(".assay/loop/x/a.json").read_text()) == {
        "demos": [{"inputs": {"question": BOB}}], "notes": [ERASED, BOB], ERASED: 1,
    }  # fmt: skip
    assert len(files_with(BOB)) == 6
    assert "4711" in Path("mine/a.md").read_text()


def made(folder: str, **manifest: Any) -> Path:
    path = Path(folder).absolute()
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps({"format": 1, **manifest}))
    return path


def adapter(name: str, sha256: str, after: tuple[str, ...] = (), **made: Any) -> Path:
    folder = adapter_home() / name
    folder.mkdir(parents=True)
    fields = {"format": 1, "base": "embedded/m", "base_sha256": "b", "sha256": sha256, "after": after, "made": made}
    (folder / "adapter.json").write_text(json.dumps(fields))
    return folder


def training(name: str, **made_from: Any) -> Path:
    folder = adapter_home().parent / "training" / name
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"made_from": made_from}))
    return folder


def test_everything_derived_is_named_over_any_number_of_steps(own_folder: Path) -> None:
    export, other = made("export", kind="sft"), made("other", kind="sft")
    first = adapter("first", "1" * 64, export=str(export))
    second = adapter("second", "2" * 64, after=("1" * 64,), export=str(other))
    unfinished = training("unfinished", model="hub/model", export=str(export))
    merged = unfinished / "adapter" / "merged"
    merged.mkdir(parents=True)
    on_merged = training("on-merged", model=str(merged), export=str(other))
    later = made("later", kind="grpo", models=[f"embedded/m@{'b' * 12}+{'2' * 12}"])
    third = adapter("third", "3" * 64, export=str(later))
    artifact = made(".assay/artifacts/a", program="p", adapters=["3" * 64])
    child = made("child", program="p", parent="child-of", model="m")
    elsewhere = Path("theirs").absolute()
    elsewhere.mkdir()
    unknown = training("unknown", model=str(elsewhere), export=str(other))
    unrelated = adapter("unrelated", "4" * 64, export=str(other))
    put(ann())
    with Store() as store:
        store.put_artifact(str(export), [subject_digest("Ann")])
        for path in (other, later, child):
            store.put_artifact(str(path), [])
        (child / "manifest.json").write_text(json.dumps({"program": "p", "parent": str(artifact)}))
        for run, config in {
            "evaluate-1": {"program": "p.py", "model": "embedded/m+first+second"},
            "evaluate-2": {"program": str(artifact), "model": "m"},
            "evaluate-3": {"program": "p.py", "model": "embedded/m+unrelated"},
        }.items():
            store.put_run(run, kind="evaluate", config=config, status="done", started_at=1.0)
    report = forget_subject("ann").to_dict()
    derived = {export, first, second, unfinished, on_merged, later, third, artifact, child}
    assert {Path(path).absolute() for path in report["made_from_them"]} == {path.absolute() for path in derived}
    assert report["runs_on_them"] == ["evaluate-1", "evaluate-2"]
    assert report["not_searched"]["models"] == [str(elsewhere)]
    assert not {unknown, unrelated, other} & {Path(path).absolute() for path in report["made_from_them"]}


@pytest.mark.slow
def test_a_report_page_outside_of_the_folder_is_named_and_emptied(own_folder: Path) -> None:
    write_job()
    lm = scripted_lm(repeating)
    evaluated = assay.evaluate("p.py:One", rubric="r.yaml", data="d.jsonl", lm=lm, split="train")
    evaluated.write_page("page.html")
    assert "4711" in Path("page.html").read_text()
    report = forget_subject("Person 0").to_dict()
    page = str(Path("page.html").absolute())
    assert page in report["made_from_them"]
    assert page in report["emptied"]["files"]
    assert page not in report["holding"]
    text = Path("page.html").read_text()
    assert "4711" not in text
    assert "branch number 4?" in text, "the rest of the page stays"


def test_labels_facts_of_others_and_jobs_lose_the_text_and_documents_are_named(own_folder: Path) -> None:
    Path("docs").mkdir()
    Path("docs/case.md").write_text(f"# A case\n\n{ANN}\n")
    with Store() as store:
        Memory(store).remember("Bob", f"was told: {ANN}")
        Memory(store).remember("Bob", "likes coffee in the morning")
        store.put_run("evaluate-1", kind="evaluate", config={"note": ANN}, status="done", started_at=1.0)
        store.put_label("q", "1", "r", "yes", fields={"output": ANN}, rationale=ANN, rollout_id="x")
    put(ann())
    assay.index("docs")
    report = forget_subject("ann").to_dict()
    assert report["emptied"]["rows"] == {"facts": 1, "labels": 1, "runs": 1}
    assert report["holding"] == [str(Path("docs/case.md").absolute())]
    with Store() as store:
        assert [fact.text for fact in Memory(store).history("Bob")] == ["likes coffee in the morning"]
        (label,) = store.labels("q")
        assert label == {"item_id": "1", "rater": "r", "label": "yes", "rationale": ERASED, "output": ERASED}


@pytest.mark.slow
def test_a_training_that_stopped_is_named_by_its_export_and_by_the_folder_of_its_model(own_folder: Path) -> None:
    from assay.optimizers.finetuning.sft import SFTSettings, train_sft

    export, other = Path("export.jsonl").absolute(), Path("other.jsonl").absolute()
    for path in (export, other):
        row = {"prompt": [{"role": "user", "content": "?"}], "completion": [{"role": "assistant", "content": "!"}]}
        path.write_text(json.dumps(row) + "\n")
    put(ann())
    with Store() as store:
        store.put_artifact(str(export), [subject_digest("Ann")])
    first, second = (adapter_home().parent / "training" / name for name in ("first", "second"))
    Path("model").mkdir()
    with pytest.raises(AssayError):  # there is no model in these folders
        train_sft(export, "first", SFTSettings(model="model", eval_fraction=0.0))
    (first / "merged").mkdir()
    with pytest.raises(AssayError):
        train_sft(other, "second", SFTSettings(model=str(first / "merged"), eval_fraction=0.0))
    report = forget_subject("ann").to_dict()
    assert set(report["made_from_them"]) == {str(export), str(first), str(second)}


def test_a_judge_of_the_stores_labels_is_made_of_the_people_whose_answers_were_labelled(own_folder: Path) -> None:
    with Store() as store:
        for name in ("Ann", "Bob", None):
            rollout = Rollout(inputs={"question": ANN}, data_subject=name)
            store.put_rollout(rollout)
            if name != "Bob":
                store.put_label("q", str(name), "rater", "yes", fields={"output": "?"}, rollout_id=rollout.id)
        store.flush()
        assert store.labelled_subjects("q") == {"Ann"}
        assert store.labelled_subjects("other") == set()
