"""Right answers of `math_qa` trained on the bare outcome, and on its shipped rubric with step rewards.

Both arms start from the same model, with the same tasks, rollouts and steps. The warm-up shows how calls are written,
by a scripted agent that seldom calls the calculator and often with a wrong expression, so that right answers are rare:
the case where more rewards than the outcome should help. The shipped rubric weights the outcome, the use of the tool
and the length of the answer, and rewards each step. Final score: the share of right answers on sealed tasks, one
sampled run each at temperature 1.
"""

import random
import re
from typing import Any

import dspy

from assay.programs.agent import WRITTEN_DECISIONS
from claims.storing import Measured, Setting, held_out
from claims.trained import train, use_scratch_adapters, warmed_up

DATA = "arithmetic:terms=2&digits=2-3&size=400"
WARM, WARM_RATE, TEST = 40, 1e-3, 32
STEPS, GROUP, PROMPTS, RATE = 6, 6, 2, 3e-4
PARAMETERS = {"max_steps": 2, "reasoning_depth": 1}
CALLS, RIGHT = 0.4, 0.5  # how often the scripted agent calls the tool, and with all terms
BARE = """name: bare
criteria:
  - {name: correct, weight: 1, check: "assay.rubrics.checks:numeric", with: {field: answer}}
"""
ANY = """name: any
criteria:
  - {name: ended, weight: 1, check: "claims.edit_agent:ended"}
"""


def measure(setting: Setting) -> Measured:
    folder = setting.scratch
    use_scratch_adapters(setting)
    rubrics = {"before": str(folder / "bare.yaml"), "after": "math_qa"}
    (folder / "bare.yaml").write_text(BARE)
    (folder / "any.yaml").write_text(ANY)
    warm = seldom_calling(setting)
    by_side, curves = {}, {}
    for side, rubric in rubrics.items():
        curves[side] = train(
            setting,
            "math_qa",
            side,
            rubric=rubric,
            data=f"{DATA}&seed={setting.seed}",
            model=warm,
            prompt_format="lean",
            parameters=PARAMETERS,
            steps=STEPS,
            test=TEST,
            num_generations=GROUP,
            prompts_per_step=PROMPTS,
            learning_rate=RATE,
            max_completion=32,
            per_device_batch_size=GROUP,
        )
        by_side[side] = right(setting, f"{warm}+{side}")
    values: dict[str, Any] = {"correct": by_side}
    facts = {"curves": curves, "steps": STEPS, "rollouts": STEPS * GROUP * PROMPTS, "warm_up": WARM}
    return Measured(values=values, facts=facts)


def seldom_calling(setting: Setting) -> str:
    """A model that has seen the scripted agent; its name."""
    rng = random.Random(setting.seed)

    def answer(request: Any) -> str:
        asked, system = request.messages[-1].parts[0].text, str(request.system)
        question, _, results = asked.partition("results:")
        if "Choose the next action" in system:
            return f"action: {'calculator' if rng.random() < CALLS else 'answer'}"
        if "Write the next call" in system:
            terms = " ".join(re.findall(r"\d+|[-+*]", question))
            return f"expression: {terms if rng.random() < RIGHT else terms.split()[0]}"
        numbers = re.findall(r"-?\d+", results)
        return f"answer: {numbers[-1] if numbers else rng.randrange(10, 1500)}"

    with dspy.context(**{WRITTEN_DECISIONS: True}):  # decisions as a policy in training writes them
        return warmed_up(
            setting,
            "math_qa",
            answer,
            rows=WARM,
            learning_rate=WARM_RATE,
            rubric=str(setting.scratch / "any.yaml"),
            data=f"{DATA}&seed={setting.seed}",
            prompt_format="lean",
            parameters=PARAMETERS,
        )


def right(setting: Setting, model: str) -> dict[str, float]:
    """Whether the answer is right, by sealed task."""
    with dspy.context(**{WRITTEN_DECISIONS: True}):  # sampled, not by the threshold
        evaluation = held_out(
            setting,
            "math_qa",
            rubric=str(setting.scratch / "bare.yaml"),
            data=f"{DATA}&seed={setting.seed}",
            test=TEST,
            model=model,
            prompt_format="lean",
            parameters={**PARAMETERS, "temperature": 1.0},
        )
    return dict(evaluation.scores)
