"""Teleprompters as DSPy's users have them: objects, classes and functions of DSPy and of one's own."""

import asyncio
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import adding
import dspy
import numpy as np
import pytest
from adding import ADD, ROWS, Mine, adds

import assay
from assay.errors import AssayError, ConfigError
from assay.testing import scripted_lm
from rigs.command_line import assay_command

SIZES = {"train": 12, "val": 6, "gate": 12, "test": 6}


@pytest.fixture(autouse=True)
def place(own_folder: Path) -> Path:
    adding.write()
    return own_folder


def right(example: Any, prediction: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> float:
    return float(example.answer == prediction.answer)


def compiled(optimizer: Any, **options: Any) -> Any:
    return adding.compiled(optimizer, program=Mine(), **{"data": ROWS, "sizes": SIZES, **options})


def taught(student: Any) -> Any:
    for _, predictor in student.named_predictors():
        predictor.signature = predictor.signature.with_instructions(ADD)
    return student


class Own:
    """A teleprompter without a base class. `action` gets the student and makes what `compile` returns."""

    def __init__(
        self, action: Callable[..., Any] = taught, metric: Any = None, times: int = 1, api_key: str = ""
    ) -> None:
        self.action, self.metric, self.times, self.api_key = action, metric, times, api_key

    def compile(self, student: Any, trainset: Any, valset: Any) -> Any:
        return self.action(student.deepcopy())


def won(report: Any) -> bool:
    data = report.to_dict()
    return bool(data["replaces"]) and data["test"]["compiled"]["score"] == 1.0 and data["failed"] is None


def test_an_object_of_ones_own_is_gated_tested_and_saved() -> None:
    report = compiled(Own(times=3, api_key="sk-not-to-be-seen"))
    data = report.to_dict()
    assert won(report)
    assert "times=3" in data["optimizer"]
    assert "sk-not-to-be-seen" not in json.dumps(data)
    assert assay.load(data["artifact"]).predictors()[0].signature.instructions == ADD


class Positional:
    def compile(self, program: Any, trainset: Any, /) -> Any:
        assert trainset[0].inputs()
        assert trainset[0].answer
        return taught(program)


class Keywords:
    def compile(self, *, student: Any, **data: Any) -> Any:
        assert sorted(data) == ["trainset", "valset"]
        return taught(student)


class Scored:
    def compile(self, student: Any, *, trainset: Any, teacher: Any, metric: Any) -> Any:
        assert metric(trainset[0], dspy.Prediction(answer=trainset[0].answer)) == 1.0
        return taught(teacher.deepcopy())


class Awaited:
    async def compile(self, student: Any, trainset: Any) -> Any:
        await asyncio.gather(*(student.acall(**example.inputs()) for example in trainset[:2]))
        return taught(student)


class InPlace:
    def compile(self, student: Any, trainset: Any) -> None:
        student.answer.signature.instructions = ADD  # in the signature's class


class Threads:
    def compile(self, student: Any, trainset: Any) -> Any:
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda example: student(**example.inputs()), trainset[:4]))
        assert all(answer.answer for answer in answers)
        return taught(student)


class Rebuilt:
    def compile(self, student: Any, trainset: Any) -> Any:
        return taught(Mine())


class OfTheClass:
    def compile(self, student: Any, trainset: Any) -> Any:
        assert isinstance(student, Mine)
        assert "forward" in inspect.getsource(student.__class__)
        fresh = type(student)()
        assert fresh(**trainset[0].inputs()).answer
        return taught(fresh)


class Configures:
    def compile(self, student: Any, trainset: Any) -> Any:
        dspy.configure(lm=dspy.settings.lm, temperature=0.25)
        return taught(student)


class Options:
    def compile(self, student: Any, trainset: Any, **options: Any) -> Any:
        assert options.pop("valset")
        assert options == {"steps": 3}
        return taught(student)


class State:
    def compile(self, student: Any, trainset: Any) -> Any:
        state = student.dump_state()
        assert list(state) == ["answer"]
        state["answer"]["signature"]["instructions"] = ADD
        student.load_state(state)
        return student


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [Positional, Keywords, Scored, Awaited, InPlace, Threads, Rebuilt, State, OfTheClass, Configures]
)
def test_whatever_compile_takes_and_returns_is_served(kind: Any) -> None:
    report = compiled(kind())
    assert won(report), report.to_dict()["notes"]
    assert report.to_dict()["candidates"][0]["val_score"] == 0  # the baseline is not changed
    assert dspy.settings.lm is None
    assert dspy.settings.get("temperature") is None


def test_settings_reach_the_keywords_of_compile() -> None:
    assert won(compiled(Options(), optimizer_settings={"steps": 3}))


def changed_fields(student: Any) -> Any:
    student.answer = dspy.ChainOfThought("question -> answer")
    return student


def own_forward(student: Any) -> Any:
    student.forward = lambda **inputs: dspy.Prediction(answer="1")
    return student


def ending(student: Any) -> Any:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("action", "named"),
    [
        (lambda student: None, "None"),
        (lambda student: (student, 0.5), "tuple"),
        (lambda student: dspy.Predict("question -> answer"), "a Predict and not a Mine"),
        (lambda student: dspy.BestOfN(student, N=2, reward_fn=right, threshold=1.0), "a BestOfN and not a Mine"),
        (lambda student: dspy.Ensemble().compile([student, student]), "EnsembledProgram and not a Mine"),
        (changed_fields, "other predictors or fields"),
        (own_forward, "another forward"),
        (ending, "sys.exit(3)"),
    ],
)
def test_another_structure_is_a_named_failure_and_the_program_is_kept(action: Any, named: str) -> None:
    data = compiled(Own(action), gate=False, test=False).to_dict()
    assert (data["winner"], data["stopped"]) == ("baseline", None)
    assert named in data["failed"]
    assert assay.load(data["artifact"]) is not None


@pytest.mark.slow
def test_batches_of_dspys_optimizers_fit_the_tasks() -> None:
    lm = scripted_lm(adds)
    data = compiled(dspy.SIMBA(metric=right, max_steps=1, num_candidates=1, prompt_model=lm), lm=lm).to_dict()
    assert data["failed"] is None
    assert any("bsize" in note and "12" in note for note in data["notes"])
    options = {"auto": None, "num_candidates": 2, "max_bootstrapped_demos": 0, "max_labeled_demos": 0}
    mipro = dspy.MIPROv2(metric=right, prompt_model=lm, task_model=lm, **options)
    assert compiled(mipro, lm=lm, optimizer_settings={"num_trials": 2}).to_dict()["failed"] is None
    sent = lm.scripted.calls
    with pytest.raises(ConfigError, match="num_trials"):
        compiled(mipro, lm=lm)
    assert lm.scripted.calls == sent


FEW: dict[str, Any] = {"max_labeled_demos": 3, "num_candidate_programs": 2}
NO_DEMOS: dict[str, Any] = {"max_bootstrapped_demos": 0, "max_labeled_demos": 0}
OBJECTS: dict[str, Callable[[Any], Any]] = {
    "GEPA": lambda lm: dspy.GEPA(metric=right, reflection_lm=lm, max_metric_calls=30),
    "MIPROv2": lambda lm: dspy.MIPROv2(metric=None, prompt_model=lm, task_model=lm, auto="light", **NO_DEMOS),
    "SIMBA": lambda lm: dspy.SIMBA(metric=right, bsize=4, num_candidates=2, max_steps=1, prompt_model=lm),
    "COPRO": lambda lm: dspy.COPRO(prompt_model=lm, breadth=2, depth=1),
    "BootstrapFewShotWithOptuna": lambda lm: dspy.BootstrapFewShotWithOptuna(None, **FEW),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTS)  # the others run by name, in test_compile
def test_an_optimizer_of_dspy_runs_as_an_object_and_all_its_calls_are_counted(name: str) -> None:
    lm = scripted_lm(adds)
    data = compiled(OBJECTS[name](lm), lm=lm).to_dict()
    assert data["failed"] is None, data["notes"]
    assert lm.scripted.calls <= data["calls"]  # equal calls of a run are answered once
    assert data["optimizer"].startswith(("dspy:", "dspy."))
    assert name in data["optimizer"]


def examples(*, inputs: bool = True) -> list[dspy.Example]:
    bare = [dspy.Example(**row) for row in ROWS]
    return [example.with_inputs("question") for example in bare] if inputs else bare


def named_splits(rows: Any) -> dict[str, Any]:
    return {"trainset": rows[:10], "valset": rows[10:16], "data": rows[16:40]}


OVERLAPPING = {"trainset": iter(ROWS[:10] + ROWS[:4]), "valset": iter(ROWS[8:16]), "data": iter(ROWS[:40])}
ONE_MAPPING = {"train": ROWS[:10], "validation": ROWS[10:16], "gate": ROWS[16:28], "test": ROWS[28:40]}


@pytest.mark.parametrize(
    "given",
    [
        {**named_splits(examples()), "data": examples()[:40]},
        named_splits(examples(inputs=False)),
        named_splits(ROWS),
        named_splits([assay.datasets.make_task(row) for row in ROWS]),
        OVERLAPPING,
        {"data": ONE_MAPPING},
    ],
    ids=["examples", "without inputs", "mappings", "tasks", "iterators that overlap and repeat", "one mapping"],
)
def test_trainset_and_valset_are_the_splits_and_the_others_come_from_what_is_left(given: dict[str, Any]) -> None:
    report = compiled(Own(), sizes={}, **given)
    stored = json.loads((Path(report.artifact) / "splits.json").read_text())["tasks"]
    splits = {name: set(keys) for name, keys in stored.items()}
    keys = [assay.datasets.make_task(row).key for row in ROWS]
    assert splits["train"] == set(keys[:10])
    assert splits["val"] == set(keys[10:16])
    assert len(splits["gate"]) == len(splits["test"]) == 12
    assert splits["gate"] | splits["test"] == set(keys[16:40])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"trainset": ROWS[:40], "valset": ROWS[40:], "data": ROWS}, r"gate, test.*\b6 rows"),
        ({"data": {"train": ROWS[:9], "val": ROWS[9:20], "test": ROWS[20:]}}, r"for gate:.*\b6 rows"),
        ({"data": {"train": ROWS[:9], "val": ROWS[9:20], "gate": ROWS[:9], "test": ROWS[20:]}}, "gate"),
        ({"trainset": [], "valset": ROWS[9:20], "data": ROWS}, "train is empty"),
        ({"data": {"train": ROWS[:9], "holdout": ROWS[9:]}}, "holdout.*gate"),
        ({"data": {"train": ROWS[:9], "val": ROWS[9:20], "dev": ROWS[20:30]}}, "val is given twice"),
        ({"trainset": ROWS[0], "data": ROWS}, "train is a dict"),
    ],
)
def test_rows_that_leave_a_split_empty_are_an_error_before_any_call(given: Any, named: str) -> None:
    lm = scripted_lm(adds)
    with pytest.raises(AssayError, match=named):
        compiled(Own(), lm=lm, **{"data": None, "sizes": {}, **given})
    assert lm.scripted.calls == 0


def test_the_command_line_takes_splits_as_files(place: Path) -> None:
    for name, rows in (("train", ROWS[:12]), ("val", ROWS[12:18]), ("rest", ROWS[18:])):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["compile", "mine.py:Mine", "--rubric", "r.yaml", "--data", "rest.jsonl", "--model", "openai/none"]
    files = ["--trainset", "train.jsonl", "--valset", "val.jsonl"]
    done = assay_command(*command, *files, "--optimizer", "labeled", "--dry-run")
    assert (done.code, "train 12, val 6, gate 31, test 31" in done.stdout) == (0, True), done


def test_an_optimizer_of_the_project_file_is_relative_to_the_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "sub").mkdir()
    (place / ".git").mkdir()
    (place / "own.py").write_text(FILE)
    (place / "assay.toml").write_text("[compile]\noptimizer = 'own.py:make(times=3)'\n")
    monkeypatch.chdir(place / "sub")
    given = assay.project_settings("compile")["optimizer"]
    assert compiled(given, rubric="../r.yaml", gate=False, test=False).to_dict()["candidates"][1]["val_score"] == 1.0


OF_DSPY = {
    "simba": "SIMBA", "gepa": "GEPA", "mipro": "MIPROv2", "infer-rules": "InferRules", "bootstrap": "BootstrapFewShot",
}  # fmt: skip
CHANGES = {  # of DSPy: which optimizer cannot run, and which part is named
    "delattr(*seam.SIMBA_PROGRAM.place)": ("simba", "simba.wrap_program"),
    "delattr(*seam.GEPA_BATCH.place)": ("gepa", "DspyAdapter.evaluate"),
    "setattr(*seam.GEPA_TEXTS.place, lambda self, texts: texts)": ("gepa", "DspyAdapter.propose_new_texts"),
    "setattr(*seam.MIPRO_CANDIDATE.place, lambda program: 0.0)": ("mipro", "eval_candidate_program"),
    "del dspy.SIMBA": ("simba", "dspy.SIMBA"),
    "del dspy.GEPA": ("gepa", "dspy.GEPA"),
    "del dspy.MIPROv2": ("mipro", "dspy.MIPROv2"),
    "del dspy.InferRules": ("infer-rules", "dspy.InferRules"),
    "del dspy.BootstrapFewShot": ("bootstrap", "dspy.BootstrapFewShot"),
}
MOVED = """
import json, os
import dspy
from assay.models import dspy_seam as seam
import assay
from assay.optimizers import CompileConfig
from assay.optimizers.prompts.dspy_patches import repaired_dspy

for change in {changes!r}:
    if os.fork():  # a part that has moved is looked for once in a process
        os.wait()
        continue
    exec(change)
    with repaired_dspy():
        pass
    answers = []
    for optimizer in {optimizers!r}:
        try:
            CompileConfig(optimizer=optimizer)
            answers.append("")
        except assay.errors.ConfigError as error:
            answers.append(str(error))
    print(json.dumps(answers), flush=True)
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
def test_an_optimizer_whose_part_of_dspy_moved_is_refused_by_name() -> None:
    optimizers = [*OF_DSPY, *(f"dspy:{name}" for name in OF_DSPY.values()), "auto", "labeled", "copro"]
    code = MOVED.format(changes=list(CHANGES), optimizers=optimizers)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("[")]
    for line, (refused, part) in zip(lines, CHANGES.values(), strict=True):
        answers = dict(zip(optimizers, json.loads(line), strict=True))
        assert {name for name, answer in answers.items() if answer} == {refused, f"dspy:{OF_DSPY[refused]}"}, answers
        assert part in answers[refused]
        assert dspy.__version__ in answers[refused]
        assert refused not in answers[refused].rpartition(";")[2].split(", ")


FILE = f"""import dspy

class Taught:
    def __init__(self, metric, times=1):
        self.metric, self.times = metric, times

    def compile(self, student, trainset):
        assert self.metric is not None
        student.answer.signature = student.answer.signature.with_instructions({ADD!r})
        return student

def make(times=1):
    return Taught(None, times)

def broken():
    return 3

def failing():
    raise RuntimeError("no such folder")

def ending():
    raise SystemExit(0)

def needs(path):
    return Taught(None)

def weights():
    return dspy.BootstrapFinetune(metric=None)

def trials():
    return dspy.MIPROv2(metric=print, auto=None, num_candidates=2)

class Needs:
    def __init__(self, path):
        self.path = path

    def compile(self, student, trainset):
        return student

class Judged:
    def compile(self, student, trainset, judge):
        return student

class Static:
    @staticmethod
    def compile(student, *, trainset):
        return Taught("").compile(student, trainset)

ready = Taught(None)
"""


@pytest.mark.parametrize(
    "name", ["make", "make(times=3)", "Taught", "Taught(times=2)", "ready", "needs(path='p')", "Static"]
)
def test_an_optimizer_in_a_file_is_a_class_a_function_or_an_object(place: Path, name: str) -> None:
    (place / "own.py").write_text(FILE)
    report = compiled(f"own.py:{name}", gate=False, test=False)
    data = report.to_dict()
    assert data["candidates"][1]["val_score"] == 1.0
    assert data["optimizer"] == f"own.py:{name}"
    assert report.artifact.name == f"mine-{name.partition('(')[0].lower()}"


NO_OPTIMIZERS = [
    ("own.py:nothing", "nothing"), ("own.py:mak", "'own.py:make'"), ("none.py:make", "none.py"), ("own.py", ""),
    ("mine.py:Mine", "Mine"), ("own.py:broken", "int"), ("own.py:make(1)", "1"), ("json:loads", "'s'"),
    ("own.py:failing", "no such folder"), ("own.py:ending", "SystemExit"), ("own.py:needs", "'path'"),
    ("own.py:Needs", "'path'"), ("own.py:make(size=3)", "'size'"), ("own.py:Judged", "judge"),
    ("own.py:weights", "weights"), ("own.py:trials", "num_trials"), ("raising.py:x", "at import"), ("", ""),
    ("bootstrp", "'bootstrap'"), ("no.module:X", "no.module"), ("dspy:Nothing", "Nothing"),
    (3, ""), (object(), ""), (dspy.Ensemble(), ""), (dspy.BootstrapFinetune(), ""), (dspy.BetterTogether(right), ""),
    (dspy.KNNFewShot(1, examples()[:3], dspy.Embedder(lambda texts: np.ones((len(texts), 1)))), ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "named"), NO_OPTIMIZERS, ids=lambda value: value if isinstance(value, str) else type(value).__name__
)
def test_what_is_no_optimizer_of_prompts_is_refused_before_any_call(place: Path, given: Any, named: str) -> None:
    (place / "own.py").write_text(FILE)
    (place / "raising.py").write_text("raise RuntimeError('at import')")
    lm = scripted_lm(adds)
    with dspy.context(lm=lm), pytest.raises(ConfigError, match="optimizer") as caught:
        compiled(given, lm=lm, gate=False, test=False)
    assert named in str(caught.value)
    assert "assay_source" not in str(caught.value)
    assert lm.scripted.calls == 0


def test_keywords_of_dspy_are_answered_with_what_to_type() -> None:
    for function, keyword, typed in (
        (assay.evaluate, "devset", "data={'val'"), (assay.evaluate, "trainset", "data={'train'"),
        (assay.evaluate, "metric", "Did you mean 'rubric'"), (assay.compare, "devset", "data={'val'"),
        (assay.tune, "trainset", "data={'train'"), (assay.tune, "valset", "data={'val'"),
        (assay.improve, "trainset", "data={'train'"), (assay.collect, "testset", "data={'test'"),
        (assay.compile, "metric", "Did you mean 'rubric'"), (assay.compile, "student", "Did you mean 'program'"),
        (assay.improve, "state", "compile"), (assay.train, "state", "compile"),
    ):  # fmt: skip
        with pytest.raises(TypeError) as caught:
            function(**{keyword: ROWS})
        assert typed in str(caught.value)
