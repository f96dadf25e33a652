"""Data subjects of prompts: recording, exports, erasure, artifacts, response cache, the three privacy gate states."""

import json
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.api.traces import forget_subject
from assay.datasets.tasks import content_hash
from assay.errors import ConfigError, DataError, MissingExtra
from assay.models.cache import ResponseCache
from assay.models.lora.adapters import find_adapter, keep_adapter
from assay.optimizers.finetuning.sft import SFTSettings, train_sft
from assay.programs import make_adapter
from assay.testing import scripted_lm
from assay.traces import Recorder, Rollout, Store, Transition
from assay.traces import shown as shown_module
from assay.traces.export.gates import GateReport, Gates, UngatedExport
from assay.traces.export.selection import Selection
from assay.traces.privacy import gazetteers as privacy_gazetteers
from assay.traces.shown import Carried, TaskTexts
from assay.traces.store.sealing import store_splits

LOOSE = Gates(min_transitions=0, min_clean=0.0, min_task_types=0)
BOTH = Selection(tenants=("north", "south"))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    Path("p.py").write_text(
        "import dspy\n\nclass P(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.work = dspy.Predict('question -> working')\n"
        "        self.ask = dspy.Predict('working -> answer')\n\n"
        "    def forward(self, question):\n        return self.ask(working=self.work(question=question).working)\n\n"
        "class One(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.ask = dspy.Predict('question -> answer')\n\n"
        "    def forward(self, question):\n        return self.ask(question=question)\n"
    )
    rows = [
        {
            "inputs": {"question": f"Where does customer {at} of the shop live?"},
            "expected": {"answer": "7"},
            "split": "train" if at < 12 else "val" if at < 16 else "gate" if at < 18 else "test",
            "metadata": {
                "tenant": ("north", "south")[at % 2],
                "data_subject": f"Person {at}",
                "consent": "yes" if at % 3 else "no",
            },
        }
        for at in range(20)
    ]
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:exact'}\n")

    def answer(request: Any) -> str:
        last = str(request.messages[-1])
        number = (
            last.partition("customer " if "customer" in last else "house number ")[2]
            .partition(" ")[0]
            .partition("\\")[0]
        )
        right = len(request.messages) > 1 or number in ("1", "2", "4", "5", "7")  # with demonstrations always
        return json.dumps({"working": f"notes on house number {number} of it", "answer": "7" if right else "8"})

    return {"rubric": "r.yaml", "data": "d.jsonl", "lm": scripted_lm(answer), "store": ".assay/s.db"}


def question(at: int) -> str:
    return f"Where does customer {at} of the shop live?"


def task(at: int) -> str:
    return content_hash({"question": question(at)})


def exported_rows(where: str, **options: Any) -> tuple[list[dict[str, Any]], set[int]]:
    """Rows of an export, and the customers that their prompts show."""
    report = assay.export("transitions", "out", store=where, gates=LOOSE, privacy="off", **options)
    rows = [json.loads(line) for line in (report.path / "data.jsonl").read_text().splitlines()]
    text = "\n".join(json.dumps(row["input"]) for row in rows)
    return rows, {
        at
        for at in range(20)
        if question(at) in text or f"notes on house number {at}\\n" in text or f'house number {at}"' in text
    }


# -- matching


def test_tasks_are_found_by_the_text_of_their_inputs() -> None:
    texts = TaskTexts()
    texts.add("long", {"question": "How many apples has Jane Miller?"})
    texts.add("two", {"a": "first part of it", "b": ["x", "y"]})
    texts.add("short", {"q": "2+2"})
    assert texts.within("Q: How many  apples\thas Jane Miller? A: 3") == {"long"}
    assert texts.within("first part of it") == {"two"}, "a program need not show every column"
    assert texts.within('first part of it\n["x", "y"]') == {"two"}
    assert texts.within("what is 12+22?") == frozenset()  # not a part of another number
    assert texts.within("[[ ## q ## ]]\n2+2\n") == {"short"}
    assert texts.within("q: 2+2") == {"short"}


def test_similar_tasks_are_distinguished_without_comparing_all(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    plain = shown_module._stands_in
    monkeypatch.setattr(shown_module, "_stands_in", lambda part, text: compared.append(part) or plain(part, text))
    texts = TaskTexts()
    for at in range(1000):
        texts.add(str(at), {"question": f"How much is {at} + 1?"})
    assert texts.within("[[ ## question ## ]]\nHow much is 777 + 1?\n\nRespond with the answer.") == {"777"}
    assert len(compared) < 10


@pytest.mark.parametrize(
    "extra",
    [
        True,
        None,
        "",
        7,
        2.5,
        "customer-3-id",
        "x",
        ["alpha omega", "beta gamma"],
        {"name": "Jörg", "n": [1, True]},
        ["lone text"],
    ],
)
@pytest.mark.parametrize("kind", ["declared", "text", "not shown"])
@pytest.mark.parametrize("prompt_format", ["chat", "json", "lean"])
def test_demonstrations_are_found_in_every_rendering_of_their_inputs(extra: Any, kind: str, prompt_format: str) -> None:
    fields: dict[str, Any] = {
        "question": (str, dspy.InputField()),
        "extra": (str if kind == "text" else type(extra) if extra is not None else Any, dspy.InputField()),
    }
    if kind == "not shown":
        del fields["extra"]
    demo, task = (
        {"question": "Whose file is number 731?", "extra": extra},
        {"question": "My own question entirely?", "extra": extra},
    )
    recorder = Recorder()
    for inputs in (demo, task):
        recorder.texts.add(content_hash(inputs), inputs)
    program = dspy.Predict(dspy.Signature({**fields, "answer": (str, dspy.OutputField())}))
    program.demos = [dspy.Example(**{name: value for name, value in demo.items() if name in fields}, answer="x")]
    answer = {"chat": "[[ ## answer ## ]]\nx", "json": '{"answer": "x"}', "lean": "answer: x"}[prompt_format]
    rollout = Rollout(inputs=task)
    with (
        dspy.context(
            lm=scripted_lm(lambda _: answer, observers=[recorder.observe]), adapter=make_adapter(prompt_format)
        ),
        recorder.active(),
        recorder.rollout(rollout),
    ):
        program(**{name: value for name, value in task.items() if name in fields})
    assert rollout.transitions[0].shown_tasks == (content_hash(demo),)


def test_a_text_shared_by_tasks_counts_for_all_that_it_may_belong_to() -> None:
    texts = TaskTexts()
    for at in range(20):
        texts.add(
            f"t{at}",
            {"question": f"Where does customer {at} of it live?", "rules": "Answer in one short word, please."},
        )
    assert texts.within("Answer in one short word, please.\nWhere does customer 3 of it live?") == {"t3"}
    assert texts.within("Answer in one short word, please.") == frozenset(), "a text of all tasks tells nobody's"
    twins = TaskTexts()
    twins.add("north", {"question": "Where does customer 3 of it live?", "document": "The long document of the north."})
    twins.add("south", {"question": "Where does customer 3 of it live?", "document": "The long document of the south."})
    prompt = "question: Where does customer 3 of it live?"
    assert twins.within(prompt) == {"north", "south"}, "it may be either's"
    assert twins.within(f"{prompt}\ndocument: The long document of the south.") == {"south"}
    assert twins.tasks_in([prompt], own_task="north") == (), "the question is its own"
    assert twins.tasks_in([prompt], own_task="other", inputs={"question": "Where does customer 3 of it live?"}) == ()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bool", "none", "unused"])
def test_exports_of_a_tenant_show_no_task_of_another_for_any_columns(job: dict[str, Any], kind: str) -> None:
    rows = [json.loads(line) for line in Path("d.jsonl").read_text().splitlines()]
    for at, row in enumerate(rows):
        row["inputs"]["extra"] = {"bool": at % 2 == 0, "none": None, "unused": f"customer-{at}-id"}[kind]
        row["metadata"]["consent"] = "yes"
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    signature = (
        "question -> answer" if kind == "unused" else f"question, extra{': bool' if kind == 'bool' else ''} -> answer"
    )
    passed = "question=question" if kind == "unused" else "question=question, extra=extra"
    Path("e.py").write_text(
        "import dspy\n\nclass E(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        self.ask = dspy.Predict('{signature}')\n\n"
        f"    def forward(self, question, extra=None):\n        return self.ask({passed})\n"
    )
    made = assay.compile("e.py:E", optimizer="labeled", out="a", preflight=False, **job)
    assay.collect(str(made.artifact), n=1, preflight=False, **job)
    assert json.loads((made.artifact / "manifest.json").read_text())["shown"]["tasks"]
    exported, customers = exported_rows(job["store"], selection=Selection(tenants=("north",)))
    assert exported
    assert all(at % 2 == 0 for at in customers)


def test_a_demonstration_of_a_later_step_is_found_by_its_earlier_prompt() -> None:
    texts = TaskTexts()
    texts.add("t", {"question": "Where does the customer live?"})
    later = "[[ ## working ## ]]\nnotes that do not name the question"
    texts.record_prompt("t", ["instructions", f"{later}\n\nRespond with the corresponding output fields."])
    assert texts.tasks_in(["instructions", later, "an answer", "[[ ## working ## ]]\nothers\n\nRespond with ..."]) == (
        "t",
    )
    assert texts.tasks_in(["instructions", later, "an answer", "q"], own_task="t") == ()


# -- recording


@pytest.mark.parametrize(("program", "optimizer"), [("One", "labeled"), ("P", "bootstrap")])
def test_calls_record_the_tasks_of_their_demonstrations(job: dict[str, Any], program: str, optimizer: str) -> None:
    made = assay.compile(f"p.py:{program}", optimizer=optimizer, out="a", **job)
    with Store(job["store"]) as store:
        stored = [store.rollout(r.id) for r in store.rollouts()]
    checked = 0
    for rollout in stored:
        own_task = content_hash(rollout.inputs) if rollout.inputs else ""
        for call in rollout.transitions:
            text = json.dumps(call.request)
            visible = {task(at) for at in range(20) if question(at) in text or f"number {at} of it" in text} - {
                own_task
            }
            assert visible <= set(call.shown_tasks), (rollout.phase, call.t)
            checked += bool(visible)
    assert checked > 4
    manifest = json.loads((made.artifact / "manifest.json").read_text())
    assert manifest["shown"]["tasks"]
    assert set(manifest["shown"]["tasks"]) <= {task(at) for at in range(12)}
    assert manifest["shown"]["people"]


def test_calls_of_a_loaded_artifact_record_the_tasks_of_its_demonstrations(job: dict[str, Any]) -> None:
    made = assay.compile("p.py:One", optimizer="labeled", out="a", **job)
    Path("other.jsonl").write_text(
        "".join(
            json.dumps({"question": f"Quite another question, number {at}?", "answer": "7"}) + "\n" for at in range(60)
        )
    )
    assay.evaluate(
        str(made.artifact), split="val", **{**job, "data": "other.jsonl", "store": "new/s.db", "sizes": {"val": 3}}
    )
    tasks = set(json.loads((made.artifact / "manifest.json").read_text())["shown"]["tasks"])
    with Store("new/s.db") as store:
        calls = [
            call
            for r in store.rollouts()
            for call in store.rollout(r.id).transitions
            if len(call.request.get("messages", [])) > 1
        ]
    assert calls
    assert all(set(call.shown_tasks) >= tasks for call in calls)


# -- exports


def test_exports_of_a_tenant_show_no_tasks_of_others_or_without_consent(job: dict[str, Any]) -> None:
    made = assay.compile("p.py:One", optimizer="labeled", out="a", **job)
    assay.collect(str(made.artifact), n=1, **job)
    rows, customers = exported_rows(job["store"], selection=Selection(tenants=("north",)))
    allowed = {at for at in range(20) if at % 2 == 0 and at % 3}
    assert rows
    assert customers <= allowed
    assert all(int(row["task_type"] == "default") for row in rows)
    left_out = json.loads(Path("out/manifest.json").read_text())["left_out"]
    assert any(reason.startswith("calls whose prompt shows") for reason in left_out)


def test_tasks_in_calls_of_other_recorders_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Store("s.db") as store:
        store_splits(store, {"train": [(task(at), "") for at in range(4)]})
        for at, options in enumerate(({"tenant": "south"}, {"consent": "no"}, {}, {})):
            demo = (
                [{"role": "user", "content": f"An example. {question(at - 2)}"}, {"role": "assistant", "content": "7"}]
                if at == 2
                else []
            )
            messages = [*demo, {"role": "user", "content": question(at)}]
            response = {
                "body": {"choices": [{"message": {"role": "assistant", "content": "7"}, "finish_reason": "stop"}]}
            }
            rollout = Rollout(
                task_id=str(at),
                status="done",
                score=1.0,
                source="gateway",
                model="m",
                inputs={"question": question(at)},
                **options,
            )
            store.put_rollout(rollout)
            request = {"dialect": "chat", "body": {"model": "m", "messages": messages}}
            store.put_transition(
                rollout.id, Transition(t=0, model="m", weights="w", request=request, response=response, output="7")
            )
    assert {row["task"] for row in exported_rows("s.db")[0]} == {"3"}  # 2 shows a task of the tenant south


# -- erasure


def test_an_erased_person_is_in_no_prompt_cache_or_later_export(job: dict[str, Any]) -> None:
    made = assay.compile("p.py:One", optimizer="labeled", out="a", **job)
    at = next(
        at
        for at in range(12)
        if task(at) in json.loads((made.artifact / "manifest.json").read_text())["shown"]["tasks"]
    )
    cache = Path(".assay/cache/responses.db")
    erased = forget_subject(f" person  {at}", store=job["store"])
    assert str(made.artifact) in erased["made_from_them"]
    assert erased["prompts_emptied"] > 0
    assert erased["cached_answers_removed"] > 0
    with Store(job["store"]) as store:
        for rollout in store.rollouts():
            assert all(question(at) not in json.dumps(call.request) for call in store.rollout(rollout.id).transitions)
    assert cache.is_file()
    assert forget_subject(f"Person {at}", store=job["store"])["cached_answers_removed"] == 0
    assay.collect(str(made.artifact), n=1, **job)  # the artifact still shows them
    try:
        _, customers = exported_rows(job["store"], selection=BOTH)
    except DataError:
        customers = set()  # every call showed them
    assert at not in customers


# -- the gate


@pytest.mark.parametrize(
    ("required", "verified", "finds", "state", "passed"),
    [
        ("patterns", True, False, "patterns only", True),
        ("patterns", True, True, "verified", True),
        ("patterns", False, True, "failed", False),
        ("names", True, False, "patterns only", False),
        ("names", True, True, "verified", True),
        ("off", False, False, "failed", True),
    ],
)
def test_the_privacy_gate_has_three_states(
    required: str, verified: bool, finds: bool, state: str, passed: bool
) -> None:
    report = GateReport(Gates(privacy=required), verified=verified, finds_names=finds)
    gate = next(gate for gate in report.to_list() if gate["gate"] == "privacy")
    assert (gate["value"], gate["passed"]) == (state, passed)
    assert ("warning" in gate) == (passed and state == "patterns only")


@pytest.mark.slow
def test_undetected_names_are_a_warning_by_default_and_an_error_if_required(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assay.collect("p.py:P", n=1, **job)
    options: dict[str, Any] = {"store": job["store"], "gates": LOOSE, "selection": BOTH}
    report = assay.export("transitions", "one", privacy="patterns", **options)
    gate = next(gate for gate in report.manifest["gates"] if gate["gate"] == "privacy")
    assert (gate["passed"], gate["value"]) == (True, "patterns only")
    assert "names were not detected" in gate["warning"]
    assert report.manifest["privacy"]["state"] == "patterns only"
    assert not report.manifest["privacy"]["verified"]
    with pytest.raises(UngatedExport, match="privacy is patterns only, required is verified"):
        assay.export(
            "transitions",
            "two",
            privacy="patterns",
            **{**options, "gates": Gates(min_transitions=0, min_clean=0, min_task_types=0, privacy="names")},
        )
    if privacy_gazetteers.available():
        assert assay.export("transitions", "three", privacy="names", **options).manifest["privacy"]["verified"]
    monkeypatch.setattr("assay.traces.privacy.gazetteers.available", lambda: False)
    monkeypatch.setattr("assay.traces.privacy.names.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="privacy"):
        assay.export("transitions", "four", privacy="names", **options)
    with pytest.raises(ConfigError, match="privacy='maybe'"):
        Gates(privacy="maybe")


def test_answers_of_unknown_requests_are_erased_with_a_person(job: dict[str, Any]) -> None:
    """As versions cached them that kept no requests: whose they are cannot be told."""
    assay.collect("p.py:One", n=1, **job)
    place = Path(".assay/cache/responses.db")
    cache = ResponseCache(place)
    cache.put("ab" * 32, {"response": {}})
    cache.close()
    assert forget_subject("nobody", store=job["store"])["unowned_answers_removed"] == 0
    at = next(at for at in range(12) if forget_subject(f"Person {at}", store=job["store"])["removed"])
    cache = ResponseCache(place)
    assert at >= 0
    assert cache.get("ab" * 32) is None
    cache.close()


@pytest.mark.slow
def test_erasure_names_adapters_trained_on_an_export_and_their_successors(embedded: str, job: dict[str, Any]) -> None:
    assay.collect("p.py:One", n=1, **{**job, "sizes": {"train": 2}})
    report = assay.export("sft", "out", store=job["store"], selection=BOTH, gates=LOOSE, min_quality=0.0)
    trained = train_sft(
        report.path,
        "first",
        SFTSettings(model=embedded, lora_r=2, epochs=1, max_length=256, eval_fraction=0.0, min_quality=0.0),
    )
    first = find_adapter("first")
    keep_adapter("after", trained.path, base="smollm2-135m", after=[first])  # as if trained on other data
    keep_adapter("apart", trained.path, base="smollm2-135m")
    named: list[str] = []
    for at in range(12):
        named += forget_subject(f"Person {at}", store=job["store"])["made_from_them"]
    assert set(named) == {str(report.path), str(first.path), str(find_adapter("after").path)}


# -- loaded artifacts


def test_only_demonstrations_in_the_prompt_are_shown() -> None:
    river, mountain, unidentified = (
        (["Which river is it?", "the Aare"], ["t1"]),
        (["Which mountain is it?", "Eiger"], ["t2"]),
        (["a", "b"], []),
    )
    carried = Carried(["t1", "t2", "t3"], [river, mountain])
    assert carried.tasks_in(["You answer.", "question: Which  river is it?", "the Aare"]) == {"t1"}
    assert carried.tasks_in(["You answer."]) == set()
    assert Carried(["t1", "t3"], [river, unidentified]).tasks_in(["You answer."]) == {
        "t3"
    }  # no line tells it: it may be there
    assert Carried(["t1", "t2"]).tasks_in(["You answer."]) == {"t1", "t2"}  # an artifact of an older version


@pytest.mark.slow
def test_calls_with_nearest_demonstrations_record_only_those_in_the_prompt(job: dict[str, Any]) -> None:
    made = assay.compile("p.py:One", optimizer="KNNFewShot", out="a", **job)
    Path("other.jsonl").write_text(
        "".join(
            json.dumps({"question": f"Quite another question, number {at}?", "answer": "7"}) + "\n" for at in range(60)
        )
    )
    assay.evaluate(
        str(made.artifact), split="val", **{**job, "data": "other.jsonl", "store": "new/s.db", "sizes": {"val": 3}}
    )
    with Store("new/s.db") as store:
        calls = [call for r in store.rollouts() for call in store.rollout(r.id).transitions]
    every = json.loads((made.artifact / "manifest.json").read_text())["shown"]["tasks"]
    for call in calls:
        text = json.dumps(call.request)
        assert set(call.shown_tasks) == {task(at) for at in range(20) if question(at) in text} < set(every)
    assert any(call.shown_tasks for call in calls)
