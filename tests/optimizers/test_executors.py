"""Runs on the hosts of a real Ray cluster of two nodes, against runs in threads.

The second node does not see the folder `hidden`."""

import json
import math
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.commands.compile import Compile
from assay.deployment.artifact import save_artifact
from assay.errors import ConfigError, FailureKind
from assay.evaluation import SilentProgress, evaluate
from assay.evaluation.executors import pickled
from assay.jobs.arguments import program_settings
from assay.jobs.hosts import Consignment
from assay.jobs.job import open_job
from assay.programs import load_program
from assay.rubrics import ScoreResult, load_rubric
from assay.rubrics.scoring import mean_result
from assay.sources.files import SourceFiles
from assay.sources.shipping import Delivery, not_sent, shipment
from assay.testing import scripted_lm
from assay.traces import Store, Verdict
from rigs.command_line import assay_command
from rigs.ray_cluster import Node, can_hide, two_nodes

ray = pytest.importorskip("ray")

RUBRIC = (
    "name: said\ncriteria:\n- {name: something, check: assay.rubrics.checks:numeric, with: {field: answer}}\n"
    "- {name: mine, check: 'check.py:short', weight: 0.1}\n"
    "- {name: polite, judge: 'Is the output polite?', weight: 0.5}\n"
)


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hidden")


@pytest.fixture(scope="module")
def cluster(hidden: Path) -> Iterator[Any]:
    with two_nodes(hidden) as (made, _):
        yield made


@pytest.fixture
def project(hidden: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the second node does not see; the working directory."""
    folder = hidden / re.sub(r"\W", "-", request.node.name)
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


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
    flags = [part for name, value in server.items() for part in (f"--{name.replace('_', '-')}", value)]
    files = ["--rubric", local_settings["rubric"], "--data", local_settings["data"], "--store", str(tmp_path / "c.db")]
    typed = assay_command(
        "evaluate", mine, *files, *flags, "--size", "5", "--executor", "ray", "--no-preflight", "--json"
    )
    assert (typed.code, typed.report["tasks"]) == (0, 5), typed.stderr
    scores = results["ray"][0].values()
    assert len(scores) > 4
    assert len(set(scores)) > 1


@pytest.mark.chaos
@pytest.mark.slow
def test_a_killed_process_is_replaced_and_a_killed_node_is_left_out(
    server: dict[str, str], cluster: Any, local_settings: dict[str, Any], mine: str, hidden: Path
) -> None:
    rubric, data, store = (local_settings[name] for name in ("rubric", "data", "store"))
    settings = {"executor": "ray", "sizes": {"val": 4}, "prompt_format": "chat", **server}
    config = program_settings(Compile, mine, rubric, data, None, settings)
    third = Node(cluster.address, hidden)
    try:
        with open_job(
            config, program=mine, rubric=rubric, progress=SilentProgress(), store=store, need=("val",)
        ) as job:
            executor: Any = job.session.executor
            assert len(executor.hosts) == 3
            ray.kill(executor.hosts[0].actor)
            report = evaluate(job.recorded, job.splits.val, job.session)
            assert (len(report), report.unscored, len(executor.hosts)) == (4, 0, 3)
            third.kill()
            report = evaluate(job.recorded, job.splits.val, job.session)
            assert (len(report), report.unscored, len(executor.hosts)) == (4, 0, 2)
            assert third.id not in {process.node["NodeID"] for process in executor.hosts}
    finally:
        third.close()


FILES = {
    "programs/helper.py": "ONE = '1'",
    "programs/late.py": "TWO = '2'",
    "programs/pack/module.py": "from . import inner\nTHREE = inner.THREE",
    "programs/pack/inner.py": "THREE = '3'",
    "programs/four.txt": "4",
    "five.txt": "5",
    "programs/parts.py": """
import threading
from pathlib import Path
import dspy
import helper
from pack import module

class Parts(dspy.Module):
    def __init__(self):
        super().__init__()
        self.client = threading.RLock()  # cannot be sent
        self.file = Path(__file__).parent / "four.txt"

    def forward(self, question):
        import late
        parts = helper.ONE, late.TWO, module.THREE, self.file.read_text(), open("five.txt").read()
        return dspy.Prediction(answer="".join(parts), place=__file__)
""",
    "measure/check.py": "import words\ndef complete(task, prediction, rollout):\n"
    "    return prediction['answer'] == words.ALL and 0.5\n",
    "measure/words.py": "ALL = '12345'",
    "measure/judge.yaml": "text: Is the output polite?\nscale: ['no', 'yes']\n",
    "measure/r.yaml": "name: r\ncriteria:\n- {name: complete, check: 'check.py:complete'}\n"
    "- {name: polite, judge: {use: judge.yaml}}\n",
}


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.slow
def test_a_program_its_checks_and_judges_are_sent_as_folders(
    server: dict[str, str], cluster: Any, project: Path, tmp_path: Path
) -> None:
    write_files(project, FILES)
    write_echoes(project)
    (project / "five.txt").rename(project / "programs" / "five.txt")  # an artifact has it from there
    settings = {"adapter": None, "parameters": {}}
    manifest = {"program": "programs/parts.py:Parts", "model": "openai/m", "settings": settings}
    made = save_artifact(project / "made", load_program("programs/parts.py:Parts"), manifest, splits={}, report="")
    (project / "programs" / "five.txt").rename(project / "five.txt")
    scores, places = {}, {}
    for program, where in (("programs/parts.py:Parts", "threads"), ("programs/parts.py:Parts", "ray"), (made, "ray")):
        store = tmp_path / f"{len(scores)}.db"
        report = assay.evaluate(
            str(program), rubric="measure/r.yaml", data="d.jsonl", split="val", store=store, executor=where,
            preflight=False, threads=1, **server,
        )  # fmt: skip
        scores[program, where] = report.evaluation.scores
        with Store(store) as opened:
            rollouts = [rollout for rollout in opened.rollouts() if rollout.source == "program"]
            places[program, where] = {rollout.prediction["place"] for rollout in rollouts if rollout.prediction}
    expected = scores.pop(("programs/parts.py:Parts", "threads"))
    assert expected == pytest.approx(dict.fromkeys("0123", 0.75), abs=0.01)  # complete 0.5, polite 0.99
    for case, measured in scores.items():
        assert measured == expected
        assert len(places[case]) == 2  # a folder on each host
        assert not any(Path(place).is_relative_to(project) for place in places[case])
        assert not any(Path(place).exists() for place in places[case])  # it was removed at the end


def test_files_that_differ_or_are_too_large_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    sources = SourceFiles(origins={tmp_path / "a.txt": b"a"}, outside={tmp_path / "b.txt": str(tmp_path / "b.txt")})
    sent = shipment(sources, [])
    assert sent.differences(sent.hashes) == []
    (tmp_path / "b.txt").write_text("b")
    sent = shipment(sources, [])
    seen = {**sent.hashes, str(tmp_path / "a.txt"): "0", str(tmp_path / "b.txt"): ""}
    named = [f"{tmp_path / 'a.txt'} is another one there", f"{tmp_path / 'b.txt'} is missing there"]
    assert sent.differences(seen) == named
    sources.origins[tmp_path / "big.bin"] = bytes(201_000_000)
    with pytest.raises(ConfigError, match=r"201 MB together.*big\.bin \(201\.0 MB\)"):
        shipment(sources, [])


READS = """
import os
from pathlib import Path
import dspy

HERE = Path(__file__).parent

class Reads(dspy.Module):
    def forward(self, question):
        found = [open(name).read() if os.path.exists(name) else "?" for name in ("password_policy.txt", ".env")]
        opened = os.open(HERE / "facts" / "a.txt", os.O_RDONLY)
        found += [os.read(opened, 9).decode(), *sorted(path.name for path in (HERE / "faq").iterdir())]
        os.close(opened)
        if question == "late":
            os.access(HERE / ("." + "late.txt"), os.R_OK)
        return dspy.Prediction(answer=" ".join(found))
"""
ON_A_HOST = """
import json, pickle, sys
from assay.programs import load_program
from assay.sources.shipping import Delivery
sent, delivery, answers = pickle.load(open(sys.argv[1], "rb")), Delivery(), []
delivery.unpack(sent)
different = sent.differences(delivery.seen(sent))
if not different:
    program = load_program("reads.py:Reads")
    answers = [program(question=question).answer for question in ("x", "late")]
print(json.dumps([different, answers, delivery.missed()]))
delivery.remove()
"""


def test_private_files_are_never_sent_and_never_missing_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    private = {"password_policy.txt": "policy", ".env": "A=b", ".late.txt": "late"}
    listed = {"faq/1.txt": "1", "faq/secrets.txt": "2", "faq/.hidden": "3", "facts/a.txt": "fact"}
    write_files(project, {"reads.py": READS, **private, **listed})
    monkeypatch.chdir(project)
    program, sources = load_program("reads.py:Reads"), SourceFiles()
    sources.add("reads.py:Reads", type(program).__module__, "Reads")
    sent = shipment(sources, [])
    assert {Path(path).name for path in sent.files} == {"reads.py", "1.txt", "a.txt"}
    assert {Path(path).name for path in sent.private} == {"password_policy.txt", ".env"}
    assert {path.name for path in sources.left_out} == {"secrets.txt", ".hidden"}
    (tmp_path / "sent").write_bytes(pickle.dumps(sent))

    def on_a_host() -> Any:
        command = [sys.executable, "-c", ON_A_HOST, str(tmp_path / "sent")]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout.splitlines()[-1])

    (project / ".late.txt").rename(tmp_path / "late")
    different, answers, missed = on_a_host()  # it has the private files itself
    assert (different, answers) == ([], ["policy A=b fact 1.txt"] * 2)
    (tmp_path / "late").rename(project / ".late.txt")
    assert not_sent(missed, [str(tmp_path / "other")]) is None  # a library looks for its settings
    assert str(not_sent(missed, [str(project)])).startswith(
        f"{project / '.late.txt'}, which is not sent because hidden"
    )
    (project / ".env").write_text("A=c")
    (project / "password_policy.txt").unlink()
    different, answers, _ = on_a_host()
    assert [text.partition(". List")[0] for text in sorted(different)] == [
        f"{project / '.env'} is another one there; it is not sent because hidden files are not copied",
        f"{project / 'password_policy.txt'} is missing there; it is not sent because its name suggests a secret",
    ]


LINKED = """
import runpy
from pathlib import Path
import dspy
import helper

HERE = Path(__file__).parent
LARGE, SAMPLES = "large.bin", ["broken.py", "old.py"]

class Reads(dspy.Module):
    def forward(self, question):
        started = runpy.run_path(str(HERE / "started.py"))
        return dspy.Prediction(answer=helper.ONE + started["TWO"] + (HERE / "three.txt").read_text())
"""


def test_links_and_modules_that_are_run_by_their_path_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "project"
    modules = {"real/reads.py": LINKED, "real/helper.py": "ONE = '1'", "real/started.py": "TWO = '2'"}
    write_files(project, {**modules, "data/three.txt": "3", "real/large.bin": "", "real/broken.py": "def"})
    (project / "real" / "old.py").write_bytes(b"# \xe9")
    (project / "reads.py").symlink_to("real/reads.py")
    (project / "real" / "three.txt").symlink_to("../data/three.txt")
    os.truncate(project / "real" / "large.bin", 51_000_000)
    monkeypatch.chdir(project)
    program, sources = load_program("reads.py:Reads"), SourceFiles()
    sources.add("reads.py:Reads", type(program).__module__, "Reads")
    sent = shipment(sources, [])
    assert {Path(path).name for path in sent.elsewhere} == {"large.bin"}  # too large: hosts must have it
    sent.elsewhere = {}
    (tmp_path / "sent").write_bytes(pickle.dumps(sent))
    project.rename(tmp_path / "out of sight")
    command = [sys.executable, "-c", ON_A_HOST, str(tmp_path / "sent")]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1])[:2] == [[], ["123", "123"]]


def test_addresses_of_providers_are_compared_and_not_sent(
    tmp_path: Path, local_settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.endswith(("_API_BASE", "_BASE_URL", "_API_KEY"))]:
        monkeypatch.delenv(name)
    address = "https://models.example/v1"
    given = {"GOOGLE_API_KEY": "g", "GROQ_API_BASE": address, "OPENAI_API_KEY": "o", "OPENAI_BASE_URL": address}
    for name, value in {**given, "APP_BASE_URL": "https://app.example"}.items():
        monkeypatch.setenv(name, value)
    program = dspy.Predict("question -> answer")
    program.lm = dspy.LM("gemini/x")
    config = program_settings(
        Compile, program, local_settings["rubric"], local_settings["data"], None, {"model": "a/b"}
    )
    sent = Consignment(
        config, load_rubric(local_settings["rubric"]), program, "p", is_object=True, artifact=None, say=print
    )
    shipped = sent.shipment([])
    assert shipped.variables == ["GOOGLE_API_KEY"]  # of the program's own model; `a` has no key here
    providers = ("A", "GEMINI")
    of_models = {f"{provider}_{end}" for provider in providers for end in ("API_BASE", "BASE_URL")}
    assert set(shipped.addresses) == {*of_models, "GROQ_API_BASE", "OPENAI_BASE_URL"}
    assert address.encode() not in pickle.dumps(shipped)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    delivery, before = Delivery(), Path.cwd()
    assert shipped.differences(delivery.seen(shipped)) == []
    monkeypatch.delenv("GROQ_API_BASE")
    monkeypatch.setenv("A_API_BASE", address)
    monkeypatch.setenv("OPENAI_BASE_URL", "https://other.example/v1")
    assert sorted(shipped.differences(delivery.seen(shipped))) == [
        "A_API_BASE is missing here and not there",
        "GROQ_API_BASE is missing there",
        "OPENAI_BASE_URL is another one there",
    ]
    delivery.remove()
    monkeypatch.chdir(before)


def test_folders_of_killed_processes_are_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = tmp_path / "assay-host-1"
    killed.mkdir()
    (tmp_path / "assay-host-1.lock").touch()
    first, second = Delivery(), Delivery()
    assert not killed.exists()
    assert first.home.is_dir()
    assert second.home.is_dir()
    before = Path.cwd()
    for delivery in (first, second):
        delivery.remove()
    monkeypatch.chdir(before)
    assert list(tmp_path.iterdir()) == []


def test_modules_that_are_sent_by_reference_are_named() -> None:
    _, named = pickled([lambda: json.dumps(math.pi), mean_result], "x", ray)
    assert {("json", ""), ("math", ""), ("assay.rubrics.scoring", "mean_result")} <= named


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import os\nif '/assay-' in __file__:\n    raise OSError('no display')\n", r"odd\.py.*OSError: no display"),
        ("open('{hidden}/elsewhere.txt').read()\n", r"does not see.*elsewhere\.txt is missing there"),
        ("", r"looked for .*\d\.txt, which was not sent: put it into the program's folder"),
    ],
    ids=["import", "elsewhere", "computed"],
)
def test_what_a_host_lacks_is_an_error_before_it_is_a_score(
    server: dict[str, str], cluster: Any, project: Path, hidden: Path, tmp_path: Path, text: str, why: str
) -> None:
    if "{hidden}" in text and not can_hide():
        pytest.skip("this system has no mounts in a namespace of the user's")
    (hidden / "elsewhere.txt").write_text("x")
    write_files(project, {f"{at}.txt": str(at) for at in range(4)})
    (project / "odd.py").write_text(
        f"import os\nimport dspy\n{text.replace('{hidden}', str(hidden))}\nclass Odd(dspy.Module):\n"
        "    def forward(self, question):\n        name = question + '.txt'\n"
        "        return dspy.Prediction(answer=open(name).read() if os.path.exists(name) else '?')\n"
    )
    write_echoes(project)
    with pytest.raises(ConfigError, match=f"host.* of the Ray cluster.*{why}"):
        assay.evaluate(
            "odd.py:Odd", rubric="r.yaml", data="d.jsonl", split="val", store=tmp_path / "s.db", executor="ray",
            preflight=False, **server,
        )  # fmt: skip
    with Store(tmp_path / "s.db") as store:
        assert {rollout.status for rollout in store.rollouts()} <= {"error"}


@pytest.mark.slow
def test_keys_and_objects_that_hosts_cannot_have_are_named(
    server: dict[str, str], cluster: Any, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_echoes(project)
    monkeypatch.setenv("MY_KEY", "none")
    job = {"rubric": "r.yaml", "data": "d.jsonl", "executor": "ray", "preflight": False, **server}
    with pytest.raises(ConfigError, match=r"host .* lacks the environment variable MY_KEY"):
        assay.evaluate("math_qa", store=tmp_path / "a.db", api_key_env="MY_KEY", **job)
    program = dspy.Predict("question -> answer")
    program.lock = threading.RLock()
    with pytest.raises(ConfigError, match=r"the program has an object that cannot be sent .*RLock"):
        assay.evaluate(program, store=tmp_path / "b.db", **job)


@pytest.mark.chaos
@pytest.mark.slow
def test_a_task_that_ends_its_process_on_a_host_is_its_own_failure(
    server: dict[str, str], cluster: Any, project: Path, tmp_path: Path
) -> None:
    write_echoes(project)
    (project / "exits.py").write_text(
        "import os, time\nimport dspy\nclass Exits(dspy.Module):\n    def forward(self, question):\n"
        "        time.sleep(0.5)\n        if question == '1':\n            os._exit(7)\n"
        "        return dspy.Prediction(answer=question)\n"
    )
    for samples in (1, 2):  # the second sample does not run it again
        report = assay.evaluate(
            "exits.py:Exits", rubric="r.yaml", data="d.jsonl", store=tmp_path / f"{samples}.db", executor="ray",
            split="val", preflight=False, samples=samples, **server,
        )  # fmt: skip
        assert report.evaluation.scores == {"0": 1.0, "1": 0.0, "2": 1.0, "3": 1.0}
        assert report.evaluation.results["1"].failure is FailureKind.AGENT
        assert "the process that ran the task ended twice" in str(report.evaluation.results["1"].failed)


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
