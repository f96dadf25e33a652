"""Scoring of stored rollouts: one trial call per judge first, then several rollouts in parallel, in stored order."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from assay.cli import names_of
from assay.commands.scoring import score_rollouts
from assay.errors import ModelError, RubricError
from assay.jobs.loading import load_rubric
from assay.jobs.rescoring import threads_for
from assay.traces import Rollout, Store
from rigs.command_line import Done, assay_command
from rigs.projects import EXACT
from rigs.serving import ChatServer, refusing


@pytest.fixture
def judging() -> Iterator[ChatServer]:
    with ChatServer(lambda body: json.dumps({"verdict": "yes"})).serving() as server:
        server.delay_s = 0.2
        yield server


def scored(rubric: str, judge: str | None = None, **options: Any) -> Any:
    named = {} if judge is None else {"judge_model": "openai/m", "judge_api_base": judge}
    return score_rollouts(rubric=rubric, **{"store": "s.db", **named, **options})


def score_command(rubric: str, *flags: str) -> Done:
    return assay_command("traces", "score", "--rubric", rubric, "--store", "s.db", *flags)


@pytest.fixture(autouse=True)
def stored(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve rollouts, the newest first: r11, r10, …"""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    Path("kind.yaml").write_text("name: kind\ncriteria:\n- {name: kind, judge: 'Is it kind?'}\n")
    Path("checks.py").write_text("def yes(task, prediction, rollout):\n    return 1.0\n")
    Path("checked.yaml").write_text("name: checked\ncriteria:\n- {name: yes, check: 'checks.py:yes'}\n")
    put(range(12), status="done", prediction={"answer": "yes"})


def put(numbers: range, **fields: Any) -> None:
    with Store("s.db") as store:
        for n in numbers:
            store.put_rollout(Rollout(id=f"r{n:02}", inputs={"question": str(n)}, started_at=float(n), **fields))


def scores() -> dict[str, float | None]:
    with Store("s.db") as store:
        return {rollout.id: rollout.score for rollout in store.rollouts()}


@pytest.mark.timeout(120)
def test_failing_judge_stops_scoring_at_once_and_names_the_flag() -> None:
    message = r"judge 'Is it kind\?' \(openai/m\): .*failed to connect.*preflight=False skips this check"
    with refusing() as address:
        with pytest.raises(ModelError, match=message) as caught:
            scored("kind.yaml", f"{address}/v1")
        assert "--no-preflight" in caught.value.text(names_of(["traces", "score"]))
        done = score_command("kind.yaml", "--judge-model", "openai/m", "--judge-api-base", f"{address}/v1")
    assert (done.code, set(scores().values())) == (1, {None})


def test_preflight_uses_the_first_rollout_with_an_answer(judging: ChatServer) -> None:
    put(range(12, 17), status="failed", error="ValueError: x")
    report = scored("kind.yaml", judging.url).to_dict()
    assert (report["scored"], report["coverage"]) == (17, 1.0)
    # once with token probabilities, which this server has none of, and failed rollouts are not judged
    assert len(judging.models) == 13


@pytest.mark.slow
def test_rollouts_are_scored_on_as_many_threads_as_the_engine_supports(judging: ChatServer) -> None:
    judging.delay_s = 1.0
    assert scored("kind.yaml", judging.url).to_dict()["mean"] == 1.0
    assert judging.most == 8
    judging.most = 0
    judge = ["--judge-model", "openai/m", "--judge-api-base", judging.url]
    done = score_command("kind.yaml", "--again", "--threads", "3", *judge)
    assert (done.code, judging.most) == (0, 3), done.stderr


def test_code_checks_run_serially_and_scores_are_written_in_rollout_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads_for(load_rubric("checked.yaml")) == 1
    Path("checks.py").write_text(
        "import time\n\ndef yes(task, prediction, rollout):\n    time.sleep(0.02 * int(task.inputs['question']))\n"
        "    return int(task.inputs['question']) / 16\n"
    )
    written: list[str] = []
    original = Store.put_rollout

    def put_and_record(store: Store, rollout: Rollout, **fields: Any) -> None:
        written.append(rollout.id)
        original(store, rollout, **fields)

    monkeypatch.setattr(Store, "put_rollout", put_and_record)
    report = scored("checked.yaml", threads=6).to_dict()
    assert written == [f"r{n:02}" for n in reversed(range(12))]
    assert report["mean"] == sum(range(12)) / 16 / 12
    assert scores() == {f"r{n:02}": n / 16 for n in range(12)}


def test_interrupt_keeps_finished_scores() -> None:
    """The third is never completed; the first two are written, and so is what other threads had completed."""
    Path("checks.py").write_text(
        "import signal, threading, time\n\n"
        "def yes(task, prediction, rollout):\n    if task.inputs['question'] == '9':\n        time.sleep(0.5)\n"
        "        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)\n"
        "        time.sleep(1)\n    return 1.0\n"
    )
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        scored("checked.yaml", threads=2)
    assert signal.getsignal(signal.SIGINT) is before
    result = scores()
    assert (result["r11"], result["r10"], result["r09"]) == (1.0, 1.0, None)
    assert result["r08"] == 1.0, "another thread had scored it"


def test_scores_of_another_rubric_are_named_with_the_replace_flag() -> None:
    first = scored("checked.yaml").to_dict()
    Path("other.yaml").write_text("name: other\ncriteria:\n- {name: yes, check: 'checks.py:yes'}\n")
    report = scored("other.yaml").to_dict()
    assert (report["skipped"], report["skipped_of_other_rubrics"]) == (12, {first["rubric"]: 12})
    others = f"existing scores of other rubrics than {report['rubric']}: 12 of {first['rubric']}. --again replaces them"
    assert others in score_command("other.yaml").stdout
    assert "other rubrics" not in score_command("checked.yaml").stdout
    assert scored("other.yaml", again=True).to_dict()["skipped_of_other_rubrics"] == {}


def test_a_check_that_needs_expected_outputs_which_no_rollout_has_is_named_before_judges_are_paid(
    judging: ChatServer,
) -> None:
    Path("both.yaml").write_text(EXACT + "- {name: kind, judge: 'Is it kind?'}\n")
    with pytest.raises(RubricError, match="needs the expected output 'answer', and no rollout has expected outputs"):
        scored("both.yaml", judging.url)
    assert judging.models == []
    put(range(20, 21), status="done", prediction={"answer": "7"}, expected={"answer": "7"})
    assert scored("both.yaml", judging.url).scored == 1


def test_each_call_of_a_judge_is_stored(judging: ChatServer) -> None:
    report = scored("kind.yaml", judging.url)
    with Store("s.db") as store:
        judged = [store.rollout(rollout.id) for rollout in store.rollouts() if rollout.source == "judge"]
        stats = store.stats()
    assert (report.calls, report.unrecorded) == (len(judging.models), 0)
    assert stats["transitions"] == len(judging.models)
    assert stats["prompt_tokens"] + stats["completion_tokens"] == report.tokens
    assert sorted(str(rollout.inputs["task_input"]) for rollout in judged) == sorted(map(str, range(12)))
    assert all(call.response for rollout in judged for call in rollout.transitions)


def test_two_that_score_at_once_pay_for_each_verdict_once(judging: ChatServer) -> None:
    judging.delay_s = 0.5
    with ThreadPoolExecutor(1) as other:
        second = other.submit(scored, "kind.yaml", judging.url)
        reports = [scored("kind.yaml", judging.url).to_dict(), second.result().to_dict()]
    assert sorted((report["scored"], report["skipped"]) for report in reports) == [(0, 12), (12, 0)]
    assert sum(report["calls"] for report in reports) == len(judging.models) <= 13
