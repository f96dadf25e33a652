"""`answer_from_documents` on generated documents: the model as it is, and fine-tuned on guided runs.

The tasks are those of `documents`. The model is fine-tuned on runs on train tasks in which a scripted agent takes its
place and reads and answers as the labels say. The agent has no demonstrations on either side.
"""

import json
import random
from typing import Any

import assay
from assay.optimizers.finetuning import SFTSettings, train_sft
from assay.programs import AnswerFromDocuments
from assay.testing.fakes import scripted_lm
from assay.traces.export.settings import Gates
from assay.traces.places import current_rollout
from claims.documents import COMPILING, FIGURES, K, grades
from claims.storing import Lines, Measured, Setting
from claims.trained import use_scratch_adapters

TRAIN = 120
ROWS = {"answers: yes": 64, "answers: no": 64, "answer:": 64}  # how a call answers -> calls to train on
RATE, EPOCHS = 1e-3, 2


def measure(setting: Setting) -> Measured:
    use_scratch_adapters(setting)
    agent = AnswerFromDocuments(prompt_format="lean", k=K)
    models = {"before": setting.model, "after": trained(setting, agent)}
    evaluations = {side: COMPILING.evaluated(setting, agent, model) for side, model in models.items()}
    values: dict[str, Any] = {
        "score": {side: evaluation.scores for side, evaluation in evaluations.items()},
        **{
            figure: {side: grades(evaluation, figure) for side, evaluation in evaluations.items()} for figure in FIGURES
        },
    }
    rows = len((setting.scratch / "some.jsonl").read_text().splitlines())
    return Measured(values=values, facts={"train_tasks": TRAIN, "rows": rows})


def trained(setting: Setting, agent: AnswerFromDocuments) -> str:
    """The model after fine-tuning on calls of guided runs; its name."""
    folder = setting.scratch
    assay.collect(
        agent,
        lm=scripted_lm(guided, logprobs=True),  # as the embedded model: a reading is one word
        n=1,
        rubric=COMPILING.rubric,
        data=f"{COMPILING.data}&seed={setting.seed}",
        sizes={"train": TRAIN},
        parameters={"temperature": 0.1},
        store=folder / "guided.db",
        threads=1,
    )
    assay.export("sft", folder / "rows", store=folder / "guided.db", gates=Gates(min_clean=0))
    rows = [json.loads(line) for line in (folder / "rows" / "data.jsonl").read_text().splitlines()]
    random.Random(setting.seed).shuffle(rows)
    some = [
        row
        for start, count in ROWS.items()
        for row in [one for one in rows if one["completion"][-1]["content"].startswith(start)][:count]
    ]
    (folder / "some.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in some))
    settings = SFTSettings(
        model=setting.model, epochs=EPOCHS, learning_rate=RATE, eval_fraction=0.0, min_quality=0.0, seed=setting.seed
    )
    return str(train_sft(folder / "some.jsonl", "guided", settings, progress=Lines()).name)


def guided(request: Any) -> str:
    """What the labels of the running task say that a predictor of the agent should write."""
    rollout = current_rollout()
    assert rollout is not None  # `assay.collect` records each run
    task = str(request.system)
    asked = request.messages[-1].parts[0].text
    passages = rollout.expected.get("passages", [])
    if "search for" in task:
        return f"query: {rollout.inputs['question']}"
    if "Does the passage say" in task:
        return f"answers: {'yes' if any(passage in asked for passage in passages) else 'no'}"
    return f"answer: {rollout.expected['answer']}"
