"""DSPy's optimizers by class name: supported, refused with a reason, settings, budgets, instructions."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dspy
import pytest

import assay
from assay.datasets import make_task
from assay.datasets.near_duplicates import overlap
from assay.errors import ConfigError, MissingExtra
from assay.evaluation import SilentProgress
from assay.evaluation.session import Measured
from assay.models import Caps, Meter
from assay.optimizers.prompts.named import ALIASES, Proposal
from assay.optimizers.prompts.proposals import InstructionCheck, broken
from assay.optimizers.settings import CompileConfig
from assay.testing import scripted_lm
from rigs.command_line import assay_command

PROGRAM = """import dspy


class Mine(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.answer(question=question)
"""
PROPOSED = "Add two to the number that is asked for."


def script(request: Any, proposed: str = PROPOSED) -> str:
    """Adds 2 where instructions or demonstrations say so."""
    fields = request.config.response_format["schema"]["properties"] if request.config.response_format else {}
    prompt = request.messages[-1].text or ""
    if set(fields) != {"answer"}:
        return json.dumps(dict.fromkeys(fields, proposed)) if fields else f"```\n{proposed}\n```"
    number = int(prompt.split("number ")[1].split(".")[0])
    reply_expected = len(request.messages) > 4 or PROPOSED in str(request)
    return json.dumps({"answer": str(number + 2) if reply_expected else str(number)})


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(PROGRAM)
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    rows = [json.dumps({"question": f"What do you say to number {n}.", "answer": str(n + 2)}) for n in range(60)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    return tmp_path


def compiled(optimizer: str, lm: Any = None, **options: Any) -> dict[str, Any]:
    options = {"sizes": {"train": 12, "val": 6, "gate": 5, "test": 5}, "prompt_format": "json", "threads": 1, **options}
    report = assay.compile(
        "mine.py:Mine", rubric="r.yaml", data="data.jsonl", lm=lm or scripted_lm(script), optimizer=optimizer, **options
    )
    result: dict[str, Any] = report.to_dict()
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["KNNFewShot", "Ensemble", "dspy.teleprompt:KNNFewShot", "dspy:SIMBA"],
)
def test_dspys_optimizers_run_by_the_names_of_their_classes(place: Path, name: str) -> None:
    data = compiled(name, gate=False)
    better = "KNN" in name  # the plain program is never right, so that nothing is bootstrapped for the others
    assert data["winner"] == (name if better else "baseline")
    assert data["failed"] is None
    assert (data["test"]["compiled"] is None) != better
    assert not [note for note in data["notes"] if "failed" in note]


def test_inferred_rules_do_not_change_the_users_program(place: Path) -> None:
    """DSPy writes them into the signature's class, which every copy shares: the baseline had them too."""
    program = dspy.Predict("question -> answer")
    instructions = program.signature.instructions
    data = assay.compile(
        program, rubric="r.yaml", data="data.jsonl", lm=scripted_lm(script), optimizer="infer-rules", threads=1,
        sizes={"train": 12, "val": 6, "gate": 5, "test": 5},
    ).to_dict()  # fmt: skip
    assert program.signature.instructions == instructions
    assert data["candidates"][0]["val_score"] == 0  # the model adds two only where instructions say so


def test_every_optimizer_that_dspy_exports_is_named() -> None:
    base = dspy.LabeledFewShot.__base__
    kinds = [kind for kind in vars(dspy).values() if isinstance(kind, type) and issubclass(kind, base)]
    exported = {kind.__name__ for kind in kinds}  # `dspy.BootstrapRS` is a second name of one
    assert exported - set(ALIASES) == {"AvatarOptimizer", "BetterTogether", "BootstrapFinetune"}


@pytest.mark.parametrize(
    ("optimizer", "settings", "message"),
    [
        ("gepa", {"max_metric_cals": 40}, r"gepa has no setting 'max_metric_cals'; it has .*max_metric_calls"),
        ("auto", {"breadth": 3}, "it has none"),
        ("knn", {"k": 3}, "it has none; demos and the caps"),
        ("mipro", {"metric": 1}, r"mipro has no setting 'metric"),
        ("gepa", {"max_metric_calls": "abc"}, r"max_metric_calls='abc' must be int \| None for gepa"),
        ("MIPROv2", {"minibatch": 3}, "minibatch=3 must be bool for mipro"),
        ("mipro", {"auto": "lite"}, r"auto='lite' must be .*'light', 'medium', 'heavy'"),
        ("labeled", {"k": "many"}, "k='many' must be int for labeled"),
        ("dspy.teleprompt:COPRO", {"breadth": 2.5}, r"breadth=2.5 must be int"),
    ],
)
def test_unknown_settings_of_an_optimizer_are_refused(
    place: Path, optimizer: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        compiled(optimizer, optimizer_settings=settings)


@pytest.mark.slow
def test_a_setting_of_a_wrong_type_ends_the_command_with_2_before_the_first_call(place: Path) -> None:
    command = ["compile", "mine.py:Mine", "--rubric", "r.yaml", "--data", "data.jsonl", "--optimizer", "gepa"]
    command += ["--optimizer-set", "max_metric_calls=abc", "--model", "openai/m", "--api-base", "http://127.0.0.1:9/v1"]
    ended = assay_command(*command)
    assert ended.code == 2
    assert "max_metric_calls='abc' must be int" in ended.stderr


def test_valid_optimizer_settings_are_accepted() -> None:
    for name, fitting in (
        ("gepa", {"max_metric_calls": 40, "auto": None, "num_threads": None, "instruction_proposer": print}),
        ("mipro", {"metric_threshold": 1, "init_temperature": 1, "minibatch": True}),
        ("bootstrap", {"metric_threshold": 0.5, "teacher_settings": {}}),
    ):
        stored = CompileConfig(optimizer=name, optimizer_settings=fitting).optimizer_settings
        assert {**stored, **fitting} == stored  # the preset of this name has others


@pytest.mark.slow
def test_settings_are_those_of_the_optimizer(place: Path) -> None:
    few, many = (
        compiled("bootstrap-search", cache=False, optimizer_settings={"num_candidate_programs": count})
        for count in (1, 8)
    )
    assert few["search_calls"] < many["search_calls"]


def test_budgets_follow_from_the_cap() -> None:
    def defaults_at(cap: int | None) -> Any:
        session = SimpleNamespace(
            meter=Meter(Caps(search_calls=cap)), measured=Measured(calls=2, judge_calls=1, tokens=None, latency_s=None)
        )
        student: Any = SimpleNamespace(program=None)
        return Proposal(student, [], [None] * 10, session)  # type: ignore[arg-type, list-item]

    assert (defaults_at(None).runs(40), defaults_at(None).passes(7, most=30)) == (40, 7)
    assert (defaults_at(300).runs(40), defaults_at(300).passes(7, most=30)) == (
        90,
        9,
    )  # 0.9 * 300 calls / 3 a run; of 10 val tasks
    assert (defaults_at(3).runs(40), defaults_at(30000).passes(7, most=30)) == (1, 30)


def test_truncated_or_unclosed_instructions_are_broken_and_complete_ones_are_not() -> None:
    for text in (
        "",
        "Answer with the number and",
        "Use this format:\n```json\n{}",
        "Do it (as shown",
        'Say "yes',
        "Think, then",
        "x" * 300,
    ):
        assert broken(text), text
    complete = [
        "Add two.",
        'Return JSON: {"a": [1]}',
        "```\n{ (\n```\nDone.",
        "1) first\n2) second",
        'Don\'t guess; it\'s 5" wide "or" so.',
    ]
    for text in [
        *complete,
        "Given the fields `question`, produce the fields `answer`.",
        "Answer briefly :)",
        "Classify the ticket",
    ]:
        assert not broken(text), text
    assert not broken('Say "yes in other words.', before='Say "yes.')  # it was so before


def test_an_answer_cut_at_its_limit_is_rejected_even_if_it_looks_complete() -> None:
    check = InstructionCheck(dspy.Predict("question -> answer"))
    check.cut.append("of the rules that follow. First, add two.")
    assert (
        check.why("These are some of the rules that follow. First, add two.")
        == "truncated: the model's answer was cut off at its limit of tokens"
    )
    assert check.why("First, add three and be done with it.") is None


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["gepa", "copro", "mipro"])
@pytest.mark.parametrize("proposed", [f"{PROPOSED} Then look at the", f"{PROPOSED} ```", "word " * 2500 + PROPOSED])
def test_broken_or_endless_instructions_are_never_adopted(place: Path, optimizer: str, proposed: str) -> None:
    lm = scripted_lm(lambda request: script(request, proposed))
    settings = (
        {"max_metric_calls": 20} if optimizer == "gepa" else {"num_trials": 2} if optimizer == "mipro" else {"depth": 1}
    )
    report = assay.compile(
        "mine.py:Mine", rubric="r.yaml", data="data.jsonl", lm=lm, optimizer=optimizer, optimizer_settings=settings,
        prompt_format="json", threads=1,
        sizes={"train": 8, "val": 5, "gate": 5, "test": 5},
    )  # fmt: skip
    assert PROPOSED not in report.outcome.compiled.program.answer.signature.instructions


def test_instructions_copied_from_training_tasks_are_reported() -> None:
    tasks = [make_task({"question": "The quick brown fox jumps over the lazy dog near the river bank", "answer": "a"})]
    program, original = dspy.Predict("question -> answer"), dspy.Predict("question -> answer")
    program.signature = program.signature.with_instructions(
        "Note: the quick brown fox jumps over the lazy dog near the river bank means a."
    )
    check, copied = InstructionCheck(original), program.signature.instructions
    assert str(check.why(copied, original.signature.instructions, sources=tasks)).startswith("copied: ")
    (note,) = check.checked(program, tasks)
    assert note.startswith("instruction of self: ")
    assert program.signature.instructions == copied  # it is not rejected
    # 17 words have 10 runs of eight; the 13 words of the task's question are 6 of them
    assert (
        overlap("one two three four five six seven eight nine", ["x one two three four five six seven eight y"]) == 0.5
    )
    assert check.checked(original, tasks) == []


def out_of_form(request: Any) -> str:
    """Answers tasks, and what a proposer asks for in a form that no adapter reads."""
    fields = request.config.response_format["schema"]["properties"] if request.config.response_format else {}
    return script(request) if set(fields) == {"answer"} else "I cannot do that."


def test_mipro_with_unparsable_proposals_saves_the_baseline(place: Path) -> None:
    data = compiled("mipro", scripted_lm(out_of_form))
    assert (data["winner"], data["test"]["compiled"], data["stopped"]) == ("baseline", None, None)
    note = next(note for note in data["notes"] if "failed" in note)
    assert note.startswith("mipro failed: AdapterParseError: ")
    assert "continuing with the plain program only" in note
    assert assay.load(data["artifact"]) is not None


HALF = f"""import dspy


class Half:
    def __init__(self, metric):
        self.metric = metric

    def compile(self, student, trainset, valset):
        for predictor in student.predictors():
            predictor.signature = predictor.signature.with_instructions({PROPOSED!r})
        dspy.Evaluate(devset=valset, metric=self.metric)(student)
        raise KeyError("lost " * 1000)
"""


def test_the_best_program_before_an_optimizer_failure_is_gated_and_tested(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(place))
    (place / "half.py").write_text(HALF)
    data = compiled("half:Half", sizes={"train": 12, "val": 6, "gate": 12, "test": 5})
    assert (data["winner"], data["replaces"]) == ("half:Half, cut short", True)
    assert (data["test"]["baseline"]["score"], data["test"]["compiled"]["score"]) == (0.0, 1.0)
    note = next(note for note in data["notes"] if "failed" in note)
    assert note.startswith("half:Half failed: KeyError: 'lost lost")
    assert "its best so far competes" in note
    assert len(note) < 1000
    log = Path(note.partition("traceback: ")[2].rstrip(")"))
    assert 'raise KeyError("lost " * 1000)' in log.read_text()


def test_a_job_error_is_not_an_optimizer_failure(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(place))
    (place / "lacking.py").write_text(
        "from assay.errors import MissingExtra\n\n\nclass Lacking:\n    def compile(self, student, trainset):\n"
        "        raise MissingExtra('x', 'y')\n"
    )
    with pytest.raises(MissingExtra, match="'x' is not installed"):
        compiled("lacking:Lacking")


def test_programs_without_a_scored_task_are_not_announced(place: Path) -> None:
    class CapturedProgress(SilentProgress):
        spoken = ""

        def say(self, text: str) -> None:
            self.spoken += f"{text}\n"

    progress = CapturedProgress()
    compiled("gepa", optimizer_settings={"max_metric_calls": 30}, progress=progress)
    assert "a program of Mine: 0.000 on 6 tasks" in progress.spoken
    assert "on 0 tasks" not in progress.spoken
