"""What is checked before a job spends anything: program, rubric, judges and prices."""

import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import openai
import pytest

import assay
from assay.cli import names_of
from assay.commands.judge_score import score_rows
from assay.errors import ConfigError, FailureKind, ModelError, ProgramFailed, RubricError
from assay.testing import scripted_lm
from assay.traces import Store
from assay.traces.export.settings import Gates
from assay.traces.store.listing import list_runs
from rigs.command_line import assay_command
from rigs.projects import EXACT, Said, sums, write_program, write_project, write_rows
from rigs.serving import refusing, served
from rigs.upstream import ScriptedUpstream

MINE = "mine.py:Mine"
JUDGED = EXACT + "- {name: nice, judge: 'Is it nice?', scale: ['no', 'yes']}\n"
FIELD = "name: r\ncriteria:\n- {name: right, check: exact, with: {field: answer}}\n"
ALWAYS = 'raise RuntimeError("no such table: prices")'  # in line 11 of the program's file
ONCE = "global seen\nseen = globals().get('seen', 0) + 1\n"


def is_judging(request: Any) -> bool:
    return "material to judge" in str(request)


def answers(request: Any) -> Any:
    return {"yes": 0.9, "no": 0.1} if is_judging(request) else json.dumps({"answer": "4"})


def judge_down(request: Any) -> Any:
    return down(request) if is_judging(request) else answers(request)


def down(request: Any) -> Any:
    return dspy.lm15.ServerError("down")


@pytest.fixture(autouse=True)
def place(own_folder: Path) -> Path:
    write_project()
    Path("judged.yaml").write_text(JUDGED)
    return own_folder


def evaluate(script: Callable[[Any], Any] = answers, program: Any = MINE, **options: Any) -> Any:
    job: dict[str, Any] = {"rubric": "r.yaml", "data": "data.jsonl", "prompt_format": "json", **options}
    return assay.evaluate(program, **{"lm": scripted_lm(script, logprobs=True), **job})


JOBS: dict[str, Callable[..., Any]] = {
    "compile": lambda **job: assay.compile(MINE, optimizer="labeled", **job),
    "tune": lambda **job: assay.tune(MINE, trials=2, **job),
    "collect": lambda **job: assay.collect(MINE, n=2, **job),
    "evaluate": lambda **job: assay.evaluate(MINE, **job),
    "impact": lambda **job: assay.parameter_impact(MINE, levels=2, **job),
}


def run(job: str, script: Callable[[Any], Any] = answers, **options: Any) -> Any:
    """What stops a job, and its model."""
    lm = scripted_lm(script)
    options = {"rubric": "r.yaml", "data": "data.jsonl", "prompt_format": "json", "lm": lm, **options}
    with pytest.raises((ProgramFailed, ModelError, ConfigError)) as caught:
        JOBS[job](**options)
    return caught.value, lm.scripted


# -- programs


@pytest.mark.parametrize("job", JOBS)
def test_every_job_stops_before_it_spends_on_a_failing_program_a_dead_judge_or_an_unknown_price(job: str) -> None:
    error, model = run(job, judge_down, rubric="judged.yaml")
    assert isinstance(error, ModelError)
    assert "judge of 'nice' scored none" in str(error)
    assert model.calls < 15
    named = {"model": "openai/local-model", "api_base": "http://127.0.0.1:9/v1", "max_cost_usd": 1.0, "lm": None}
    error, _ = run(job, **named)
    assert isinstance(error, ConfigError)
    assert "max_cost_usd=1 cannot be kept: no price is known for openai/local-model" in str(error)
    write_program(body=ALWAYS)
    error, model = run(job)
    assert isinstance(error, ProgramFailed)
    assert model.calls == 3  # one of each run, and nothing after
    file = Path("mine.py").resolve()
    for part in ("first 3 tasks with RuntimeError", f"{file}:11", ALWAYS, "Traceback"):
        assert part in str(error)
    with Store() as store:
        assert {run["status"] for run in list_runs(store)} == {"failed"}


FAILING = {
    "none": ("return None", "first 3 tasks: every field of the answer is empty", 3),
    "no fields": ("return dspy.Prediction()", "first 3 tasks: the prediction has no fields", 3),
    "from the second run on": (
        f"{ONCE}if seen > 1:\n    raise ValueError(f'bad {{seen}}')\nreturn found",
        "tasks, such as: ValueError: bad",
        14,  # one run of the preflight, ten that decide, and what the three other threads have begun
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("body", "message", "most"), FAILING.values(), ids=FAILING)
@pytest.mark.parametrize("job", JOBS)
def test_a_program_without_answers_stops_every_job(job: str, body: str, message: str, most: int) -> None:
    write_program(body=body)

    def slowly(request: Any) -> Any:
        time.sleep(0.2)  # the job reads its runs meanwhile; after instant answers more runs have begun by then
        return answers(request)

    error, model = run(job, slowly, max_calls=200)
    assert isinstance(error, ProgramFailed)
    assert message in str(error)
    assert model.calls <= most
    assert ("mine.py" in str(error)) == ("raise" in body)


def test_failures_at_different_locations_stop_a_job_on_the_first_tasks() -> None:
    write_program(body=f"n = len(str(found))\n{ONCE}if seen % 2:\n    raise ValueError(n)\nraise KeyError(n)")
    error, model = run("evaluate", threads=1)
    assert isinstance(error, ProgramFailed)
    assert "tasks, such as" in str(error)
    assert model.calls <= 12


def test_auto_stops_if_no_candidate_answers() -> None:
    write_program(body=FAILING["from the second run on"][0])
    lm = scripted_lm(answers)
    with pytest.raises(ProgramFailed, match="ValueError"):
        assay.compile(MINE, rubric="r.yaml", data="data.jsonl", lm=lm, max_calls=200)
    assert lm.scripted.calls <= 60


def test_an_agent_that_calls_a_port_where_nothing_listens_is_told_so_without_a_traceback() -> None:
    def agent(question: str) -> str:
        urllib.request.urlopen(dead.replace("user:secret@", ""))
        return ""

    def client(question: str) -> str:
        return str(openai.OpenAI(base_url=dead, api_key="k", max_retries=0).models.list())

    with refusing() as address:
        dead = f"{address.replace('//', '//user:secret@')}/v1"
        for program, named in ((agent, "that address"), (client, address)):
            with pytest.raises(ProgramFailed, match=f"No server listens at {named}: start it") as caught:
                evaluate(program=program)
            assert "Traceback" not in str(caught.value)
            assert "weak model" not in str(caught.value)


def test_failures_of_the_model_are_not_the_programs() -> None:
    report = evaluate(lambda request: "no json")
    assert report.evaluation.report()["failed"] == len(report.evaluation)
    error, model = run("evaluate", down, cache=False)
    assert isinstance(error, ModelError)
    assert "none of the first 3 tasks" in str(error)
    assert model.calls == 3
    write_program(body="from assay.errors import LoopStopped\nraise LoopStopped('the model repeated itself')")
    error, _ = run("evaluate", cache=False)
    assert isinstance(error, ModelError)
    assert "first 3 tasks the model repeated itself. Name another model" in str(error)
    assert "Traceback" not in str(error)


def test_a_single_failure_stops_no_job_and_without_preflight_none_does() -> None:
    write_program(body=f"{ONCE}if seen == 1:\n    raise ValueError(1)\nreturn found")
    assert evaluate().evaluation.report()["failed"] == 0
    write_program(body="return None")
    assert evaluate(preflight=False).evaluation.report()["score"] == 0


# -- judges and prices


def test_a_judge_is_asked_again_after_its_unreadable_answers_stopped_a_preflight() -> None:
    """The answers were in the response cache, and failed the same job after the server was mended."""
    with pytest.raises(ModelError, match="judge of 'nice'"):
        evaluate(lambda request: "garbage" if is_judging(request) else answers(request), rubric="judged.yaml")
    assert evaluate(rubric="judged.yaml").evaluation.report()["undecided"] == {}


def test_a_judge_is_tried_even_if_no_run_answered_and_its_verdict_is_stored_as_its_failure() -> None:
    message = (
        r"the judge of 'nice' scored none.*No model was chosen for the judge, so the program's, \S+, judges; "
        r"judge_model names another"
    )
    for script in (judge_down, lambda request: down(request) if is_judging(request) else "no json"):
        with pytest.raises(ModelError, match=message):
            evaluate(script, rubric="judged.yaml")
    with Store() as store:
        assert {rollout.failure for rollout in store.rollouts() if rollout.source == "judge"} == {FailureKind.JUDGE}


def test_a_price_missing_from_the_engine_is_reported_after_the_first_run() -> None:
    lm = scripted_lm(answers, price_usd=None)
    with pytest.raises(ConfigError, match="no price is known for scripted/model"):
        evaluate(lm=lm, max_cost_usd=1.0)
    assert lm.scripted.calls == 1


def test_preflight_calls_are_not_paid_twice_and_are_in_no_export() -> None:
    lms = [scripted_lm(answers, logprobs=True) for _ in range(2)]
    plain, checked = (
        evaluate(rubric="judged.yaml", cache=False, lm=lm, preflight=lm is lms[1], sizes={"val": 6}) for lm in lms
    )
    assert lms[0].scripted.calls == lms[1].scripted.calls == checked.calls
    assert checked.evaluation.scores == plain.evaluation.scores
    with Store() as store:
        tried = {rollout.id for rollout in store.rollouts() if rollout.phase == "preflight"}
    assert len(tried) == 2  # the program's call and the judge's
    assay.export("transitions", "out", gates=Gates(min_clean=0))
    exported = {json.loads(line)["rollout"] for line in Path("out/data.jsonl").read_text().splitlines()}
    assert len(exported) > 5
    assert not exported & tried


@pytest.mark.slow
@pytest.mark.parametrize("role", ["program", "judge", "reflection"])
@pytest.mark.timeout(120)
def test_a_refused_connection_stops_the_job(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with refusing() as address:
        prefix = "" if role == "program" else f"{role}_"
        where = {f"{prefix}model": "openai/m", f"{prefix}api_base": f"{address}/v1"}
        lm = None if role == "program" else scripted_lm(answers, logprobs=True)
        job = assay.compile if role == "reflection" else assay.evaluate
        with pytest.raises(ModelError, match="refused"):
            job(MINE, rubric="judged.yaml", data="data.jsonl", lm=lm, prompt_format="json", **where)


@pytest.mark.slow
def test_the_command_exits_with_1_and_prints_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    write_program(body=ALWAYS)
    command = ["compile", MINE, "--rubric", "r.yaml", "--data", "data.jsonl", "--json"]
    with served(ScriptedUpstream().app()) as url:
        ended = assay_command(*command, "--model", "openai/m", "--api-base", f"{url}/v1")
    assert ended.code == 1
    assert "no such table: prices" in json.loads(ended.stdout)["error"]
    assert "mine.py:11" in ended.stderr
    assert "Traceback" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["score", "drift"])
def test_judge_score_and_drift_stop_before_their_items_if_no_model_answers(command: str) -> None:
    """Each of the items would have waited for the server by itself."""
    rows = write_rows("rows.jsonl", [{"input": str(n), "output": "b"} for n in range(30)])
    more = {"score": ["--data", rows, "--json"], "drift": ["--anchors", "frozen.json", "--freeze", rows]}[command]
    with refusing() as address:
        judge = ["Is it kind?", "--model", "openai/gone", "--api-base", f"{address}/v1"]
        done = assay_command("judge", command, *judge, *more, "--store", "s.db")
    text = " ".join(done.stderr.split())
    assert done.code == 1, text
    assert "openai/gone did not answer the judge 'Is it kind?': [openai/gone] failed to connect" in text
    assert "(--model, --api-key-env, --api-base); --no-preflight skips this check" in text
    with Store("s.db") as store:
        assert {rollout.phase for rollout in store.rollouts()} == {"preflight"}


def test_the_preflight_of_judge_score_costs_no_extra_call() -> None:
    rows = write_rows("rows.jsonl", [{"input": str(n), "output": "b"} for n in range(6)])

    def scored(preflight: bool) -> Any:
        lm = scripted_lm(lambda _: {"yes": 0.9, "no": 0.1}, logprobs=True)
        return score_rows("Is it kind?", data=rows, lm=lm, store=f"{preflight}/s.db", preflight=preflight)

    checked, plain = scored(True), scored(False)
    assert (checked.calls, plain.calls) == (6, 6)
    assert checked.mean == plain.mean


# -- rubrics


def asked(**expected: str) -> list[dict[str, Any]]:
    """Tasks whose only answer would be `4`, with other columns beside it."""
    return [{"question": f"Is {n} right?", **expected} for n in range(60)]


def refused(data: list[dict[str, Any]], rubric: str = FIELD, check: str = "") -> tuple[str, RubricError]:
    Path("r.yaml").write_text(rubric)
    if check:
        Path("own.py").write_text(check)
        Path("r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: 'own.py:right'}\n")
    with pytest.raises(RubricError) as caught:
        evaluate(data=data)
    assert "--" not in str(caught.value)
    return str(caught.value), caught.value


def test_a_check_without_its_expected_field_names_the_most_similar_column() -> None:
    text, error = refused(asked(label="bug"))
    assert "criterion 'right' could not be graded on any of the first 3 tasks" in text
    assert "has no expected 'answer'; it has label" in text
    assert "rename={'label': 'answer'}" in text
    printed = error.text(names_of(["evaluate"]))
    assert "rename it: --rename label=answer" in printed
    assert printed.endswith("--no-preflight skips this check")
    assert "rename={'answers': 'answer'}" in refused(asked(priority="2", answers="bug"))[0]
    assert "rename=" not in refused(asked(priority="2", queue="bug"))[0]
    # a column that the answer has too is the field that the check should read
    text, _ = refused(asked(answer="bug", customer="c1"), FIELD.replace("field: answer", "field: anwser"))
    assert "Name the field in the rubric: {name: right, with: {field: answer}}" in text
    assert "rename=" not in text


def test_a_user_check_that_raises_is_reported_with_its_error_and_the_fields() -> None:
    check = "def right(task, prediction, rollout):\n    return {}\n"
    text, _ = refused(asked(label="bug"), check=check.format("task.expected['answer'] == prediction['answer']"))
    assert "KeyError: 'answer'" in text
    assert "rename={'label': 'answer'}" in text
    text, _ = refused(asked(label="bug"), check=check.format("prediction['queue'] == 'bug'"))
    assert "rename=" not in text  # no column of the data can correct that
    assert "KeyError: 'queue' (own.py:2)" in text
    assert "task.inputs has ['question'], task.expected ['label'], and the prediction ['answer']" in text
    text, _ = refused(asked(label="bug"), check=check.format("task['label'] == prediction['answer']"))
    assert "its values are in task.inputs, task.expected and task.metadata: task.expected['label'] (own.py:2)" in text


def test_a_check_that_grades_only_later_tasks_does_not_stop_a_job() -> None:
    Path("r.yaml").write_text(FIELD)
    some = [{**row, "split": "val"} for row in sums(40)]
    for at, row in enumerate(some):
        row["answer" if at % 5 == 4 else "other"] = row.pop("answer")
    assert evaluate(data=some).evaluation.report()["undecided"]["right"]["n"] == 32


def test_an_answer_without_any_expected_field_causes_a_warning_where_the_rubric_reads_one() -> None:
    Path("own.py").write_text("def short(task, prediction, rollout):\n    return 0.0\n")
    own = "name: r\ncriteria:\n- {name: short, check: 'own.py:short'}\n"
    Path("own.yaml").write_text(own)
    Path("both.yaml").write_text(own + "- {name: right, check: exact}\n")
    named = "def right(task, prediction):\n    return task.expected['label'] == prediction['answer']\n"
    Path("named.py").write_text(named)
    Path("named.yaml").write_text("name: r\ncriteria:\n- {name: right, check: 'named.py:right'}\n")
    for rubric, data, warning in (
        ("r.yaml", asked(label="bug"), "the tasks expect ['label'], and the program answers ['answer']"),
        ("r.yaml", asked(answer="sales"), ""),
        ("own.yaml", asked(reference="bug"), ""),
        ("named.yaml", asked(label="other"), ""),  # 0, but not for want of a name
        ("both.yaml", asked(reference="bug"), "gives 0 (right). Rename a column"),
    ):
        said = Said()
        evaluate(rubric=rubric, data=data, progress=said)
        warnings = [line for line in said.lines if "warning" in line]
        assert len(warnings) == bool(warning), warnings
        assert warning in "".join(warnings)


def test_an_output_field_that_the_rubric_does_not_read_causes_a_warning() -> None:
    Path("r.yaml").write_text(FIELD.replace("answer", "intent"))

    def notes(program: Any) -> list[str]:
        return list(evaluate(program=program, data=asked(intent="bug")).to_dict()["notes"])

    (note,) = [note for note in notes(lambda question: "bug") if "the program answers" in note]
    assert "the tasks expect ['intent'], and the program answers ['answer']" in note
    with Store() as store:
        reasons = {verdict.reason for rollout in store.rollouts(split="val") for verdict in rollout.verdicts}
    assert reasons == {"Expected 'bug', and the prediction has no field 'intent'; it has ['answer']."}
    assert notes(lambda question: {"intent": "bug"}) == []
