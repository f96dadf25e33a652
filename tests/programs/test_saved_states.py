"""States that DSPy's `program.save` wrote: loaded beside a program, or refused with what differs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.deployment import load_artifact
from assay.errors import ConfigError, ProgramError
from assay.programs import load_program
from assay.programs.state import with_saved_state
from assay.rubrics import Criterion, Rubric, checks
from assay.testing import scripted_lm
from rigs.command_line import assay_command

PROGRAM = '''
import dspy

class Solver(dspy.Module):
    def __init__(self):
        super().__init__()
        self.solve = dspy.ChainOfThought("question -> answer")
        self.review = dspy.Predict("question, answer -> verdict")

    def forward(self, question):
        solved = self.solve(question=question)
        self.review(question=question, answer=solved.answer)
        return solved

def lookup(name: str) -> str:
    """Look up a name."""
    return "42"

old = dspy.ReAct("question -> answer", tools=[lookup])
new = dspy.ReActV2("question -> answer", tools=[lookup])
one = dspy.Predict("question -> answer")
'''
DATA = [{"question": f"What is {n} + 1?", "answer": "42"} for n in range(60)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "solver.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return path


def rubric() -> Rubric:
    return Rubric(name="r", criteria=[Criterion(name="right", check=checks.exact)])


def saved(file: Path, name: str = "Solver", change: Callable[[Any], None] = lambda state: None) -> Path:
    """A state with the instruction SAVED in each predictor, as DSPy writes it, then changed."""
    program, path = load_program(f"{file}:{name}"), file.parent / f"{name}.json"
    for predictor in program.predictors():
        predictor.signature = predictor.signature.with_instructions("SAVED")
        predictor.demos = [dspy.Example(question="q0", reasoning="r0", answer="DEMO").with_inputs("question")]
    program.save(path)
    state = json.loads(path.read_text(encoding="utf-8"))
    change(state)
    path.write_text(json.dumps(state), encoding="utf-8")
    return path


def recording_lm() -> tuple[Any, list[str]]:
    prompts: list[str] = []

    def answer(request: Any) -> str:
        prompts.append(str(request))
        return "[[ ## reasoning ## ]]\nr\n\n[[ ## answer ## ]]\n42\n\n[[ ## verdict ## ]]\nyes\n"

    return scripted_lm(answer), prompts


def test_evaluate_sends_the_saved_instructions_and_demonstrations(file: Path) -> None:
    lm, prompts = recording_lm()
    options: dict[str, Any] = {"rubric": rubric(), "data": DATA, "lm": lm, "sizes": {"val": 3}}
    assay.evaluate(f"{file}:Solver", state=str(saved(file)), **options)
    assert all("SAVED" in prompt for prompt in prompts)
    assert any("DEMO" in prompt for prompt in prompts)


def test_a_state_that_shows_a_task_of_gate_or_test_is_named_in_a_warning(file: Path) -> None:
    data = [{**row, "split": ("train", "val", "gate", "test")[n % 4]} for n, row in enumerate(DATA)]

    def shows(state: Any) -> None:
        state["solve.predict"]["demos"] = [{"question": row["question"], "answer": "42"} for row in data[:8]]

    lm, _ = recording_lm()
    options: dict[str, Any] = {"rubric": rubric(), "data": data, "lm": lm, "sizes": {"val": 3}}
    report = assay.evaluate(f"{file}:Solver", state=str(saved(file, change=shows)), **options)
    assert any("4 tasks" in note for note in report.notes)
    report = assay.evaluate(f"{file}:Solver", state=str(saved(file)), **options)
    assert not any("demonstrations" in note for note in report.notes)


def test_compile_starts_from_a_state_and_its_artifact_needs_no_file_besides(file: Path, tmp_path: Path) -> None:
    lm, prompts = recording_lm()
    path = saved(file)
    report = assay.compile(
        f"{file}:Solver", state=str(path), rubric=rubric(), data=DATA, lm=lm, optimizer="labeled", out=tmp_path / "a"
    )
    assert all("SAVED" in prompt for prompt in prompts)
    path.unlink()
    file.unlink()
    loaded = load_artifact(report.artifact).program
    assert [predictor.signature.instructions for predictor in loaded.predictors()] == ["SAVED", "SAVED"]


def test_each_side_of_a_comparison_may_have_a_state(file: Path) -> None:
    lm, prompts = recording_lm()
    name = f"{file}:Solver"
    options: dict[str, Any] = {"rubric": rubric(), "data": DATA, "lm": lm, "split": "val", "sizes": {"val": 3}}
    report = assay.compare(name, name, state_b=saved(file), **options).to_dict()
    assert (report["a"]["state"], report["b"]["state"]) == (None, str(saved(file)))
    sent = ["SAVED" in prompt for prompt in prompts]
    assert True in sent
    assert sent == sorted(sent)
    with pytest.raises(ConfigError):
        assay.compare(name, name, **options)


@pytest.mark.parametrize("command", ["evaluate", "compile", "tune", "collect", "run", "compare"])
def test_the_command_line_refuses_a_state_of_another_program(file: Path, command: str) -> None:
    (file.parent / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DATA), encoding="utf-8")
    arguments = ["question=q"] if command == "run" else ["--rubric", "exact", "--data", "d.jsonl"]
    sides = [f"{file}:old", f"{file}:Solver"] if command == "compare" else [f"{file}:Solver"]
    flag = "--state-b" if command == "compare" else "--state"
    result = assay_command(command, *sides, flag, str(saved(file, "old")), "--model", "openai/none", *arguments)
    assert result.code != 0
    assert "extract.predict" in result.stderr


def changed(review: Callable[[Any], Any]) -> Callable[[Any], None]:
    """A change of the part of a state that belongs to the predictor `review`."""
    return lambda state: review(state["review"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda state: state.update(check=state.pop("review")), "'check'"),
        (lambda state: state.pop("review"), "'review'"),
        (changed(lambda part: part["signature"]["fields"][0].update(prefix="Document:", description="${document}")),
         "document"),
        (changed(lambda part: part["signature"]["fields"].pop(0)), "'review'"),
        (changed(lambda part: part["signature"]["fields"].reverse()), "'review'"),
        (changed(lambda part: part.update(demos="none")), "'review'"),
        (changed(lambda part: part.update(forward="x")), "'forward'"),
    ],
)  # fmt: skip
def test_a_state_with_other_predictors_or_fields_is_refused(
    file: Path, change: Callable[[Any], None], named: str
) -> None:
    with pytest.raises(ProgramError) as caught:
        assay.run(f"{file}:Solver", {"question": "q"}, state=str(saved(file, change=change)), model="openai/none")
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"[1, 2]", b"null", b"{", b"\x80\x04N.", b'{"trials": [1]}', b'{"metadata": 3}', b"[" * 100_000, b"\xff\xfe"],
)
def test_a_file_that_is_no_state_is_refused(file: Path, content: bytes) -> None:
    path = file.parent / "x.json"
    path.write_bytes(content)
    with pytest.raises(ProgramError) as caught:
        assay.run(f"{file}:Solver", {"question": "q"}, state=str(path), model="openai/none")
    assert "x.json" in str(caught.value)


def test_a_resumed_evaluation_runs_again_if_the_state_has_changed(file: Path, tmp_path: Path) -> None:
    lm, prompts = recording_lm()
    options: dict[str, Any] = {"rubric": rubric(), "data": DATA, "lm": lm, "sizes": {"val": 3}}
    options["store"] = tmp_path / "s.db"
    path = saved(file)
    assay.evaluate(f"{file}:Solver", state=str(path), **options)
    sent = len(prompts)
    assay.evaluate(f"{file}:Solver", state=str(path), resume=True, **options)
    assert len(prompts) == sent
    path.write_text(path.read_text(encoding="utf-8").replace("SAVED", "CHANGED"), encoding="utf-8")
    assay.evaluate(f"{file}:Solver", state=str(path), resume=True, **options)
    assert all("CHANGED" in prompt for prompt in prompts[sent:])
    assert len(prompts) == 2 * sent


@pytest.mark.parametrize("command", ["evaluate", "compile", "tune", "collect", "improve", "compare", "run"])
def test_no_command_unpickles_what_it_is_given_as_the_program(file: Path, command: str) -> None:
    mark, folder = file.parent / "ran", file.parent / "folder"
    folder.mkdir()
    for path in (file.parent / "x.pkl", folder / "program.pkl"):
        path.write_bytes(b"cos\nmkdir\n(V" + str(mark).encode() + b"\ntR.")
    for path in (file.parent / "x.json", folder / "metadata.json"):
        path.write_text("{}", encoding="utf-8")
    (file.parent / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DATA), encoding="utf-8")
    arguments = ["question=q"] if command == "run" else ["--rubric", "exact", "--data", "d.jsonl"]
    arguments += {"improve": ["--order", "prompts", "--name", "n"], "compare": [f"{file}:Solver"]}.get(command, [])
    for given in ("x.pkl", "folder", "x.json"):
        result = assay_command(command, str(file.parent / given), *arguments, "--model", "openai/none")
        assert result.code != 0
        assert given in result.stderr
        assert "state" in result.stderr
    assert not mark.exists()


@pytest.mark.parametrize("version", ["2.6.27", "3.0.4", "3.3.1"])
def test_a_state_of_another_version_is_loaded_without_its_models(file: Path, version: str) -> None:
    def of_version(state: Any) -> None:
        state["metadata"] = {"dependency_versions": {"python": "3.11", "dspy": version, "cloudpickle": "3.1"}}
        state["review"]["lm"] = {"model": "openai/gpt-4o-mini", "api_base": "http://elsewhere", "temperature": 0.3}

    loaded: Any = with_saved_state(load_program(f"{file}:Solver"), saved(file, change=of_version))
    assert [predictor.signature.instructions for predictor in loaded.predictors()] == ["SAVED", "SAVED"]
    assert loaded.review.lm is None
    assert loaded.review.config == {}


def test_a_missing_file_a_folder_and_a_pickle_are_refused_and_nothing_is_unpickled(file: Path) -> None:
    folder, pickled = file.parent / "whole", file.parent / "x.pkl"
    load_program(f"{file}:one").save(folder, save_program=True)
    mark = file.parent / "ran"
    pickled.write_bytes(b"cos\nmkdir\n(V" + str(mark).encode() + b"\ntR.")
    (folder / "program.pkl").write_bytes(pickled.read_bytes())
    for path in (folder, pickled, file.parent, file.parent / "absent.json"):
        with pytest.raises(ProgramError):
            assay.run(f"{file}:Solver", {"question": "q"}, state=str(path), model="openai/none")
    for path in (folder, pickled, saved(file)):
        with pytest.raises(ProgramError) as caught:
            load_program(str(path))
        assert "state" in str(caught.value)
    assert not mark.exists()
