"""An agent on OpenAI's SDK, trained on-policy as it is, and the same agent written in DSPy.

The foreign agent is `examples/any_agent/openai_agent.py`; the trainer serves the policy to it and knows nothing else of
it. The twin below has its instructions, examples, tool and two calls. Both are trained from the embedded model with the
same tasks, rollouts and steps, and answer the same sealed sums before and after, greedily.
"""

import sys
from pathlib import Path
from typing import Any

import dspy

from assay.optimizers.finetuning import PolicyReport
from assay.traces import Store
from claims.storing import ROOT, Measured, Setting
from claims.trained import curve, trained, use_scratch_adapters

EXAMPLE = ROOT / "examples" / "any_agent"
sys.path.append(str(EXAMPLE))
from openai_agent import EXAMPLES, calculated  # noqa: E402

AGENT = f"{EXAMPLE / 'openai_agent.py'}:solve"
DATA = "arithmetic:terms=4-5&digits=2-3&size=600"
STEPS, GROUP, PROMPTS, RATE, TEST = 10, 6, 3, 3e-4, 40


class Twin(dspy.Module):
    """Asks for a calculation, does it, and asks for the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.write = dspy.Predict(dspy.Signature("question -> calculation", "Write the calculation."))
        self.answer = dspy.Predict(dspy.Signature("question, calculation, result -> answer", "Write the answer."))
        fields = ("question", "calculation", "result")
        rows = [dict(zip(fields, example, strict=True)) for example in EXAMPLES]
        self.write.demos = [dspy.Example(question=row["question"], calculation=row["calculation"]) for row in rows]
        self.answer.demos = [dspy.Example(**row, answer=row["result"]) for row in rows]

    def forward(self, question: str) -> dspy.Prediction:
        calculation = self.write(question=question).calculation
        result = calculated(calculation.strip())
        return self.answer(question=question, calculation=calculation, result=result)


def measure(setting: Setting) -> Measured:
    foreign = trained_agent(setting, "foreign", agent=AGENT)
    twin = trained_agent(setting, "twin", program=f"{__file__}:Twin", prompt_format="lean")
    return Measured(values={**foreign.values, **twin.values}, facts={**foreign.facts, **twin.facts})


def trained_agent(setting: Setting, name: str, *, program: str | None = None, **options: Any) -> Measured:
    """Trains an agent; the figure `name` has its greedy scores, the fact `name` how it went.

    Args:
        options: of `assay.train`, such as `agent`.
    """
    use_scratch_adapters(setting)
    report = trained(
        setting,
        program,
        name,
        rubric=str(EXAMPLE / "sums.yaml"),
        data=f"{DATA}&seed={setting.seed}",
        model=setting.model,
        steps=STEPS,
        sizes={"test": TEST, "val": 2},
        num_generations=GROUP,
        prompts_per_step=PROMPTS,
        learning_rate=RATE,
        max_completion=40,
        per_device_batch_size=GROUP,
        threads=2,
        **options,
    )
    facts = {"steps": STEPS, "rollouts": STEPS * GROUP * PROMPTS, name: facts_of(report)}
    return Measured(values={name: greedy_scores(setting.scratch / f"{name}.db")}, facts=facts)


def greedy_scores(store: Path) -> dict[str, dict[str, float]]:
    """Scores of the greedy runs on sealed tasks, before and after the training, by task."""
    scores: dict[str, dict[str, float]] = {"before": {}, "after": {}}
    with Store(store) as opened:
        rollouts = [opened.rollout(row.id) for row in opened.rollouts(limit=None) if row.phase == "test"]
    called = [rollout for rollout in rollouts if rollout.transitions]
    for rollout in sorted(called, key=lambda rollout: rollout.transitions[0].started_at):
        side = "after" if rollout.transitions[0].adapters else "before"
        score = float("nan") if rollout.score is None else rollout.score
        scores[side].setdefault(rollout.task_id, score)  # each task is run greedily first, then sampled
    return scores


def facts_of(report: PolicyReport) -> dict[str, Any]:
    """Samples (rollouts) a second while they are made, and in the whole training; the curve."""
    ends = report.validation[next(iter(report.validation))]
    rollouts, seconds = report.row_stats.rollouts, report.row_stats.seconds
    return {
        "curve": curve(report),
        "samples_per_s": round(rollouts / seconds["rollouts"], 3),
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "sampled": {side: ends["sampled"][side]["score"] for side in ("before", "after")},
    }
