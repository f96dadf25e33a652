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

import dspy
import numpy as np
import pytest
from click.testing import CliRunner

import assay
from assay.cli.main import group
from assay.errors import AssayError, ConfigError
from assay.testing import scripted_lm

ADD = "Add two to the number that is asked for."
SIZES = {"train": 12, "val": 6, "gate": 12, "test": 6}


class Mine(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question: str) -> dspy.Prediction:
        return self.answer(question=question)


ROWS = [{"question": f"What do you say to number {n}.", "answer": str(n + 2)} for n in range(80)]


def script(request: Any) -> str:
    """Adds 2 where instructions or demonstrations say so; proposes that instruction to whoever asks for one."""
    fields = request.config.response_format["schema"]["properties"] if request.config.response_format else {}
    prompt = request.messages[-1].text or ""
    if set(fields) != {"answer"}:
        return json.dumps(dict.fromkeys(fields, ADD)) if fields else f"```\n{ADD}\n```"
    number = int(prompt.split("number ")[1].split(".")[0])
    taught = len(request.messages) > 4 or ADD in str(request)
    return json.dumps({"answer": str(number + 2) if taught else str(number)})


def right(example: Any, prediction: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> float:
    return float(example.answer == prediction.answer)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compiled(optimizer: Any, lm: Any = None, **options: Any) -> Any:
    options = {"data": ROWS, "sizes": SIZES, "prompt_format": "json", "threads": 1, "rubric": "r.yaml", **options}
    return assay.compile(Mine(), lm=lm or scripted_lm(script), optimizer=optimizer, **options)


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


def test_an_object_of_ones_own_is_gated_tested_and_saved(place: Path) -> None:
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
        assert options in ({}, {"steps": 3})
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
    "kind", [Positional, Keywords, Scored, Awaited, InPlace, Threads, Rebuilt, State, OfTheClass, Configures, Options]
)
def test_whatever_compile_takes_and_returns_is_served(place: Path, kind: Any) -> None:
    report = compiled(kind())
    assert won(report), report.to_dict()["notes"]
    assert report.to_dict()["candidates"][0]["val_score"] == 0  # the baseline is not changed
    assert dspy.settings.lm is None
    assert dspy.settings.get("temperature") is None


def test_settings_reach_the_keywords_of_compile(place: Path) -> None:
    assert won(compiled(Options(), optimizer_settings={"steps": 3}))


def changed_fields(student: Any) -> Any:
    student.answer = dspy.ChainOfThought("question -> answer")
    return student


def own_forward(student: Any) -> Any:
    student.forward = lambda **inputs: dspy.Prediction(answer="1")
    return student


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
    ],
)
def test_another_structure_is_a_named_failure_and_the_program_is_kept(place: Path, action: Any, named: str) -> None:
    data = compiled(Own(action), gate=False, test=False).to_dict()
    assert (data["winner"], data["stopped"]) == ("baseline", None)
    assert named in data["failed"]
    assert assay.load(data["artifact"]) is not None


def test_an_optimizer_that_ends_the_process_has_failed(place: Path) -> None:
    def ending(student: Any) -> Any:
        raise SystemExit(3)

    assert "sys.exit(3)" in compiled(Own(ending), gate=False, test=False).to_dict()["failed"]


@pytest.mark.slow
def test_batches_of_dspys_optimizers_fit_the_tasks(place: Path) -> None:
    lm = scripted_lm(script)
    data = compiled(dspy.SIMBA(metric=right, max_steps=1, num_candidates=1, prompt_model=lm), lm).to_dict()
    assert data["failed"] is None
    assert any("bsize" in note and "12" in note for note in data["notes"])
    options = {"auto": None, "num_candidates": 2, "max_bootstrapped_demos": 0, "max_labeled_demos": 0}
    mipro = dspy.MIPROv2(metric=right, prompt_model=lm, task_model=lm, **options)
    assert compiled(mipro, lm, optimizer_settings={"num_trials": 2}).to_dict()["failed"] is None
    sent = lm.scripted.calls
    with pytest.raises(ConfigError, match="num_trials"):
        compiled(mipro, lm)
    assert lm.scripted.calls == sent


def dspys(name: str, lm: Any) -> Any:
    made: dict[str, Callable[[], Any]] = {
        "GEPA": lambda: dspy.GEPA(metric=right, reflection_lm=lm, max_metric_calls=30),
        "MIPROv2": lambda: dspy.MIPROv2(
            metric=None, prompt_model=lm, task_model=lm, auto="light", max_bootstrapped_demos=0, max_labeled_demos=0
        ),
        "SIMBA": lambda: dspy.SIMBA(metric=right, bsize=4, num_candidates=2, max_steps=1, prompt_model=lm),
        "BootstrapFewShot": lambda: dspy.BootstrapFewShot(max_bootstrapped_demos=2),
        "BootstrapFewShotWithRandomSearch": lambda: dspy.BootstrapFewShotWithRandomSearch(
            None, max_labeled_demos=3, num_candidate_programs=2
        ),
        "COPRO": lambda: dspy.COPRO(prompt_model=lm, breadth=2, depth=1),
        "LabeledFewShot": lambda: dspy.LabeledFewShot(k=3),
        "InferRules": lambda: dspy.InferRules(metric=None, num_candidates=1),
        "BootstrapFewShotWithOptuna": lambda: dspy.BootstrapFewShotWithOptuna(
            None, max_labeled_demos=3, num_candidate_programs=2
        ),
    }
    return made[name]()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["GEPA", "MIPROv2", "SIMBA", "COPRO", "BootstrapFewShotWithOptuna"],  # the others run by name, in test_compile
)
def test_an_optimizer_of_dspy_runs_as_an_object_and_all_its_calls_are_counted(place: Path, name: str) -> None:
    lm = scripted_lm(script)
    report = compiled(dspys(name, lm), lm)
    data = report.to_dict()
    assert data["failed"] is None, data["notes"]
    assert lm.scripted.calls <= data["calls"]  # equal calls of a run are answered once
    assert data["optimizer"].startswith(("dspy:", "dspy."))
    assert name in data["optimizer"]


def examples(rows: list[dict[str, str]], *, inputs: bool = True) -> list[dspy.Example]:
    made = [dspy.Example(**row) for row in rows]
    return [example.with_inputs("question") for example in made] if inputs else made


def split_questions(report: Any) -> dict[str, set[str]]:
    stored = json.loads((Path(report.artifact) / "splits.json").read_text())["tasks"]
    return {name: set(keys) for name, keys in stored.items()}


@pytest.mark.parametrize("form", ["examples", "bare", "mappings", "tasks", "data"])
def test_trainset_and_valset_are_the_splits_and_the_others_come_from_what_is_left(place: Path, form: str) -> None:
    tasks = [assay.datasets.make_task(row) for row in ROWS]
    forms: dict[str, Any] = {
        "examples": examples(ROWS),
        "bare": examples(ROWS, inputs=False),
        "mappings": ROWS,
        "tasks": tasks,
        "data": ROWS,
    }
    train, val, rest = forms[form][:10], forms[form][10:16], forms[form][16:40]
    given: dict[str, Any] = {"trainset": train, "valset": val, "data": rest if form != "examples" else forms[form][:40]}
    if form == "data":
        given = {"data": {"train": train, "val": val, "gate": rest[:12], "test": rest[12:]}}
    splits = split_questions(compiled(Own(), sizes={}, **given))
    keys = [task.key for task in tasks]
    assert splits["train"] == set(keys[:10])
    assert splits["val"] == set(keys[10:16])
    assert len(splits["gate"]) == len(splits["test"]) == 12
    assert splits["gate"] | splits["test"] == set(keys[16:40])


def test_rows_of_named_splits_may_overlap_repeat_or_come_from_generators(place: Path) -> None:
    tasks = [assay.datasets.make_task(row).key for row in ROWS]
    given = {"trainset": iter(ROWS[:12] + ROWS[:4]), "valset": (row for row in ROWS[8:20]), "data": iter(ROWS)}
    splits = split_questions(compiled(Own(), sizes={}, **given))
    assert splits["train"] == set(tasks[:12])
    assert splits["val"] == set(tasks[12:20])
    assert splits["gate"] | splits["test"] == set(tasks[20:])


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
def test_rows_that_leave_a_split_empty_are_an_error_before_any_call(place: Path, given: Any, named: str) -> None:
    lm = scripted_lm(script)
    with pytest.raises(AssayError, match=named):
        compiled(Own(), lm, **{"data": None, "sizes": {}, **given})
    assert lm.scripted.calls == 0


def test_splits_have_the_names_of_other_libraries_too(place: Path) -> None:
    data = {"train": ROWS[:10], "validation": ROWS[10:16], "gate": ROWS[16:28], "test": ROWS[28:40]}
    splits = split_questions(compiled(Own(), sizes={}, data=data))
    assert {name: len(keys) for name, keys in splits.items()} == {"train": 10, "val": 6, "gate": 12, "test": 12}


def test_the_command_line_takes_splits_as_files(place: Path) -> None:
    (place / "mine.py").write_text(FILE)
    for name, rows in (("train", ROWS[:12]), ("val", ROWS[12:18]), ("rest", ROWS[18:])):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["compile", "mine.py:Mine", "--rubric", "r.yaml", "--data", "rest.jsonl", "--model", "openai/none"]
    files = ["--trainset", "train.jsonl", "--valset", "val.jsonl"]
    result = CliRunner().invoke(group, [*command, *files, "--optimizer", "mine.py:make", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "train 12, val 6, gate 31, test 31" in result.output


def test_an_optimizer_of_the_project_file_is_relative_to_the_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "sub").mkdir()
    (place / ".git").mkdir()
    (place / "mine.py").write_text(FILE)
    (place / "assay.toml").write_text("[compile]\noptimizer = 'mine.py:make(times=3)'\n")
    monkeypatch.chdir(place / "sub")
    given = assay.project_settings("compile")["optimizer"]
    assert compiled(given, rubric="../r.yaml", gate=False, test=False).to_dict()["candidates"][1]["val_score"] == 1.0


MOVED = """
import dspy
from assay.models import dspy_seam as seam
{change}
import assay
from assay.optimizers import CompileConfig
from assay.optimizers.prompts.dspy_patches import repaired_dspy
with repaired_dspy():
    pass
answers = []
for optimizer in {optimizers}:
    try:
        CompileConfig(optimizer=optimizer)
        answers.append("")
    except assay.errors.ConfigError as error:
        answers.append(str(error))
print(__import__("json").dumps(answers))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "refused", "part"),
    [
        ("delattr(*seam.SIMBA_PROGRAM.place)", "simba", "simba.wrap_program"),
        ("delattr(*seam.GEPA_BATCH.place)", "gepa", "DspyAdapter.evaluate"),
        ("setattr(*seam.GEPA_TEXTS.place, lambda self, texts: texts)", "gepa", "DspyAdapter.propose_new_texts"),
        ("setattr(*seam.MIPRO_CANDIDATE.place, lambda program: 0.0)", "mipro", "eval_candidate_program"),
        ("del dspy.SIMBA", "simba", "dspy.SIMBA"),
        ("del dspy.GEPA", "gepa", "dspy.GEPA"),
        ("del dspy.MIPROv2", "mipro", "dspy.MIPROv2"),
        ("del dspy.InferRules", "infer-rules", "dspy.InferRules"),
        ("del dspy.BootstrapFewShot", "bootstrap", "dspy.BootstrapFewShot"),
    ],
)
def test_an_optimizer_whose_part_of_dspy_moved_is_refused_by_name(change: str, refused: str, part: str) -> None:
    names = {
        "simba": "SIMBA", "gepa": "GEPA", "mipro": "MIPROv2", "infer-rules": "InferRules",
        "bootstrap": "BootstrapFewShot",
    }  # fmt: skip
    optimizers = [*names, *(f"dspy:{name}" for name in names.values()), "auto", "labeled", "copro"]
    code = MOVED.format(change=change, optimizers=optimizers)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    answers = dict(zip(optimizers, json.loads(ended.stdout.splitlines()[-1]), strict=True))
    assert {name for name, answer in answers.items() if answer} == {refused, f"dspy:{names[refused]}"}, ended.stderr
    assert part in answers[refused]
    assert dspy.__version__ in answers[refused]
    assert refused not in answers[refused].rpartition(";")[2].split(", ")


FILE = f"""import dspy


class Mine(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.answer(question=question)


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
    (place / "mine.py").write_text(FILE)
    report = compiled(f"mine.py:{name}", gate=False, test=False)
    data = report.to_dict()
    assert data["candidates"][1]["val_score"] == 1.0
    assert data["optimizer"] == f"mine.py:{name}"
    assert report.artifact.name == f"mine-{name.partition('(')[0].lower()}"


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("mine.py:nothing", "nothing"), ("mine.py:mak", "'mine.py:make'"), ("none.py:make", "none.py"), ("mine.py", ""),
        ("mine.py:Mine", "Mine"), ("mine.py:broken", "int"), ("mine.py:make(1)", "1"), ("json:loads", "'s'"),
        ("mine.py:failing", "no such folder"), ("mine.py:ending", "SystemExit"), ("mine.py:needs", "'path'"),
        ("mine.py:Needs", "'path'"), ("mine.py:make(size=3)", "'size'"), ("mine.py:Judged", "judge"),
        ("mine.py:weights", "weights"), ("mine.py:trials", "num_trials"), ("raising.py:x", "at import"), ("", ""),
    ],
)  # fmt: skip
def test_a_name_of_no_optimizer_is_refused_before_any_call(place: Path, name: str, named: str) -> None:
    (place / "mine.py").write_text(FILE)
    (place / "raising.py").write_text("raise RuntimeError('at import')")
    lm = scripted_lm(script)
    with dspy.context(lm=lm), pytest.raises(ConfigError, match="optimizer") as caught:
        compiled(name, lm, gate=False, test=False)
    assert named in str(caught.value)
    assert "assay_source" not in str(caught.value)
    assert lm.scripted.calls == 0


def embedded(texts: list[str]) -> Any:
    return np.array([[float(len(text))] for text in texts])


@pytest.mark.parametrize(
    "given",
    [
        lambda: 3,
        object,
        lambda: dspy.KNNFewShot(1, examples(ROWS[:3]), dspy.Embedder(embedded)),
        dspy.Ensemble,
        dspy.BootstrapFinetune,
        lambda: dspy.BetterTogether(right),
    ],
)
def test_what_is_no_optimizer_of_prompts_is_refused_before_any_call(place: Path, given: Any) -> None:
    lm = scripted_lm(script)
    with pytest.raises(ConfigError, match="optimizer"):
        compiled(given(), lm)
    assert lm.scripted.calls == 0


@pytest.mark.parametrize(
    ("function", "keyword", "typed"),
    [
        (assay.evaluate, "devset", "data={'val'"), (assay.evaluate, "trainset", "data={'train'"),
        (assay.evaluate, "metric", "Did you mean 'rubric'"), (assay.compare, "devset", "data={'val'"),
        (assay.tune, "trainset", "data={'train'"), (assay.tune, "valset", "data={'val'"),
        (assay.improve, "trainset", "data={'train'"), (assay.collect, "testset", "data={'test'"),
        (assay.compile, "metric", "Did you mean 'rubric'"), (assay.compile, "student", "Did you mean 'program'"),
        (assay.improve, "state", "compile"), (assay.train, "state", "compile"),
    ],
)  # fmt: skip
def test_keywords_of_dspy_are_answered_with_what_to_type(function: Any, keyword: str, typed: str) -> None:
    with pytest.raises(TypeError) as caught:
        function(**{keyword: ROWS})
    assert typed in str(caught.value)
