"""What is checked before a job spends anything: the program runs, its judges answer, prices are known."""

import json
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import dspy
import openai
import pytest

import assay
from assay.commands.judge_score import score_rows
from assay.errors import ConfigError, ModelError, ProgramFailed
from assay.testing import scripted_lm
from assay.traces import Store
from assay.traces.export.settings import Gates
from rigs.command_line import assay_command
from rigs.serving import served
from rigs.upstream import ScriptedUpstream

PROGRAM = """import dspy


class Mine(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        found = self.answer(question=question)
        return self.read(found)

    def read(self, found):
        {body}
"""
RUBRIC = "name: r\ncriteria:\n- {name: right, check: exact}\n"
JUDGED = RUBRIC + "- {name: nice, judge: 'Is it nice?', scale: ['no', 'yes']}\n"
ALWAYS = 'raise RuntimeError("no such table: prices")'  # line 14 of the program's file


def answers(request: Any) -> Any:
    if "material to judge" in str(request):
        return {"yes": 0.9, "no": 0.1}
    return json.dumps({"answer": "4"})


@pytest.fixture
def place(tmp_path: Path) -> Path:
    rows = [{"question": f"What is {n} + 2?", "answer": str(n + 2)} for n in range(60)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.yaml").write_text(RUBRIC)
    (tmp_path / "judged.yaml").write_text(JUDGED)
    (tmp_path / "mine.py").write_text(PROGRAM.format(body="return found"))
    return tmp_path


def jobs(**options: Any) -> list[Any]:
    keywords = {"rubric": "r.yaml", "data": "data.jsonl", "prompt_format": "json", **options}
    return [
        lambda: assay.compile("mine.py:Mine", optimizer="labeled", **keywords),
        lambda: assay.tune("mine.py:Mine", trials=2, **keywords),
        lambda: assay.collect("mine.py:Mine", n=2, **keywords),
        lambda: assay.evaluate("mine.py:Mine", **keywords),
        lambda: assay.parameter_impact("mine.py:Mine", levels=2, **keywords),
    ]


@pytest.mark.parametrize("job", range(5))
def test_a_program_failing_three_times_alike_stops_every_job_with_its_location(place: Path, job: int) -> None:
    (place / "mine.py").write_text(PROGRAM.format(body=ALWAYS))
    lm = scripted_lm(answers)
    with pytest.raises(ProgramFailed, match="first 3 tasks with RuntimeError") as caught:
        jobs(lm=lm)[job]()
    assert f"{place / 'mine.py'}:14" in str(caught.value)
    assert ALWAYS in str(caught.value)
    assert "Traceback" in str(caught.value)
    assert lm.scripted.calls == 3  # one of each run, and nothing after
    with Store() as store:
        assert {status for _, status in store.runs("")} <= {"failed"}


def test_an_agent_that_calls_a_port_where_nothing_listens_is_told_so_without_a_traceback(place: Path) -> None:
    def agent(question: str) -> str:
        urllib.request.urlopen(dead.replace("user:secret@", ""))
        return ""

    def client(question: str) -> str:
        return str(openai.OpenAI(base_url=dead, api_key="k", max_retries=0).models.list())

    with socket.socket() as bound:  # bound and not listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        dead = f"http://user:secret@127.0.0.1:{port}/v1"
        for program, address in ((agent, "that address"), (client, f"http://127.0.0.1:{port}")):
            with pytest.raises(ProgramFailed, match=f"No server listens at {address}: start it") as caught:
                assay.evaluate(program, rubric="r.yaml", data="data.jsonl", lm=scripted_lm(answers))
            assert "Traceback" not in str(caught.value)
            assert "weak model" not in str(caught.value)


def test_model_failures_are_not_attributed_to_the_program(place: Path) -> None:
    report = assay.evaluate(
        "mine.py:Mine",
        rubric="r.yaml",
        data="data.jsonl",
        prompt_format="json",
        lm=scripted_lm(lambda request: "no json"),
    )
    assert report.evaluation.report()["failed"] == len(report.evaluation)


def test_a_model_that_loops_on_each_task_is_named_instead_of_the_program(place: Path) -> None:
    body = "from assay.errors import LoopStopped; raise LoopStopped('the model repeated itself')"
    (place / "mine.py").write_text(PROGRAM.format(body=body))
    with pytest.raises(ModelError, match=r"first 3 tasks the model repeated itself\. Name another model") as caught:
        jobs(lm=scripted_lm(answers))[3]()
    assert "Traceback" not in str(caught.value)


def test_failures_at_different_locations_stop_a_job_on_the_first_tasks(place: Path) -> None:
    body = (
        "n = len(str(found))\n        global seen\n        seen = globals().get('seen', 0) + 1\n"
        "        if seen % 2:\n            raise ValueError(n)\n        raise KeyError(n)"
    )
    (place / "mine.py").write_text(PROGRAM.format(body=body))
    lm = scripted_lm(answers)
    with pytest.raises(ProgramFailed, match=r"first \d+ tasks, such as"):
        assay.evaluate("mine.py:Mine", rubric="r.yaml", data="data.jsonl", prompt_format="json", lm=lm, threads=1)
    assert lm.scripted.calls <= 12


FAILING = {
    "none": ("return None", "first 3 tasks: every field of the answer is empty", 3),
    "no fields": ("return dspy.Prediction()", "first 3 tasks: the prediction has no fields", 3),
    "from the second run on": (
        "global seen\n        seen = globals().get('seen', 0) + 1\n        if seen > 1:\n"
        "            raise ValueError(f'bad {seen}')\n        return found",
        r"first \d+ tasks, such as: ValueError: bad",
        14,  # one run of the preflight, ten that decide, and what the three other threads have begun
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("body", "message", "most"), FAILING.values(), ids=FAILING)
@pytest.mark.parametrize("job", range(5))
def test_a_program_without_answers_stops_every_job(place: Path, job: int, body: str, message: str, most: int) -> None:
    (place / "mine.py").write_text(PROGRAM.format(body=body))

    def slowly(request: Any) -> Any:
        time.sleep(0.2)  # the job reads its runs meanwhile; after instant answers more runs have begun by then
        return answers(request)

    lm = scripted_lm(slowly)
    with pytest.raises(ProgramFailed, match=message) as caught:
        jobs(lm=lm, max_calls=200)[job]()
    assert lm.scripted.calls <= most
    assert ("mine.py" in str(caught.value)) == ("raise" in body)


def test_auto_stops_if_no_candidate_answers(place: Path) -> None:
    (place / "mine.py").write_text(PROGRAM.format(body=FAILING["from the second run on"][0]))
    lm = scripted_lm(answers)
    with pytest.raises(ProgramFailed, match="ValueError"):
        assay.compile("mine.py:Mine", rubric="r.yaml", data="data.jsonl", lm=lm, max_calls=200)
    assert lm.scripted.calls <= 60


def test_without_preflight_a_program_without_answers_scores_zero(place: Path) -> None:
    (place / "mine.py").write_text(PROGRAM.format(body="return None"))
    report = assay.evaluate(
        "mine.py:Mine",
        rubric="r.yaml",
        data="data.jsonl",
        prompt_format="json",
        lm=scripted_lm(answers),
        preflight=False,
    )
    assert report.evaluation.report()["score"] == 0


def test_a_single_failure_does_not_stop_a_job(place: Path) -> None:
    body = (
        "global seen\n        seen = globals().get('seen', 0) + 1\n        if seen == 1:\n"
        "            raise ValueError(1)\n        return found"
    )
    (place / "mine.py").write_text(PROGRAM.format(body=body))
    report = assay.evaluate(
        "mine.py:Mine", rubric="r.yaml", data="data.jsonl", prompt_format="json", lm=scripted_lm(answers)
    )
    assert report.evaluation.report()["failed"] == 0


def test_a_server_that_is_down_stops_after_three_tasks(place: Path) -> None:
    lm = scripted_lm(lambda request: dspy.lm15.ServerError("down"))
    with pytest.raises(ModelError, match="none of the first 3 tasks"):
        assay.evaluate("mine.py:Mine", rubric="r.yaml", data="data.jsonl", lm=lm)
    assert lm.scripted.calls == 3


@pytest.mark.parametrize("job", range(5))
def test_an_unreachable_judge_stops_every_job_before_it_spends(place: Path, job: int) -> None:
    def script(request: Any) -> Any:
        return dspy.lm15.ServerError("down") if "material to judge" in str(request) else answers(request)

    lm = scripted_lm(script)
    with pytest.raises(ModelError, match="judge of 'nice' scored none"):
        jobs(rubric="judged.yaml", lm=lm)[job]()
    assert lm.scripted.calls < 15


def test_a_judge_is_asked_again_after_its_unreadable_answers_stopped_a_preflight(place: Path) -> None:
    """The answers were in the response cache, and failed the same job after the server was mended."""

    def script(readable: bool) -> Any:
        return lambda request: "garbage" if "material to judge" in str(request) and not readable else answers(request)

    def run(readable: bool) -> Any:
        keywords: dict[str, Any] = {"rubric": "judged.yaml", "data": "data.jsonl", "prompt_format": "json"}
        return assay.evaluate("mine.py:Mine", lm=scripted_lm(script(readable), logprobs=True), **keywords)

    with pytest.raises(ModelError, match="judge of 'nice'"):
        run(readable=False)
    assert run(readable=True).evaluation.report()["undecided"] == {}


def test_a_judge_is_tried_even_if_no_run_answered(place: Path) -> None:
    def script(request: Any) -> Any:
        return dspy.lm15.ServerError("down") if "material to judge" in str(request) else "no json"

    with pytest.raises(ModelError, match="judge of 'nice'"):
        assay.evaluate(
            "mine.py:Mine", rubric="judged.yaml", data="data.jsonl", prompt_format="json", lm=scripted_lm(script)
        )


def test_preflight_calls_are_not_paid_twice(place: Path) -> None:
    def spent(**options: Any) -> tuple[int, Any]:
        lm = scripted_lm(answers, logprobs=True)
        report = assay.evaluate(
            "mine.py:Mine", rubric="judged.yaml", data="data.jsonl", prompt_format="json", lm=lm, cache=False, **options
        )
        return lm.scripted.calls, report

    plain, checked = spent(preflight=False), spent()
    assert plain[0] == checked[0] == checked[1].calls
    with Store(".assay/assay.db") as store:
        phases = [rollout.phase for rollout in store.rollouts()]
    assert phases.count("preflight") == 2  # the program's call and the judge's
    assert checked[1].evaluation.scores == plain[1].evaluation.scores


@pytest.mark.slow
def test_rollouts_of_preflight_are_in_the_store_and_in_no_export(place: Path) -> None:
    assay.collect(
        "mine.py:Mine", rubric="r.yaml", data="data.jsonl", prompt_format="json", n=1, lm=scripted_lm(answers)
    )
    with Store() as store:
        phases = [rollout.phase for rollout in store.rollouts()]
    assert phases.count("preflight") == 1
    report = assay.export("transitions", "out", gates=Gates(min_clean=0))
    assert report.rows == phases.count("collect")


@pytest.mark.parametrize("job", range(5))
def test_a_cap_on_dollars_needs_a_price(place: Path, job: int) -> None:
    with pytest.raises(ConfigError, match=r"max_cost_usd=1 cannot be kept: no price is known for openai/local-model"):
        jobs(model="openai/local-model", api_base="http://127.0.0.1:9/v1", max_cost_usd=1.0)[job]()


def test_a_price_missing_from_the_engine_is_reported_after_the_first_run(place: Path) -> None:
    lm = scripted_lm(answers, price_usd=None)
    with pytest.raises(ConfigError, match="no price is known for scripted/model"):
        assay.evaluate(
            "mine.py:Mine", rubric="r.yaml", data="data.jsonl", prompt_format="json", lm=lm, max_cost_usd=1.0
        )
    assert lm.scripted.calls == 1


@pytest.mark.slow
def test_the_command_exits_with_1_and_prints_the_traceback(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    (place / "mine.py").write_text(PROGRAM.format(body=ALWAYS))
    command = ["compile", "mine.py:Mine", "--rubric", "r.yaml", "--data", "data.jsonl", "--json"]
    with served(ScriptedUpstream().app()) as url:
        ended = assay_command(*command, "--model", "openai/m", "--api-base", f"{url}/v1")
    assert (ended.code, ended.stdout) == (1, "")
    assert "mine.py:14" in ended.stderr
    assert "Traceback" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["score", "drift"])
def test_judge_score_and_drift_stop_before_their_items_if_no_model_answers(place: Path, command: str) -> None:
    """Each of the items would have waited for the server by itself."""
    (place / "rows.jsonl").write_text("".join(json.dumps({"input": str(n), "output": "b"}) + "\n" for n in range(30)))
    more = {
        "score": ["--data", "rows.jsonl", "--json"],
        "drift": ["--anchors", "frozen.json", "--freeze", "rows.jsonl"],
    }[command]
    with socket.socket() as taken_socket:  # bound and not listening
        taken_socket.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken_socket.getsockname()[1]}/v1"
        judge = ["Is it kind?", "--model", "openai/gone", "--api-base", address]
        done = assay_command("judge", command, *judge, *more, "--store", "s.db")
    text = " ".join(done.stderr.split())
    assert done.code == 1, text
    assert "openai/gone did not answer the judge 'Is it kind?': [openai/gone] failed to connect" in text
    assert "(--model, --api-key-env, --api-base); --no-preflight skips this check" in text
    with Store(place / "s.db") as store:
        assert {rollout.phase for rollout in store.rollouts()} == {"preflight"}


def test_the_preflight_of_judge_score_costs_no_extra_call(place: Path) -> None:
    (place / "rows.jsonl").write_text("".join(json.dumps({"input": str(n), "output": "b"}) + "\n" for n in range(6)))
    rows = []
    for name, preflight in (("with", True), ("without", False)):
        (place / name).mkdir()
        lm = scripted_lm(lambda _: {"yes": 0.9, "no": 0.1}, logprobs=True)
        rows.append(
            score_rows(
                "Is it kind?", data=str(place / "rows.jsonl"), lm=lm, store=place / name / "s.db", preflight=preflight
            )
        )
    assert [entry.calls for entry in rows] == [6, 6]
    assert rows[0].mean == rows[1].mean
