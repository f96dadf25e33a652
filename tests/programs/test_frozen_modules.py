"""Programs with modules that DSPy's optimizers leave as they are: compiled agent by agent, kept and loaded."""

import json
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.errors import ProgramError
from assay.programs import program_state, restore_program
from assay.testing import scripted_lm
from assay.traces import acting_as

NAME = f"{__name__}:Team"
RUBRIC = "name: team\ncriteria:\n- {name: right, weight: 1, check: exact}\n"


class Member(dspy.Module):
    def __init__(self, name: str, signature: str) -> None:
        super().__init__()
        self.name, self.write = name, dspy.Predict(signature)

    def forward(self, **inputs: str) -> dspy.Prediction:
        with acting_as(self.name):
            return self.write(**inputs)


class Team(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.planner = Member("planner", "question -> answer")  # fields of a task's labels, which demonstrations have
        self.solver = Member("solver", "question -> answer")

    def forward(self, question: str) -> dspy.Prediction:
        plan = self.planner(question=question).answer
        return self.solver(question=f"{question} {plan}")


def shown_more(request: Any) -> str:
    """Right if there are demonstrations in the prompt."""
    return json.dumps({"answer": "4" if len(request.messages) > 3 else "5"})


def compiled(team: dspy.Module, out: Path) -> dspy.Module:
    (out.parent / "r.yaml").write_text(RUBRIC)
    report = assay.compile(
        team,
        data=[{"question": f"{at}: what is 2+2?", "answer": "4"} for at in range(40)],
        rubric=out.parent / "r.yaml",
        lm=scripted_lm(shown_more),
        optimizer="labeled",
        prompt_format="json",
        store=out.parent / "a.db",
        gate=False,
        test=False,
        out=out,
    )
    return assay.load(report.artifact, program=Team())


def demos(team: Any) -> tuple[int, int]:
    program = getattr(team, "program", team)
    return len(program.planner.write.demos), len(program.solver.write.demos)


def test_agents_are_compiled_one_after_the_other(tmp_path: Path) -> None:
    team = Team()
    team.planner._compiled = True
    first: Any = compiled(team, tmp_path / "first")
    assert demos(first)[0] == 0
    assert demos(first)[1] > 0
    program = getattr(first, "program", first)
    assert program.planner._compiled
    program.planner._compiled, program.solver._compiled = False, True
    second = compiled(program, tmp_path / "second")
    assert demos(second)[1] == demos(first)[1]

    program.planner._compiled = True
    with pytest.raises(ProgramError, match="has no predictors except in frozen modules"):
        compiled(program, tmp_path / "third")


def test_the_state_of_frozen_modules_is_kept() -> None:
    team = Team()
    team.planner.write.demos = [dspy.Example(question="q", answer="a")]
    team.planner.write.lm = scripted_lm(shown_more)
    team.planner._compiled = True
    state = json.loads(json.dumps(program_state(team), default=str))
    assert list(state["state"]) == ["solver.write"]
    assert state["frozen"]["planner"]["write"]["lm"] is None
    state["frozen"]["planner"]["write"]["lm"] = {"model": "a crafted one"}
    restored: Any = restore_program(NAME, {}, state, Team())
    assert demos(restored) == (1, 0)
    assert restored.planner._compiled
    assert restored.planner.write.lm is None
    state["frozen"]["helper"] = state["frozen"].pop("planner")
    with pytest.raises(ProgramError, match="no module 'helper' any more"):
        restore_program(NAME, {}, state, Team())
