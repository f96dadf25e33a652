"""Runs on the hosts of a real Ray cluster of two nodes, against runs in threads."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.commands.compile import Compile
from assay.errors import ConfigError, FailureKind, ModelError
from assay.evaluation import SilentProgress, evaluate
from assay.jobs.arguments import program_settings
from assay.jobs.job import open_job
from assay.rubrics import ScoreResult
from assay.rubrics.scoring import mean_result
from assay.testing import scripted_lm
from assay.traces import Store, Verdict

ray = pytest.importorskip("ray")

RUBRIC = (
    "name: said\ncriteria:\n- {name: something, check: assay.rubrics.checks:numeric, with: {field: answer}}\n"
    "- {name: mine, check: 'check.py:short', weight: 0.1}\n"
    "- {name: polite, judge: 'Is the output polite?', weight: 0.5}\n"
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    ray.init(address=made.address, log_to_driver=False, logging_level="error")
    yield made
    ray.shutdown()
    made.shutdown()


def write_rows(folder: Path, rows: list[dict[str, str]]) -> None:
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_echoes(folder: Path) -> None:
    """Four tasks whose answer is the question, and a rubric."""
    write_rows(folder, [{"id": str(at), "question": str(at), "answer": str(at), "split": "val"} for at in range(4)])
    (folder / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")


@pytest.fixture
def local_settings(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "r.yaml").write_text(RUBRIC)
    (tmp_path / "check.py").write_text(
        "def short(task, prediction, rollout):\n    return len(prediction['answer']) < 3\n"
    )
    rows = [{"id": str(at), "question": f"What is {at} + 1?", "answer": str(at + 1)} for at in range(40)]
    write_rows(tmp_path, rows)
    files = {"rubric": str(tmp_path / "r.yaml"), "data": str(tmp_path / "d.jsonl")}
    return {**files, "store": tmp_path / "t.db", "parameters": {"temperature": 0.1}}


@pytest.mark.slow
def test_ray_results_equal_thread_results(
    server: dict[str, str], cluster: Any, local_settings: dict[str, Any], mine: str, tmp_path: Path
) -> None:
    results = {}
    for where in ("threads", "ray"):
        options = {**local_settings, **server, "store": tmp_path / where / "s.db"}
        report = assay.evaluate(
            mine, split="val", executor=where, cache=False, prompt_format="chat", preflight=False, **options
        )
        with Store(tmp_path / where / "s.db") as store:
            rollouts = [store.rollout(rollout.id) for rollout in store.rollouts()]
        stored = sorted(
            (r.source, r.task_id, r.split, r.phase, r.run_id, r.score or 0, [t.output for t in r.transitions])
            for r in rollouts
        )
        results[where] = (report.evaluation.scores, report.calls, report.tokens, report.unrecorded, stored)
    assert results["ray"] == results["threads"]
    scores = results["ray"][0].values()
    assert len(scores) > 4
    assert len(set(scores)) > 1


@pytest.mark.chaos
@pytest.mark.slow
def test_lost_host_is_tolerated(
    server: dict[str, str], cluster: Any, local_settings: dict[str, Any], mine: str, tmp_path: Path
) -> None:
    rubric, data, store = (local_settings[name] for name in ("rubric", "data", "store"))
    settings = {"executor": "ray", "sizes": {"val": 4}, "prompt_format": "chat", **server}
    config = program_settings(Compile, mine, rubric, data, None, settings)
    with open_job(config, program=mine, rubric=rubric, progress=SilentProgress(), store=store, need=("val",)) as job:
        executor: Any = job.session.executor
        assert len(executor.hosts) == 2
        ray.kill(executor.hosts[0])
        report = evaluate(job.recorded, job.splits.val, job.session)
        assert (len(report), report.unscored, len(executor.hosts)) == (4, 0, 1)
        ray.kill(executor.hosts[0])
        with pytest.raises(ModelError, match=r"hosts were lost|every host of the Ray cluster is gone"):
            evaluate(job.recorded, job.splits.val, job.session)


@pytest.mark.slow
def test_caps_apply_on_a_cluster(server: dict[str, str], cluster: Any, local_settings: dict[str, Any]) -> None:
    report = assay.evaluate("math_qa", split="val", executor="ray", threads=1, max_calls=3, **local_settings, **server)
    assert "cap of 3 calls" in str(report.stopped)
    assert 3 <= report.calls < 40


@pytest.mark.slow
def test_samples_of_a_task_are_averaged(
    server: dict[str, str], local_settings: dict[str, Any], mine: str, tmp_path: Path
) -> None:
    job = {"split": "val", "prompt_format": "chat", "sizes": {"val": 3}, "preflight": False}
    report = assay.evaluate(mine, samples=3, **job, **local_settings, **server)
    result = report.to_dict()["result"]
    assert (result["n"], result["metrics"]["coherence"]) == (3, 1.0)  # this server answers a prompt always alike
    assert result["calls_per_task"] == 1
    with Store(local_settings["store"]) as store:
        samples = Counter(rollout.sample for rollout in store.rollouts() if rollout.source == "program")
    assert samples == {0: 3, 1: 3, 2: 3}
    with pytest.raises(ConfigError, match="samples: must be greater than or equal to 1, not 0"):
        assay.evaluate(mine, samples=0, **local_settings, **server)


def test_mean_result_matches_hand_calculation() -> None:
    verdicts = [Verdict(criterion="a", grade=grade, weight=1.0, scope="final") for grade in (1.0, None, 0.5)]
    results = [
        ScoreResult(value=value, verdicts=(verdict,))
        for value, verdict in zip((1.0, math.nan, 0.5), verdicts, strict=True)
    ]
    mean = mean_result(results)
    assert (mean.value, mean.grades, mean.failed) == (0.75, {"a": 0.75}, None)
    assert mean_result([*results, ScoreResult(value=0.0, failed="it broke")]).value == 0.5
    assert math.isnan(mean_result([results[1], results[1]]).value)
    assert mean_result([ScoreResult(value=0.0, failed=why) for why in ("first", "second")]).failed == "first"


def test_unpicklable_programs_are_refused(local_settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="needs the model by its name"):
        assay.evaluate("math_qa", lm=scripted_lm(lambda request: "x"), executor="ray", **local_settings)


@pytest.mark.chaos
@pytest.mark.slow
def test_cluster_runs_have_the_time_limit_and_cannot_exit_the_host(
    server: dict[str, str], cluster: Any, tmp_path: Path
) -> None:
    (tmp_path / "odd.py").write_text(
        "import sys, time\nimport dspy\n\n\ndef search(topic: str):\n    while True:\n        time.sleep(0.01)\n\n\n"
        "class Odd(dspy.Module):\n"
        "    def forward(self, question):\n        if question == '0':\n            time.sleep(60)\n"
        "        if question == '1':\n            sys.exit(1)\n"
        "        if question == '2':\n            try:\n                dspy.Tool(search)(topic='2')\n"
        "            except TimeoutError:\n                pass\n"
        "        return dspy.Prediction(answer=question)\n"
    )
    write_echoes(tmp_path)
    report = assay.evaluate(
        str(tmp_path / "odd.py:Odd"), rubric=str(tmp_path / "r.yaml"), data=str(tmp_path / "d.jsonl"),
        store=tmp_path / "t.db", executor="ray",
        preflight=False, task_timeout=2.0, **server,
    )  # fmt: skip
    assert dict(sorted(report.evaluation.scores.items())) == {"0": 0.0, "1": 0.0, "2": 1.0, "3": 1.0}
    assert report.evaluation.results["0"].failure is FailureKind.TIMEOUT


PLAIN = """
import functools

class Doubter:
    parameters = None

    def set_parameters(self, parameters):
        self.parameters = parameters

    def execute(self, inputs):
        return said(inputs["question"], self.parameters is not None)

def said(question, sure):
    return question if sure else "?"

def marked(function):
    @functools.wraps(function)
    def called(question):
        return function(question)
    return called

@marked
def decorated(question):
    return {"answer": said(question, True)}
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decorated", "Doubter"])
def test_file_function_or_agent_runs_on_a_cluster_with_its_neighbours(
    server: dict[str, str], cluster: Any, tmp_path: Path, name: str
) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    write_echoes(tmp_path)
    report = assay.evaluate(
        f"{tmp_path / 'plain.py'}:{name}", rubric=str(tmp_path / "r.yaml"), data=str(tmp_path / "d.jsonl"),
        store=tmp_path / "t.db", executor="ray",
        preflight=False, **server,
    )  # fmt: skip
    assert list(report.evaluation.scores.values()) == [1.0] * 4
