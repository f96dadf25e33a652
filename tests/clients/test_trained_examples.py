"""Agents of examples/any_agent whose libraries are installed for these tests, trained unchanged."""

from pathlib import Path

import pytest
from harness import environment

from assay.commands.train import train
from assay.traces import Store

EXAMPLES = Path(__file__).parents[2] / "examples" / "any_agent"


@pytest.mark.slow
def test_the_langgraph_agent_of_the_examples_can_be_trained(tiny_model: Path) -> None:
    """A random model writes no calculation, so the agent calls it twice."""
    report = train(
        agent=f"{environment('newest')} {EXAMPLES / 'langgraph_agent.py'}", rubric=EXAMPLES / "sums.yaml",
        data="arithmetic:terms=2-2&digits=1-1&size=60", name="mine", model=str(tiny_model), steps=1, prompts_per_step=1,
        num_generations=2, lora_r=2, max_completion=8, max_length=4096, beta=0, evaluate_every=0,
        sizes={"test": 1, "val": 1},
    )  # fmt: skip
    assert report.row_stats.rollouts == 2
    with Store(Path(".assay") / "assay.db") as store:
        rollouts = [store.rollout(row.id) for row in store.rollouts(limit=None) if row.phase == "train"]
    for rollout in rollouts:
        assert rollout.status == "done", rollout.error
        assert len(rollout.transitions) == 2
        assert all(call.token_ids for call in rollout.transitions)
