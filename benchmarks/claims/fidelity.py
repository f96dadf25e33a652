"""Fidelity of simulated users: one with the model, and the rule-based one, in the same interviews."""

import dspy

import assay
from assay.datasets import load_tasks
from assay.judges.quality.fidelity import FAULTS, faults_of, interview
from assay.programs import RuleBasedUser, SimulatedUser, UserProgram
from claims.storing import Measured, Setting

DATA, TASKS = "conversations:?facts=9-10&changes=0.2", 12


def measure(setting: Setting) -> Measured:
    tasks = load_tasks(f"{DATA}&size={TASKS}&seed={setting.seed}")
    lm = assay.get_lm(setting.model, temperature=0.1, seed=setting.seed)
    users: dict[str, UserProgram] = {"before": SimulatedUser(prompt_format="lean"), "after": RuleBasedUser()}
    made: dict[str, dict[str, dict[str, bool]]] = {}
    for side, user in users.items():
        with dspy.context(lm=lm):
            made[side] = {task.id: faults_of(interview(user, task)) for task in tasks}
    values = {
        "faithful": {side: {task: float(not any(f.values())) for task, f in of.items()} for side, of in made.items()},
        **{
            name: {side: {task: float(f[name]) for task, f in of.items()} for side, of in made.items()}
            for name in FAULTS
        },
    }
    return Measured(values=values, facts={"tasks": TASKS})
