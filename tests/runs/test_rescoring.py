"""Scoring of stored rollouts: one trial call per judge first, then several rollouts in parallel, in stored order."""

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from assay.cli.main import group, names_of
from assay.commands.scoring import score_rollouts
from assay.errors import ConfigError, ModelError, RubricError
from assay.runs.loading import load_rubric
from assay.runs.rescoring import threads_for
from assay.traces import Rollout, Store


class Judging(ThreadingHTTPServer):
    """An OpenAI-compatible server that answers `yes` after a delay. Counts requests and concurrent requests."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.delay_s, self.lock = delay_s, threading.Lock()
        self.calls = self.now = self.most = 0
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Judging

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            self.server.calls += 1
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        time.sleep(self.server.delay_s)
        with self.server.lock:
            self.server.now -= 1
        message = {"role": "assistant", "content": json.dumps({"verdict": "yes"})}
        body = {
            "id": "a",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }
        data = json.dumps({**body, "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def judging() -> Iterator[Judging]:
    server = Judging(0.2)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def refusing() -> Iterator[str]:
    """An address without a listening server."""
    with socket.socket() as taken_socket:  # bound and not listening
        taken_socket.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken_socket.getsockname()[1]}/v1"


@pytest.fixture(autouse=True)
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve rollouts, the newest first: r11, r10, …"""
    monkeypatch.chdir(tmp_path)
    Path("kind.yaml").write_text("name: kind\ncriteria:\n- {name: kind, judge: 'Is it kind?'}\n")
    Path("checks.py").write_text("def yes(task, prediction, rollout):\n    return 1.0\n")
    Path("checked.yaml").write_text("name: checked\ncriteria:\n- {name: yes, check: 'checks.py:yes'}\n")
    with Store("s.db") as store:
        for n in range(12):
            inputs, started = {"question": str(n)}, float(n)
            store.put_rollout(
                Rollout(
                    id=f"r{n:02}", inputs=inputs, prediction={"answer": f"yes {n}"}, status="done", started_at=started
                )
            )


def scores() -> dict[str, float | None]:
    with Store("s.db") as store:
        return {rollout.id: rollout.score for rollout in store.rollouts()}


@pytest.mark.timeout(120)
def test_failing_judge_stops_scoring_at_once_and_names_the_flag(refusing: str) -> None:
    with pytest.raises(
        ModelError,
        match=r"judge 'Is it kind\?' \(openai/gone\): .*failed to connect.*preflight=False skips this check",
    ) as caught:
        score_rollouts(rubric="kind.yaml", store="s.db", judge_model="openai/gone", judge_api_base=refusing)
    assert "--no-preflight" in caught.value.text(names_of(["traces", "score"]))
    assert set(scores().values()) == {None}
    judge = ["--judge-model", "openai/gone", "--judge-api-base", refusing]
    done = CliRunner().invoke(group, ["traces", "score", "--rubric", "kind.yaml", "--store", "s.db", *judge])
    assert isinstance(done.exception, ModelError)


def test_preflight_skips_criteria_that_are_not_scored(judging: Judging) -> None:
    report = score_rollouts(
        rubric="kind.yaml", store="s.db", judge_model="openai/m", judge_api_base=judging.url
    ).to_dict()
    assert (report["scored"], report["mean"], report["coverage"]) == (12, 1.0, 1.0)
    assert judging.calls == 13, "once with token probabilities, which this server has none of"


def test_preflight_uses_the_first_rollout_with_an_answer(judging: Judging) -> None:
    with Store("s.db") as store:
        for n in range(12, 17):
            store.put_rollout(
                Rollout(
                    id=f"r{n:02}",
                    inputs={"question": str(n)},
                    status="failed",
                    error="ValueError: x",
                    started_at=float(n),
                )
            )
    report = score_rollouts(
        rubric="kind.yaml", store="s.db", judge_model="openai/m", judge_api_base=judging.url
    ).to_dict()
    assert (report["scored"], judging.calls) == (17, 13)


@pytest.mark.slow
def test_rollouts_are_scored_on_as_many_threads_as_the_engine_supports(judging: Judging) -> None:
    judging.delay_s = 1.5
    score_rollouts(rubric="kind.yaml", store="s.db", judge_model="openai/m", judge_api_base=judging.url)
    assert judging.most == 8
    judging.most = 0
    judge = ["--judge-model", "openai/m", "--judge-api-base", judging.url]
    done = CliRunner().invoke(
        group, ["traces", "score", "--rubric", "kind.yaml", "--store", "s.db", "--again", "--threads", "3", *judge]
    )
    assert done.exit_code == 0, done.output
    assert judging.most == 3


def test_code_checks_run_serially_and_zero_threads_are_refused() -> None:
    assert threads_for(load_rubric("checked.yaml")) == 1
    with pytest.raises(ConfigError, match="threads: must be greater than or equal to 1"):
        score_rollouts(rubric="checked.yaml", store="s.db", threads=0)


def test_scores_are_written_in_rollout_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    report = score_rollouts(rubric="checked.yaml", store="s.db", threads=6).to_dict()
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
        score_rollouts(rubric="checked.yaml", store="s.db", threads=2)
    assert signal.getsignal(signal.SIGINT) is before
    result = scores()
    assert (result["r11"], result["r10"], result["r09"]) == (1.0, 1.0, None)
    assert result["r08"] == 1.0, "another thread had scored it"


def test_scores_of_another_rubric_are_named_with_the_replace_flag() -> None:
    first = score_rollouts(rubric="checked.yaml", store="s.db").to_dict()
    Path("other.yaml").write_text("name: other\ncriteria:\n- {name: yes, check: 'checks.py:yes'}\n")
    report = score_rollouts(rubric="other.yaml", store="s.db").to_dict()
    assert (report["skipped"], report["skipped_of_other_rubrics"]) == (12, {first["rubric"]: 12})
    done = CliRunner().invoke(group, ["traces", "score", "--rubric", "other.yaml", "--store", "s.db"])
    assert (
        f"existing scores of other rubrics than {report['rubric']}: 12 of {first['rubric']}. --again replaces them"
        in done.stdout
    )
    same = CliRunner().invoke(group, ["traces", "score", "--rubric", "checked.yaml", "--store", "s.db"])
    assert "other rubrics" not in same.stdout
    assert score_rollouts(rubric="other.yaml", store="s.db", again=True).to_dict()["skipped_of_other_rubrics"] == {}


def test_a_check_that_needs_expected_outputs_which_no_rollout_has_is_named_before_judges_are_paid(
    judging: Judging,
) -> None:
    Path("both.yaml").write_text(
        "name: both\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:exact'}\n"
        "- {name: kind, judge: 'Is it kind?'}\n"
    )
    judge = {"judge_model": "openai/m", "judge_api_base": judging.url}
    with Store("bare.db") as store:
        for answer in ("7", "8"):
            store.put_rollout(Rollout(status="done", inputs={"question": "q"}, prediction={"answer": answer}))
    with pytest.raises(RubricError, match="needs the expected output 'answer', and no rollout has expected outputs"):
        score_rollouts(rubric="both.yaml", store="bare.db", **judge)
    assert judging.calls == 0
    with Store("bare.db") as store:
        expected = {"answer": "7"}
        store.put_rollout(Rollout(status="done", inputs={"question": "q"}, expected=expected, prediction=expected))
    assert score_rollouts(rubric="both.yaml", store="bare.db", **judge).scored == 1
