"""Several named agents in a rollout: recorded, credited and exported apart."""

import json
from pathlib import Path
from typing import Any

import dspy
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import assay
from assay.errors import ConfigError
from assay.rubrics import Criterion, Rubric
from assay.rubrics.checks import exact
from assay.testing import scripted_lm
from assay.traces import Store, acting_as
from assay.traces.credit import AgentBaselines, Baseline, returns
from assay.traces.export.settings import Gates


class Team(dspy.Module):  # type: ignore[misc]
    """A planner, asked once or twice, and a solver; one more call has no name."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = dspy.Predict("question -> plan")
        self.solve = dspy.Predict("question, plan -> answer")
        self.check = dspy.Predict("answer -> verdict")

    def forward(self, question: str) -> Any:
        with acting_as("planner"):
            plan = self.plan(question=question).plan
            if plan == "more":
                plan = self.plan(question=f"{question}, again").plan
        with acting_as("solver"):
            answer = self.solve(question=question, plan=plan).answer
        self.check(answer=answer)
        return dspy.Prediction(answer=answer)


def script(request: Any) -> str:
    text = request.messages[-1].text
    if "verdict" in text:
        return json.dumps({"verdict": "fine"})
    if "answer" in text:
        return json.dumps({"answer": "4"})
    return json.dumps({"plan": "more" if "2 + 2" in text and "again" not in text else "add"})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    rows = [{"question": f"{n} + 2", "answer": "4" if n != 3 else "5", "split": "train"} for n in range(2, 6)] + [
        {"question": "9 + 9", "answer": "18", "split": "val"}
    ]
    assay.collect(
        Team(),
        rubric=Rubric("sums", [Criterion(name="right", check=exact, arguments={"field": "answer"})]),
        data=rows,
        lm=scripted_lm(script),
        n=2,
        prompt_format="json",
        store=tmp_path / "s.db",
    )
    return tmp_path / "s.db"


def test_calls_are_recorded_with_the_name_of_their_agent(store: Path) -> None:
    with Store(store) as opened:
        rollouts = [opened.rollout(rollout.id) for rollout in opened.rollouts(split="train")]
    names = {rollout.inputs["question"]: [call.agent for call in rollout.transitions] for rollout in rollouts}
    assert names["2 + 2"] == ["planner", "planner", "solver", ""]
    assert names["5 + 2"] == ["planner", "solver", ""]


def exported(kind: str, store: Path, out: Path, **options: Any) -> list[dict[str, Any]]:
    assay.export(kind, out, store=store, gates=Gates(min_clean=0), privacy="patterns", **options)
    return [json.loads(line) for line in (out / "data.jsonl").read_text().splitlines()]


def test_the_calls_of_one_agent_are_exported_alone(store: Path, tmp_path: Path) -> None:
    every = exported("transitions", store, tmp_path / "all")
    assert {row["agent"] for row in every} == {"planner", "solver", ""}
    planner = exported("transitions", store, tmp_path / "planner", agents=["planner"])
    assert {row["agent"] for row in planner} == {"planner"}
    manifest = json.loads((tmp_path / "planner" / "manifest.json").read_text())
    assert manifest["left_out"]["calls of other agents"] >= len(every) - len(planner) > 0
    assert manifest["config"]["agents"] == ["planner"]
    rows = exported("sft", store, tmp_path / "sft", agents=["solver"])
    assert rows
    assert all('"answer"' in row["completion"][0]["content"] for row in rows)


def test_agents_are_refused_for_rows_of_whole_rollouts(store: Path, tmp_path: Path) -> None:
    for kind, options in (("grpo", {}), ("sft", {"whole": True})):
        with pytest.raises(ConfigError, match="agents"):
            exported(kind, store, tmp_path / kind, agents=["planner"], **options)


# Credit


def test_each_agent_is_compared_with_itself() -> None:
    """A planner that asks twice does not shift the turns of the solver.

    Rollouts: planner, solver with the score 1; planner, planner, solver with the score 0. Returns to go are 1, 1 and
    0, 0, 0. Per agent the means at each turn are: planner 0.5 and (1 + 0) / 2, where the ended rollout counts with its
    last return; solver 0.5. So every call of the first rollout has +0.5, every call of the second one -0.5.
    """
    baselines = AgentBaselines(lambda: Baseline(leave_one_out=False, scale=False))
    first, second = (returns(rewards) for rewards in ([0.0, 1.0], [0.0, 0.0, 0.0]))
    of_first, of_second = ["planner", "solver"], ["planner", "planner", "solver"]
    baselines.add(first, of_first)
    baselines.add(second, of_second)
    assert baselines.advantages(first, of_first) == [0.5, 0.5]
    assert baselines.advantages(second, of_second) == [-0.5, -0.5, -0.5]


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(st.lists(st.floats(-1, 1), min_size=1, max_size=5), min_size=1, max_size=6))
def test_a_program_without_named_agents_is_recorded_as_before(group: list[list[float]]) -> None:
    plain, named = Baseline(), AgentBaselines(Baseline)
    for credited in group:
        plain.add(credited)
        named.add(credited)
    assert [named.advantages(credited) for credited in group] == [plain.advantages(credited) for credited in group]
    assert named.has_variance == plain.has_variance


def test_a_wrong_number_of_agents_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 agents for 2 calls"):
        AgentBaselines(Baseline).add([0.0, 1.0], ["planner"])
