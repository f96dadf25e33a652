"""DSPy's optimizers by class name: supported, refused with a reason, settings, budgets, instructions."""

from pathlib import Path
from typing import Any

import adding
import dspy
import pytest
from adding import ADD, ROWS, adds

import assay
from assay.datasets import make_task
from assay.datasets.keys import overlap
from assay.errors import ConfigError, MissingExtra
from assay.optimizers.prompts.named import ALIASES
from assay.optimizers.prompts.proposals import InstructionCheck, broken
from assay.optimizers.settings import CompileConfig
from assay.testing import scripted_lm


@pytest.fixture(autouse=True)
def place(own_folder: Path) -> Path:
    adding.write(ROWS[:60])
    return own_folder


def compiled(optimizer: str, **options: Any) -> dict[str, Any]:
    options = {"sizes": {"train": 12, "val": 6, "gate": 5, "test": 5}, **options}
    data: dict[str, Any] = adding.compiled(optimizer, **options).to_dict()
    return data


@pytest.mark.slow
@pytest.mark.parametrize("name", ["KNNFewShot", "dspy.teleprompt:KNNFewShot", "dspy:SIMBA"])
def test_dspys_optimizers_run_by_the_names_of_their_classes(name: str) -> None:
    data = compiled(name, gate=False)
    better = "KNN" in name  # the plain program is never right, so that SIMBA bootstraps nothing
    assert data["winner"] == (name if better else "baseline")
    assert data["failed"] is None
    assert (data["test"]["compiled"] is None) != better
    assert not [note for note in data["notes"] if "failed" in note]


def test_inferred_rules_do_not_change_the_users_program() -> None:
    """DSPy writes them into the signature's class, which every copy shares: the baseline had them too."""
    program = dspy.Predict("question -> answer")
    instructions = program.signature.instructions
    data = compiled("infer-rules", program=program)
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
def test_unknown_settings_of_an_optimizer_are_refused(optimizer: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compiled(optimizer, optimizer_settings=settings)


def test_valid_optimizer_settings_are_accepted() -> None:
    for name, fitting in (
        ("gepa", {"max_metric_calls": 40, "auto": None, "num_threads": None, "instruction_proposer": print}),
        ("mipro", {"metric_threshold": 1, "init_temperature": 1, "minibatch": True}),
        ("bootstrap", {"metric_threshold": 0.5, "teacher_settings": {}}),
    ):
        stored = CompileConfig(optimizer=name, optimizer_settings=fitting).optimizer_settings
        assert {**stored, **fitting} == stored  # the preset of this name has others


def test_settings_are_those_of_the_optimizer() -> None:
    report = adding.compiled("labeled", optimizer_settings={"k": 3}, gate=False, test=False)
    assert len(report.program.answer.demos) == 3


BROKEN = (
    "", "Answer with the number and", "Use this format:\n```json\n{}", "Do it (as shown", 'Say "yes', "Think, then",
    "x" * 300,
)  # fmt: skip
WHOLE = (
    "Add two.", 'Return JSON: {"a": [1]}', "```\n{ (\n```\nDone.", "1) first\n2) second", "Answer briefly :)",
    'Don\'t guess; it\'s 5" wide "or" so.', "Given the fields `question`, produce the fields `answer`.",
    "Classify the ticket",
)  # fmt: skip


def test_truncated_or_unclosed_instructions_are_broken_and_complete_ones_are_not() -> None:
    assert [text for text in BROKEN if not broken(text)] == []
    assert [text for text in WHOLE if broken(text)] == []
    assert not broken('Say "yes in other words.', before='Say "yes.')  # it was so before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "settings", "proposed"),
    [
        ("gepa", {"max_metric_calls": 20}, f"{ADD} Then look at the"),
        ("copro", {"depth": 1}, f"{ADD} ```"),
        ("mipro", {"num_trials": 2}, "word " * 2500 + ADD),
    ],
)
def test_broken_or_endless_instructions_are_never_adopted(optimizer: str, settings: Any, proposed: str) -> None:
    lm = scripted_lm(lambda request: adds(request, proposed))
    sizes = {"train": 8, "val": 5, "gate": 5, "test": 5}
    report = adding.compiled(optimizer, lm=lm, optimizer_settings=settings, sizes=sizes)
    assert ADD not in report.outcome.compiled.program.answer.signature.instructions


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
    return adds(request) if set(fields) == {"answer"} else "I cannot do that."


def test_mipro_with_unparsable_proposals_saves_the_baseline() -> None:
    data = compiled("mipro", lm=scripted_lm(out_of_form))
    assert (data["winner"], data["test"]["compiled"], data["stopped"]) == ("baseline", None, None)
    note = next(note for note in data["notes"] if "failed" in note)
    assert note.startswith("mipro failed: AdapterParseError: ")
    assert "continuing with the plain program only" in note
    assert assay.load(data["artifact"]) is not None


OWN = f"""import dspy

from assay.errors import MissingExtra

class Half:
    def __init__(self, metric):
        self.metric = metric

    def compile(self, student, trainset, valset):
        for predictor in student.predictors():
            predictor.signature = predictor.signature.with_instructions({ADD!r})
        dspy.Evaluate(devset=valset, metric=self.metric)(student)
        raise KeyError("lost " * 1000)

class Lacking:
    def compile(self, student, trainset):
        raise MissingExtra("x", "y")
"""


def test_the_best_program_before_an_optimizer_failure_is_gated_and_tested(place: Path) -> None:
    (place / "own.py").write_text(OWN)
    data = compiled("own.py:Half", sizes={"train": 12, "val": 6, "gate": 12, "test": 5})
    assert (data["winner"], data["replaces"]) == ("own.py:Half, cut short", True)
    assert (data["test"]["baseline"]["score"], data["test"]["compiled"]["score"]) == (0.0, 1.0)
    note = next(note for note in data["notes"] if "failed" in note)
    assert note.startswith("own.py:Half failed: KeyError: 'lost lost")
    assert "its best so far competes" in note
    assert len(note) < 1000
    log = Path(note.partition("traceback: ")[2].rstrip(")"))
    assert 'raise KeyError("lost " * 1000)' in log.read_text()


def test_a_job_error_is_not_an_optimizer_failure(place: Path) -> None:
    (place / "own.py").write_text(OWN)
    with pytest.raises(MissingExtra, match="'x' is not installed"):
        compiled("own.py:Lacking")
