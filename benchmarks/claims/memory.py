"""Conversations whose facts were told in another one: `converse` without and with a memory.

Each person has two conversations about different services. In the second one the user does not tell its own facts again
(name, phone, street, language, way of payment, code). Both agents have the same demonstrations, guided runs on train
tasks. Only persons are used whose two tasks are both in the test split.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import dspy

import assay
from assay.datasets import Task, load_splits, load_tasks
from assay.evaluation import Evaluation
from assay.programs import Converse, Memory
from assay.programs.agent import GUIDE
from claims.conversations import grades
from claims.storing import Measured, Setting, held_out

DATA, PERSONS, DEMOS, GUIDED = "conversations:?facts=8-9&changes=0&size=600", 10, 12, 8


def measure(setting: Setting) -> Measured:
    first, second = (
        {task.id.split("-", 1)[1]: task for task in load_tasks(f"{DATA}&seed={setting.seed}&meeting={meeting}")}
        for meeting in ("first", "second")
    )
    train, sealed = _of_split(setting, "train"), _of_split(setting, "test")
    persons = [key for key in first if first[key].id in sealed and second[key].id in sealed][:PERSONS]
    guided = [task for task in first.values() if task.id in train][:GUIDED]
    memory = Memory(setting.scratch / "memory.db", name=f"seed{setting.seed}")
    sides = {"before": _taught(Converse(prompt_format="lean"), guided, setting)}
    sides["after"] = _taught(Converse(prompt_format="lean", memory=memory), guided, setting)
    first_talks = _evaluated(setting, sides["after"], [first[key] for key in persons])
    evaluations = {
        side: _evaluated(setting, program, [second[key] for key in persons]) for side, program in sides.items()
    }
    values: dict[str, Any] = {
        name: {side: grades(evaluation, figure) for side, evaluation in evaluations.items()}
        for name, figure in (("remembered", "completed"), ("remembered_filled", "filled"))
    }
    return Measured(values=values, facts={"persons": len(persons), "first": grades(first_talks, "filled")})


def _of_split(setting: Setting, split: str) -> set[str]:
    """Ids of the tasks of both meetings in a split."""
    ids = set[str]()
    for meeting in ("first", "second"):
        splits = load_splits(f"{DATA}&seed={setting.seed}&meeting={meeting}", salt="assay")
        ids |= {task.id for task in (splits.unseal() if split == "test" else getattr(splits, split))}
    return ids


def _taught(program: Converse, tasks: Sequence[Task], setting: Setting) -> Converse:
    """The program with steps of guided runs as demonstrations, the same ones at each call."""
    steps: dict[str, list[Mapping[str, Any]]] = {}
    names = {id(predictor): name for name, predictor in program.named_predictors()}
    lm = assay.get_lm(setting.model)  # a guided run makes no call
    for task in tasks:
        with dspy.context(lm=lm, trace=[], **{GUIDE: dict(task.expected)}):
            program.execute(task)
            for predictor, inputs, output in dspy.settings.trace:
                steps.setdefault(names[id(predictor)], []).append({**inputs, **dict(output.items())})
    rng = random.Random(setting.seed)
    for name, predictor in program.named_predictors():
        some = rng.sample(steps.get(name, []), min(DEMOS, len(steps.get(name, []))))
        predictor.demos = [dspy.Example(augmented=True, **fields) for fields in some]
    return program


def _evaluated(setting: Setting, program: Converse, tasks: Sequence[Task]) -> Evaluation:
    rows = [
        {
            "id": t.id,
            "inputs": dict(t.inputs),
            "expected": dict(t.expected),
            "metadata": dict(t.metadata),
            "split": "test",
        }
        for t in tasks
    ]
    return held_out(
        setting,
        program,
        rubric="converse",
        data=rows,
        model=setting.model,
        parameters={"temperature": 0.1},
        store=setting.scratch / "memory.db",
    )
