"""Conversations of 10 to 20 turns: the shipped program `converse`, plain and fine-tuned.

The tasks are those of `conversations`. The model is fine-tuned on conversations about train tasks in which a scripted
agent takes its place and decides as the labels say (`ConversationGuide`, which also makes the demonstrations of
`conversations`). The agent has no demonstrations on either side.
"""

import json
import random
import re
from typing import Any

import assay
from assay.evaluation import Evaluation
from assay.optimizers.finetuning import SFTSettings, train_sft
from assay.programs import Converse
from assay.shipped.programs.converse.program import ConversationGuide
from assay.testing.fakes import scripted_lm
from assay.traces.export.settings import Gates
from assay.traces.places import current_rollout
from claims.conversations import grades
from claims.storing import Lines, Measured, Setting, held_out
from claims.trained import use_scratch_adapters

DATA = "conversations:?facts=9-10&changes={changes}&size=400&seed={seed}"
CHANGES, TRAIN_CHANGES = 0.2, 1  # corrections and delays are rare, so each conversation to learn from has one of each
TALKS, TEST = 24, 12
ROWS = {"note": 72, "note another": 40, "choose": 64, "ask": 16}  # kind of a call -> calls to train on
LONGEST = 600  # characters of such a call: most of the time goes into the long ones
RATE, EPOCHS = 1e-3, 1


def measure(setting: Setting) -> Measured:
    use_scratch_adapters(setting)
    models = {"before": setting.model, "after": trained(setting)}
    evaluations = {side: evaluated(setting, model) for side, model in models.items()}
    values: dict[str, Any] = {
        figure: {side: grades(evaluation, figure) for side, evaluation in evaluations.items()}
        for figure in ("completed", "filled")
    }
    rows = len((setting.scratch / "some.jsonl").read_text().splitlines())
    return Measured(values=values, facts={"conversations": TALKS, "rows": rows})


def trained(setting: Setting) -> str:
    """The model after fine-tuning on calls of guided conversations; its name."""
    folder = setting.scratch
    assay.collect(
        Converse(prompt_format="lean"),
        lm=scripted_lm(guided),
        n=1,
        rubric="converse",
        data=DATA.format(changes=TRAIN_CHANGES, seed=setting.seed),
        sizes={"train": TALKS},
        parameters={"temperature": 0.1},
        store=folder / "guided.db",
        threads=1,
    )
    assay.export("sft", folder / "rows", store=folder / "guided.db", gates=Gates(min_clean=0))
    lines = (folder / "rows" / "data.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if characters(row) <= LONGEST]
    random.Random(setting.seed).shuffle(rows)
    some = [row for kind, count in ROWS.items() for row in [one for one in rows if kind_of(one) == kind][:count]]
    (folder / "some.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in some))
    settings = SFTSettings(
        model=setting.model, epochs=EPOCHS, learning_rate=RATE, eval_fraction=0.0, min_quality=0.0, seed=setting.seed
    )
    return str(train_sft(folder / "some.jsonl", "guided", settings, progress=Lines()).name)


def kind_of(row: dict[str, Any]) -> str:
    """The predictor of a call; `note another` if the field that was noted is not the one that was asked for."""
    inputs, outputs = (fields_of(row[part][-1]["content"]) for part in ("prompt", "completion"))
    if "field" in outputs:
        return "note" if outputs["field"] == inputs["asked"] else "note another"
    return "choose" if "about" in outputs else "ask"


def fields_of(text: str) -> dict[str, str]:
    return dict(re.findall(r"(?m)^(\w+): (.*)$", text))


def guided(request: Any) -> str:
    """What the labels of the running task say that a predictor of `converse` should write."""
    rollout = current_rollout()
    assert rollout is not None  # `assay.collect` records each run
    guide = ConversationGuide.of(rollout.expected, rollout.inputs["user"])
    assert guide is not None  # the tasks have an outcome
    inputs = fields_of(request.messages[-1].parts[0].text)
    if "asked" in inputs:
        field, value = guide.noted(inputs["asked"], inputs["message"]) or ("none", "none")
        return f"field: {field}\nvalue: {value}"
    if "missing" in inputs:
        return f"about: {inputs['missing'].split(', ')[0]}"
    return f"question: {guide.asked(inputs['field'])}"


def characters(row: dict[str, Any]) -> int:
    return sum(len(message["content"]) for message in (*row["prompt"], *row["completion"]))


def evaluated(setting: Setting, model: str) -> Evaluation:
    return held_out(
        setting,
        Converse(prompt_format="lean"),
        rubric="converse",
        data=DATA.format(changes=CHANGES, seed=setting.seed),
        test=TEST,
        model=model,
        parameters={"temperature": 0.1},
    )
