"""`assay compile` on a scripted model that needs demonstrations to be right: optimizers, caps, failures, replay."""

import json
import math
import random
import re
import sys
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.datasets import load_splits
from assay.errors import ArtifactError, ConfigError, MissingExtra, ModelError, RubricError, SealedSplit
from assay.evaluation import RecordedProgram, Session, evaluate, paired_gain
from assay.models import Caps, Meter, ResponseCache
from assay.optimizers import OPTIMIZERS
from assay.optimizers.prompts.demonstrations import Demonstration, Exploration, choose, explore, shape
from assay.optimizers.prompts.teleprompters import shows_demos
from assay.programs import MathQA
from assay.rubrics import Criterion, JudgeSpec, Rubric, checks, load_rubric
from assay.testing import scripted_lm
from assay.traces import Recorder

DATA = "arithmetic:size=150&seed=3"


def student_of_examples(request: Any) -> str:
    """Calls the calculator when told how it is done (three demonstrations) or when it must; else guesses."""
    config = request.config.response_format
    if config is None or "schema" not in config:  # a teleprompter asks for instructions
        return json.dumps(
            {"proposed_instruction": "Use the calculator.", "reasoning": "r", "natural_language_rules": "rule"}
        )
    fields = config["schema"]["properties"]
    user = request.messages[-1].text or ""
    question = re.search(r"(?:is|Calculate|out|much is) ([-0-9 +*()]+)", user)
    result = re.search(r"= (-?\d+)\s*$", user.split("Respond with")[0].strip(), re.MULTILINE)
    taught = len(request.messages) >= 7
    reply = {
        "thought": "hm",
        "action": ("answer" if result else "calculator") if taught else "answer",
        "need": (0.0 if result else 1.0) if taught else 0.0,
        "expression": question[1].strip() if question else "0",
        "answer": result[1] if result else "0",
    }
    return json.dumps({name: reply.get(name, "x") for name in fields})


def session_for(lm: Any, meter: Meter, **options: Any) -> Session:
    return Session(lm, load_rubric("math_qa"), lm.recorder, meter, "math_qa", threads=2, **options)


def scripted_session(
    script: Any = student_of_examples, *, caps: Caps | None = None, cache: ResponseCache | None = None
) -> Session:
    recorder, meter = Recorder(), Meter(caps)
    lm = scripted_lm(script, meter=meter, observers=[recorder.observe], cache=cache)
    lm.recorder = recorder
    return session_for(lm, meter)


def compile_it(optimizer: str, tmp_path: Path, script: Any = student_of_examples, **options: Any) -> Any:
    options = {"sizes": {"train": 24, "val": 18, "gate": 12, "test": 12}, **options}
    return assay.compile(
        "math_qa",
        rubric="math_qa",
        data=DATA,
        lm=scripted_lm(script),
        optimizer=optimizer,
        store=tmp_path / ".assay" / "a.db",
        threads=2,
        **options,
    )


@pytest.mark.slow
def test_auto_finds_demonstrations_if_the_plain_program_never_succeeds(tmp_path: Path) -> None:
    report = compile_it("auto", tmp_path)
    data = report.to_dict()
    assert data["test"]["baseline"]["score"] == 0.0
    assert data["test"]["compiled"]["score"] == 1.0
    assert data["test"]["compiled"]["criteria"]["tool_adoption"] == 1.0
    assert data["replaces"]
    assert data["test"]["gain"] == {
        "mean": 1.0,
        "low": pytest.approx(0.5, abs=1e-3),
        "high": 1.0,
        "n": 12,
    }  # rule of three: 1 - 3 / 12 * (1 - -1)
    assert 0 < data["search_calls"] <= 300
    assert data["unrecorded"] == data["rows_not_stored"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_every_optimizer_runs_and_stores_the_measured_program(optimizer: str, tmp_path: Path) -> None:
    demos = {"demos": 4} if shows_demos(optimizer) else {}
    report = compile_it(optimizer, tmp_path, sizes={"train": 12, "val": 6, "gate": 5, "test": 5}, **demos)
    data = report.to_dict()
    assert not [note for note in data["notes"] if "failed" in note], data["notes"]
    assert data["test"]["compiled"]["n"] == 5
    loaded = assay.load(report.artifact)
    with dspy.context(lm=scripted_lm(student_of_examples)):
        answer = loaded(question="What is 20 + 22?").answer
    compiled = data["test"]["compiled"]["score"]
    assert (answer == "42") == (compiled == 1.0)
    if optimizer in ("bootstrap", "bootstrap-search", "knn", "ensemble"):
        assert compiled == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BootstrapFewShot", "COPRO", "GEPA", "BootstrapFewShotWithRandomSearch"])
def test_teleprompter_is_loaded_by_class_path(tmp_path: Path, name: str) -> None:
    report = compile_it(f"dspy.teleprompt:{name}", tmp_path, sizes={"train": 8, "val": 5, "gate": 5, "test": 5})
    why = ("no candidate beat the plain program on val", "nothing else than the plain program was proposed")
    assert report.to_dict()["notes"] in ([], *([f"{reason}; it is unchanged"] for reason in why))


@pytest.mark.parametrize("wrong", ["bootstrp", "no.module:X", "dspy:Nothing"])
def test_an_unknown_optimizer_is_refused_before_any_call(wrong: str, tmp_path: Path) -> None:
    lm = scripted_lm(student_of_examples)
    with pytest.raises(ConfigError, match="optimizer"):
        assay.compile("math_qa", rubric="math_qa", data=DATA, lm=lm, optimizer=wrong)
    assert lm.scripted.calls == 0


@pytest.mark.slow
def test_search_cap_ends_with_the_best_result(tmp_path: Path) -> None:
    data = compile_it("auto", tmp_path, max_search_calls=60).to_dict()
    assert data["search_calls"] <= 60
    assert data["test"]["compiled"]["n"] == 12


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "cap"), [("bootstrap-search", 260), ("mipro", 250), ("optuna", 260)])
def test_cap_keeps_the_best_program_a_named_optimizer_evaluated(tmp_path: Path, optimizer: str, cap: int) -> None:
    data = compile_it(optimizer, tmp_path, max_search_calls=cap).to_dict()
    assert f"{cap} search calls" in data["stopped"]
    assert data["winner"] == f"{optimizer}, cut short"
    assert data["test"]["compiled"]["score"] > data["test"]["baseline"]["score"]
    report = compile_it(optimizer, tmp_path, max_search_calls=5000, resume=True).to_dict()
    assert (report["winner"], report["stopped"]) == (optimizer, None)


def test_failing_optimizer_leaves_the_plain_program_and_a_note(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "class Broken:\n    def compile(self, student, trainset):\n        raise KeyError('lost')\n"
    )
    sys.path.insert(0, str(tmp_path))
    data = compile_it("broken:Broken", tmp_path).to_dict()
    assert (data["winner"], data["test"]["compiled"]["n"]) == ("baseline", 12)
    assert any(note.startswith("broken:Broken failed: KeyError: 'lost'") for note in data["notes"])


@pytest.mark.parametrize("optimizer", ["auto", "labeled"])
def test_unreachable_server_ends_the_compile_early_with_a_reason(tmp_path: Path, optimizer: str) -> None:
    calls = []

    def down(request: Any) -> Exception:
        calls.append(1)
        return dspy.lm15.ServerError("down")

    with pytest.raises(ModelError, match=r"could be scored.*down.*continue with resume=True") as caught:
        compile_it(optimizer, tmp_path, down, preflight=False)
    assert caught.value.flag == "--resume"
    assert len(calls) <= 40


@pytest.mark.slow
def test_server_failure_after_the_search_leaves_a_resumable_run(tmp_path: Path) -> None:
    tested = {task.inputs["question"] for task in load_splits(DATA).unseal()}
    down = True

    def dies(request: Any) -> Any:
        prompt = request.messages[-1].text or ""
        return (
            dspy.lm15.ServerError("gone")
            if down and any(question in prompt for question in tested)
            else student_of_examples(request)
        )

    with pytest.raises(ModelError, match=r"none of the 12 test tasks could be scored.*gone.*--resume"):
        compile_it("labeled", tmp_path, dies)
    down = False
    data = compile_it("labeled", tmp_path, dies, resume=True).to_dict()
    assert data["test"]["compiled"]["n"] == 12
    assert data["test"]["compiled"]["unscored"] == 0


def test_missing_package_ends_the_run_without_a_score(tmp_path: Path) -> None:
    class NeedsMore(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.predict = dspy.Predict("question -> answer")

        def forward(self, question: str) -> Any:
            raise MissingExtra("xyz", "hf")

    with pytest.raises(MissingExtra, match="xyz"):
        assay.evaluate(
            NeedsMore(),
            rubric="math_qa",
            data=DATA,
            lm=scripted_lm(student_of_examples),
            sizes={"val": 4},
            store=tmp_path / "a.db",
        )


def test_auto_explores_if_the_data_has_no_labels(tmp_path: Path) -> None:
    data = tmp_path / "unlabelled.jsonl"
    data.write_text("".join(json.dumps({"question": f"say {i}"}) + "\n" for i in range(80)))
    rubric = Rubric(
        "yes", [Criterion(name="yes", check=checks.one_of, arguments={"values": ["yes"], "field": "answer"})]
    )
    report = assay.compile(
        dspy.Predict("question -> answer"), rubric=rubric, data=str(data),
        lm=scripted_lm(lambda request: '{"answer": "yes"}'),
        store=tmp_path / "a.db", sizes={"train": 12, "val": 6, "gate": 5, "test": 5}, prompt_format="json",
    )  # fmt: skip
    assert sum(row["succeeded"] for row in report.outcome.explored) > 0


def test_calls_are_stored_and_not_held_in_memory(tmp_path: Path) -> None:
    report = compile_it("labeled", tmp_path, sizes={"train": 8, "val": 5, "gate": 5, "test": 5})
    assert report.meter.usage.calls > 20
    assert report.outcome.baseline.session.lm.history == []


def test_exploration_raises_temperature_if_nothing_succeeds() -> None:
    session, heats = scripted_session(lambda request: '{"answer": "no idea"}'), set()
    session.lm.recording.observers += (lambda call: heats.add(call.request["config"]["temperature"]),)
    with session.context():
        explore(
            RecordedProgram(MathQA(), session),
            load_splits(DATA).train,
            session,
            prompt_formats=["json"],
            target=5,
            max_calls=300,
        )
    assert 1.0 in heats


@pytest.mark.slow
def test_job_that_failed_to_start_releases_its_lock(tmp_path: Path) -> None:
    compile_it("labeled", tmp_path, cache=False)
    with pytest.raises(
        ConfigError, match="this job has finished"
    ) as caught:  # the exception is kept, as a notebook keeps it
        compile_it("labeled", tmp_path, cache=False, resume=True)
    assert compile_it("labeled", tmp_path).to_dict()["stopped"] is None, caught


def test_cap_on_all_calls_stops_and_keeps_the_artifact(tmp_path: Path) -> None:
    data = compile_it("auto", tmp_path, max_calls=40).to_dict()
    assert data["calls"] <= 40
    assert data["stopped"]
    assert not data["replaces"]
    assert Path(data["artifact"]).is_dir()


@pytest.mark.slow
def test_capped_run_resumes_with_a_higher_cap(tmp_path: Path) -> None:
    first = compile_it("auto", tmp_path, max_calls=40).to_dict()
    second = compile_it("auto", tmp_path, max_calls=1000, resume=True).to_dict()
    assert second["stopped"] is None
    assert second["repeated_calls"] == 0  # what was asked before is answered from the response cache
    assert second["calls"] > first["calls"]  # what was spent before still counts
    assert second["test"]["compiled"]["score"] == 1.0
    resumed = compile_it("auto", tmp_path, max_calls=1000, resume=True).to_dict()  # a finished run is replayed
    assert [resumed[name] for name in ("winner", "calls", "cached", "repeated_calls")] == [
        second[n] for n in ("winner", "calls", "cached", "repeated_calls")
    ]


def test_evaluation_keeps_finished_tasks_at_a_cap_and_resumes(tmp_path: Path) -> None:
    def evaluate(**options: Any) -> dict[str, Any]:
        store = tmp_path / "assay.db"
        report = assay.evaluate(
            "math_qa",
            rubric="math_qa",
            data=DATA,
            sizes={"val": 8},
            lm=scripted_lm(student_of_examples),
            store=store,
            **options,
        )
        return report.to_dict()

    first = evaluate(max_calls=5, threads=1)
    assert 0 < first["result"]["n"] < 8
    assert "cap of 5 calls" in first["stopped"]
    second = evaluate(max_calls=100, resume=True)
    assert (second["result"]["n"], second["stopped"]) == (8, None)
    assert second["calls"] == evaluate(cache=False)["calls"]  # the five before count, and none was made twice


def test_module_without_import_path_loads_into_an_instance(tmp_path: Path) -> None:
    predict = dspy.Predict("question -> answer")
    options = {"sizes": {"train": 6, "val": 5, "gate": 5, "test": 5}, "parameters": {"temperature": 0.3}}
    report = assay.compile(
        predict, rubric="math_qa", data=DATA, lm=scripted_lm(student_of_examples), optimizer="labeled", **options
    )
    with dspy.context(lm=scripted_lm(student_of_examples)):
        assert report.program(question="What is 1 + 1?").answer
        assert assay.load(report.artifact, program=dspy.Predict("question -> answer"))(question="What is 1 + 1?").answer


@pytest.mark.slow
def test_program_raising_on_every_task_is_counted_and_not_fatal(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "import dspy\nclass Bad(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.p = dspy.Predict('question -> answer')\n    def forward(self, question):\n"
        "        raise RuntimeError('always')\n"
    )
    report = assay.compile(
        "bad.py:Bad", rubric="math_qa", data=DATA, lm=scripted_lm(student_of_examples),
        sizes={"test": 6, "gate": 6, "val": 6, "train": 6},
        preflight=False,
    )  # fmt: skip
    data = report.to_dict()["test"]["compiled"]
    assert (data["score"], data["failed"], data["n"]) == (0.0, 6, 6)


def test_unreachable_server_leaves_tasks_unscored(tmp_path: Path) -> None:
    data = assay.evaluate(
        "math_qa", rubric="math_qa", data=DATA, lm=scripted_lm(lambda request: dspy.lm15.ServerError("down")),
        sizes={"val": 6},
        preflight=False,
    ).to_dict()  # fmt: skip
    assert (data["result"]["score"], data["result"]["unscored"]) == (None, 6)


def test_unparsable_judge_answers_are_unscored(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "name: r\ncriteria:\n- {name: right, check: numeric}\n"
        "- {name: nice, judge: 'Is it nice?', scale: ['no', 'yes']}\n"
    )

    def script(request: Any) -> str:
        return "blah blah" if "material to judge" in str(request) else student_of_examples(request)

    report = assay.evaluate(
        "math_qa", rubric="r.yaml", data=DATA, lm=scripted_lm(script, price_usd=0.01), sizes={"val": 4},
        parameters={"tool_usage_threshold": 0},
        preflight=False,
    )  # fmt: skip
    data = report.to_dict()["result"]
    judged = [result.cost_usd for result in report.evaluation.results.values()]
    assert all(cost == 0.02 for cost in judged)  # asked twice, and paid for though nothing could be read
    assert data["criteria"] == {"right": 1.0, "nice": None}
    assert data["score"] == 1.0


@pytest.mark.slow
def test_repeated_run_replays_from_the_cache(tmp_path: Path) -> None:
    sizes = {"train": 12, "val": 6, "gate": 5, "test": 5}
    first = compile_it("auto", tmp_path, seed=5, sizes=sizes).to_dict()
    second = compile_it("auto", tmp_path, seed=5, sizes=sizes).to_dict()
    assert second["calls"] == 0
    assert second["cached"] == first["calls"] + first["cached"]
    assert second["test"] == first["test"]
    assert second["candidates"] == first["candidates"]
    assert second["artifact"] != first["artifact"]


@pytest.mark.slow
def test_rollouts_have_the_split_of_their_task(tmp_path: Path) -> None:
    sizes = {"train": 12, "val": 6, "gate": 5, "test": 5}
    compile_it("auto", tmp_path, sizes=sizes)
    splits = load_splits(DATA, inputs=["question"], limits=sizes)
    splits.unseal()
    where = {task.id: name for name in ("train", "val", "gate", "test") for task in getattr(splits, name)}
    with assay.Store(tmp_path / ".assay" / "a.db") as store:
        values = {
            (rollout.split, where[rollout.task_id]) for rollout in store.rollouts() if rollout.source == "program"
        }
    assert values == {(name, name) for name in ("train", "val", "gate", "test")}


def test_test_split_is_not_read_before_the_report() -> None:
    splits = load_splits(DATA)
    with pytest.raises(SealedSplit):
        _ = splits.test


def test_exploration_makes_tool_calls_happen() -> None:
    session = scripted_session()
    with session.context():
        exploration = explore(
            RecordedProgram(MathQA(), session), load_splits(DATA).train, session, prompt_formats=["json"], target=5
        )
    assert len(exploration.demonstrations) >= 5
    assert exploration.teacher is not None
    assert exploration.teacher.settings["parameters"]["tool_usage_threshold"] == 0
    actions = [output["action"] for d in exploration.demonstrations for name, _, output in d.steps if name == "decide"]
    assert set(actions) == {"calculator", "answer"}


def test_exploration_stops_if_no_task_is_hard() -> None:
    session = scripted_session()
    with session.context():
        exploration = explore(
            RecordedProgram(MathQA(), session), load_splits(DATA).train, session, prompt_formats=["json"], target=5
        )
    assert not any(d.failures for d in exploration.demonstrations)
    assert 10 <= len(exploration.demonstrations) < 14  # twice as many as wanted, to the end of a batch


def test_prompt_format_that_scored_worse_is_dropped() -> None:
    def explored(tried: int, succeeded: int) -> Exploration:
        rows = [
            {"adapter": "lean", "tried": 12, "succeeded": 10},
            {"adapter": "json", "tried": tried, "succeeded": succeeded},
        ]
        teacher = RecordedProgram(MathQA(), scripted_session(), prompt_format="lean")
        return Exploration(teacher=teacher, variants=rows)

    assert explored(8, 1).behind("json")
    assert not explored(8, 6).behind("json")
    assert not explored(0, 0).behind("json")  # nothing is known


def test_run_wrong_only_in_its_last_step_is_corrected_by_the_label() -> None:
    def loses_signs(request: Any) -> str:
        reply = json.loads(student_of_examples(request))
        return json.dumps({name: value.lstrip("-") if name == "answer" else value for name, value in reply.items()})

    def guesses(request: Any) -> str:
        reply = json.loads(student_of_examples(request))
        return json.dumps({name: "1 + 1" if name == "expression" else value for name, value in reply.items()})

    def pool(script: Any) -> list[Demonstration]:
        session = scripted_session(script)
        with session.context():
            return explore(
                RecordedProgram(MathQA(), session),
                load_splits(DATA).train[:20],
                session,
                prompt_formats=["json"],
                target=20,
            ).demonstrations

    hard = [d for d in pool(loses_signs) if d.failures]
    assert hard
    assert all(
        d.steps[-1][2]["answer"] == str(d.task.expected["answer"]) and str(d.task.expected["answer"])[0] == "-"
        for d in hard
    )
    assert pool(guesses) == []  # the label stands nowhere in what these runs saw: showing it would teach guessing


def test_diverse_demonstrations_cover_what_random_ones_miss() -> None:
    assert shape("-214") == "^-000$"
    session = scripted_session()
    with session.context():
        pool = explore(
            RecordedProgram(MathQA(), session), load_splits(DATA).train, session, prompt_formats=["json"], target=30
        ).demonstrations
    negative = {d.task.id for d in pool if d.steps[-1][2]["answer"].startswith("-")}
    assert 0 < len(negative) < len(pool)
    for seed in range(5):
        assert negative & {d.task.id for d in choose(pool, 4, seed=seed)}


def test_paired_gain_matches_hand_calculation() -> None:
    before = {str(i): 0.0 for i in range(20)}
    after = {str(i): float(i % 2) for i in range(20)}
    gain = paired_gain(before, after)
    assert gain.mean == 0.5
    # normal approximation: 0.5 +- 1.96 * sqrt(0.25 / 20) = [0.28, 0.72]
    assert gain.low == pytest.approx(0.28, abs=0.06)
    assert gain.high == pytest.approx(0.72, abs=0.06)
    assert paired_gain(before, {**after, "0": math.nan}).n == 19
    assert not paired_gain({"a": 0.0}, {"a": 1.0}).is_gain  # one pair proves nothing


def test_interval_coverage_is_nominal() -> None:
    rng, covered = random.Random(0), 0
    for _ in range(100):
        differences = {str(i): rng.choice([-1.0, 0.0, 0.0, 1.0, 1.0]) for i in range(40)}  # mean 0.2
        gain = paired_gain(dict.fromkeys(differences, 0.0), differences)
        covered += gain.low <= 0.2 <= gain.high
    assert covered >= 90


def test_more_than_ten_failed_runs_do_not_end_an_evaluation() -> None:
    session = scripted_session(lambda request: "no json at all")
    with session.context():
        evaluation = evaluate(RecordedProgram(MathQA(), session), load_splits(DATA).val[:15], session)
    assert evaluation.report()["failed"] == 15
    assert evaluation.mean == 0.0


def test_undecided_criteria_and_failure_reasons_are_reported(tmp_path: Path) -> None:
    def boom(task: Any, prediction: Any, rollout: Any) -> bool:
        raise RuntimeError("the ruler broke")

    class Broken(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.predict = dspy.Predict("question -> answer")

        def forward(self, question: str) -> Any:
            raise KeyError("boom")

    half = Rubric("half", [Criterion(name="right", check=boom), Criterion(name="any", check=checks.numeric)])
    options: dict[str, Any] = {
        "data": DATA,
        "lm": scripted_lm(student_of_examples),
        "sizes": {"val": 4},
        "store": tmp_path / "a.db",
    }
    with pytest.raises(RubricError, match=r"'right' could not be graded on any of the first 3 tasks .*the ruler broke"):
        assay.evaluate("math_qa", rubric=half, **options)
    line = boom.__code__.co_firstlineno + 1
    report = assay.evaluate("math_qa", rubric=half, preflight=False, **options).to_dict()["result"]
    assert report["undecided"] == {
        "right": {"n": 4, "of": 4, "reason": f"RuntimeError: the ruler broke (test_compile.py:{line})"}
    }
    assert report["coverage"] == 0.0
    failed = assay.evaluate(Broken(), rubric="math_qa", preflight=False, **options).to_dict()["result"]
    assert (failed["failed"], failed["why_failed"], failed["score"]) == (4, "KeyError: 'boom'", 0.0)


def test_judge_calls_are_stored_in_rollouts_of_the_judged_task(tmp_path: Path) -> None:
    rubric = Rubric(
        "r",
        [Criterion(name="right", check=checks.numeric), Criterion(name="nice", judge=JudgeSpec(text="Is it nice?"))],
    )

    def judging(request: Any) -> Any:
        return '{"verdict": "yes"}' if "Is it nice?" in str(request) else student_of_examples(request)

    assay.evaluate(
        "math_qa", rubric=rubric, data=DATA, lm=scripted_lm(judging), sizes={"val": 3}, store=tmp_path / "a.db"
    )
    with assay.Store(tmp_path / "a.db") as store:
        runs = {r.task_id for r in store.rollouts() if r.source == "program"}
        judged = [store.rollout(r.id) for r in store.rollouts() if r.source == "judge"]
    assert {r.task_id for r in judged} == runs
    assert {r.split for r in judged} == {"val"}
    assert all(r.transitions and r.prediction["verdict"] == "yes" for r in judged)


def test_unwritable_output_path_is_refused_before_any_call(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lm = scripted_lm(student_of_examples)
    with pytest.raises(ArtifactError, match="cannot write the artifact"):
        assay.compile(
            "math_qa", rubric="math_qa", data=DATA, lm=lm, out=tmp_path / "file" / "x", store=tmp_path / "a.db"
        )
    assert lm.scripted.calls == 0
