"""Several named agents in a rollout: recorded, credited and exported apart."""

import json
from pathlib import Path
from typing import Any

import dspy
import pytest
from hypothesis import given, strategies as st

import assay
from assay.errors import ConfigError
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


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"question": f"{n} + 2", "answer": "4" if n != 3 else "5", "split": "train"} for n in range(2, 6)]
    rows += [{"question": "9 + 9", "answer": "18", "split": "val"}]
    path = tmp_path_factory.mktemp("agents") / "s.db"
    assay.collect(Team(), rubric="exact", data=rows, lm=scripted_lm(script), n=2, prompt_format="json", store=path)
    return path


def exported(kind: str, store: Path, out: str, **options: Any) -> list[dict[str, Any]]:
    assay.export(kind, out, store=store, gates=Gates(min_clean=0), privacy="patterns", **options)
    return [json.loads(line) for line in (Path(out) / "data.jsonl").read_text().splitlines()]


def test_calls_are_recorded_with_the_name_of_their_agent(store: Path) -> None:
    with Store(store) as opened:
        rollouts = [opened.rollout(rollout.id) for rollout in opened.rollouts(split="train")]
    names = {rollout.inputs["question"]: [call.agent for call in rollout.transitions] for rollout in rollouts}
    assert names["2 + 2"] == ["planner", "planner", "solver", ""]
    assert names["5 + 2"] == ["planner", "solver", ""]


def test_the_calls_of_one_agent_are_exported_alone(store: Path) -> None:
    every, planner = exported("transitions", store, "all"), exported("transitions", store, "p", agents=["planner"])
    assert {row["agent"] for row in every} == {"planner", "solver", ""}
    assert {row["agent"] for row in planner} == {"planner"}
    manifest = json.loads(Path("p/manifest.json").read_text())
    assert manifest["left_out"]["calls of other agents"] >= len(every) - len(planner) > 0
    assert manifest["config"]["agents"] == ["planner"]
    rows = exported("sft", store, "sft", agents=["solver"])
    assert rows
    assert all('"answer"' in row["completion"][0]["content"] for row in rows)
    for kind, options in (("grpo", {}), ("sft", {"whole": True})):  # rows of whole rollouts
        with pytest.raises(ConfigError, match="agents"):
            exported(kind, store, kind, agents=["planner"], **options)


def test_each_agent_is_compared_with_itself() -> None:
    """A planner that asks twice does not shift the turns of the solver.

    Rollouts: planner, solver with the score 1; planner, planner, solver with the score 0. Returns to go are 1, 1 and
    0, 0, 0. Per agent the means at each turn are: planner 0.5 and (1 + 0) / 2, where the ended rollout counts with its
    last return; solver 0.5. So every call of the first rollout has +0.5, every call of the second one -0.5.
    """
    baselines = AgentBaselines(lambda: Baseline(leave_one_out=False, scale=False))
    first, second = returns([0.0, 1.0]), returns([0.0, 0.0, 0.0])
    of_first, of_second = ["planner", "solver"], ["planner", "planner", "solver"]
    baselines.add(first, of_first)
    baselines.add(second, of_second)
    assert baselines.advantages(first, of_first) == [0.5, 0.5]
    assert baselines.advantages(second, of_second) == [-0.5, -0.5, -0.5]


@given(st.lists(st.lists(st.floats(-1, 1), min_size=1, max_size=5), min_size=1, max_size=6))
def test_a_program_without_named_agents_is_credited_as_one_agent(group: list[list[float]]) -> None:
    plain, named = Baseline(), AgentBaselines(Baseline)
    for credited in group:
        plain.add(credited)
        named.add(credited)
    assert [named.advantages(credited) for credited in group] == [plain.advantages(credited) for credited in group]
