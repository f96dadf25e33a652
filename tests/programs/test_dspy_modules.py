"""Modules and types of DSPy as programs, and programs of other people's shape, from evaluation to export."""

import base64
import json
from pathlib import Path
from typing import Any

import dspy
import pytest
from program_steps import PROGRAMS, compiles, evaluates, laid_out, stops_at_a_cap
from prompt_server import serving

import assay
from assay.deployment import load_artifact
from assay.errors import ProgramError
from assay.programs import load_program, program_fields
from assay.rubrics import Criterion, Rubric, checks
from assay.support.values import json_value
from assay.testing import scripted_lm
from assay.traces import Store

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNgYGAAAAAEAAH2FzhVAAAAAElFTkSuQmCC")
URI = "data:image/png;base64," + base64.b64encode(PNG).decode()
PROGRAM = '''
import dspy

def lookup(name: str) -> str:
    """Look up a name."""
    return "42"

def always(args, prediction):
    return 1.0

class Two(dspy.Module):
    def __init__(self):
        super().__init__()
        self.plan = dspy.Predict("question -> plan")
        self.solve = dspy.Predict("question, plan -> answer")

    def forward(self, question):
        return self.solve(question=question, plan=self.plan(question=question).plan)

predict = dspy.Predict("question -> answer")
thought = dspy.ChainOfThought("question -> answer")
react = dspy.ReAct("question -> answer", tools=[lookup])
react2 = dspy.ReActV2("question -> answer", tools=[lookup])
best = dspy.BestOfN(Two(), N=2, reward_fn=always, threshold=1.0)
refine = dspy.Refine(Two(), N=2, reward_fn=always, threshold=1.0)
reasoning = dspy.Predict("question -> thought: dspy.Reasoning, answer")
history = dspy.Predict("question, history: dspy.History -> answer")
image = dspy.Predict("question, picture: dspy.Image -> answer")
file = dspy.Predict("question, document: dspy.File -> answer")
audio = dspy.Predict("question, sound: dspy.Audio -> answer")
rlm = dspy.RLM("question -> answer", interpreter_factory=dspy.LocalInterpreter)
parallel = dspy.Parallel()
'''
ROW = {
    "history": {"history": [{"question": "And before?", "answer": "41"}]},
    "image": {"picture": URI},
    "file": {"document": "data:application/pdf;base64," + base64.b64encode(b"%PDF-1.4").decode()},
    "audio": {"sound": "data:audio/wav;base64," + base64.b64encode(b"RIFF\0\0\0\0WAVE").decode()},
}
TEXTS = {
    "reasoning": "r", "thought": "r", "plan": "p", "next_thought": "n", "next_tool_name": "finish",
    "next_tool_args": "{}", "code": "SUBMIT(answer='42')",
    "tool_calls": json.dumps({"tool_calls": [{"name": "submit", "args": {"answer": "42"}}]}),
}  # fmt: skip


def answer(request: Any) -> str:
    """All fields that a predictor may ask for, of which DSPy reads those of its signature."""
    return "\n\n".join(f"[[ ## {name} ## ]]\n{text}" for name, text in {**TEXTS, "answer": "42"}.items())


def rows(name: str) -> list[dict[str, Any]]:
    return [{"question": f"What is {n} + 1?", "answer": "42", **ROW.get(name, {})} for n in range(40)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "modules.py"
    place.write_text(PROGRAM, encoding="utf-8")
    return place


def rubric() -> Rubric:
    return Rubric(name="r", criteria=[Criterion(name="right", check=checks.exact)])


NAMES = [
    "predict", "thought", "react", "react2", "best", "refine", "reasoning", "history", "image", "file", "audio", "rlm",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_module_is_compiled_its_predictions_stored_as_json_and_run_without_its_file(path: Path, name: str) -> None:
    store, lm = path.parent / "s.db", scripted_lm(answer)
    report = assay.compile(
        f"{path}:{name}", rubric="exact", data=rows(name), lm=lm, optimizer="labeled", out=path.parent / "a",
        store=store,
    )  # fmt: skip
    with Store(store) as opened:
        stored = [rollout for rollout in opened.rollouts() if rollout.prediction]
    assert stored
    for rollout in stored:
        assert rollout.prediction == json_value(rollout.prediction)
        assert "messages=[" not in str(rollout.prediction)
        assert (rollout.prediction["answer"], rollout.score) == ("42", 1.0)
        assert {"question", *ROW.get(name, {})} == rollout.inputs.keys()
    path.unlink()
    loaded = load_artifact(report.artifact)
    fields = program_fields(loaded.program)
    assert fields is not None
    inputs = fields.converted({"question": "q", **ROW.get(name, {})}, where="here")
    with dspy.context(lm=lm):
        assert loaded.runnable()(**inputs).answer == "42"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["react", "history", "image"])
def test_the_rollouts_of_a_module_are_exported(path: Path, name: str) -> None:
    lm, store = scripted_lm(answer), path.parent / "s.db"
    assay.collect(f"{path}:{name}", rubric="exact", data=rows(name), lm=lm, n=2, sizes={"train": 3}, store=store)
    # the default chat template is of texts; it refuses a message with an image, a sound or a file
    kinds = ["transitions"] if name == "image" else ["transitions", "sft", "grpo"]
    for kind in kinds:
        written = assay.export(kind, path.parent / kind, store=store, rubric="exact" if kind == "grpo" else None)
        assert written.to_dict()["rows"], kind


def test_a_module_that_takes_no_task_is_refused(path: Path) -> None:
    with pytest.raises(ProgramError, match="Parallel"):
        load_program(f"{path}:parallel")


@pytest.mark.parametrize("name", ["react", "react2", "rlm"])
def test_fields_that_a_module_fills_itself_are_not_inputs_or_outputs(path: Path, name: str) -> None:
    fields = program_fields(load_program(f"{path}:{name}"))
    assert fields is not None
    assert list(fields.inputs) == ["question"]
    assert list(fields.outputs) == ["answer"]


OPTIMIZERS = {"hops": "auto", "tools": "mipro", "structured": "gepa", "concurrent": "simba"}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_server_sees_the_calls_that_are_reported_stored_and_capped(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as server:
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        monkeypatch.setenv("PROGRAMS_SERVER", server.url)
        place = laid_out(tmp_path / program, program, server)
        evaluates(place)
        stops_at_a_cap(place)
        if program in OPTIMIZERS:
            assert compiles(place, OPTIMIZERS[program]).is_dir()
