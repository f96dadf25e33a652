"""Instructions of SQLite's machine that a query needs, before and after training with `query_cost`.

The questions are those about the clinic in `sql.py`, of which the database has indexes of town and patient. The policy
starts from a warm-up on right queries that mostly compare by LIKE, which no index serves, and sometimes by `=`. It then
answers train questions at temperature 1, scored by the shipped rubric `text_to_sql`, whose criterion `query_cost`
counts among right answers, and is fine-tuned on those of its own answers that score at least `LEAST`. As a control it
is fine-tuned on all of the same answers that have the right rows. All sides answer the same sealed questions greedily;
instructions are compared on those that all of them answer rightly.
"""

import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import assay
from assay.optimizers.finetuning import SFTSettings, train_sft
from assay.traces.export.settings import Gates
from claims.sql import CLINIC, made, questions
from claims.storing import Lines, Measured, Setting, held_out
from claims.trained import use_scratch_adapters, warmed_up

PER_KIND, TEST = 120, 90
SPLITS = ("train", "train", "train", "test", "test", "test", "test")
WARM, WARM_EPOCHS, WARM_RATE, CHEAP = 64, 3, 1e-3, 0.3  # CHEAP: share of the warm-up's queries that compare by =
SAMPLES, EPOCHS, RATE = 6, 2, 5e-4  # answers of each train question; of the training on them
LEAST = {"cost": 0.9, "control": 0.8}  # scores: 0.92 for the expected query, 0.83 for one that reads a whole table
PARAMETERS = {"max_steps": 1}
MOST = 1_000_000  # instructions: a grade is at most 1
RIGHT = """name: right
criteria:
  - {name: rows_match, weight: 4, check: "rows_match", essential: {pass_at: 1, cap: 0.2}}
  - {name: query_runs, weight: 1, check: "query_runs"}
"""
FIGURES = f"""name: figures
criteria:
  - {{name: right, weight: 1, check: "rows_match"}}
  - {{name: steps, weight: 1, check: "{__file__}:share_of_most"}}
"""


def share_of_most(task: Any, prediction: dict[str, Any], rollout: Any) -> float:
    """Instructions of the query, as a share of `MOST`; all of it where the database accepted none."""
    return min(MOST, prediction["cost"] or MOST) / MOST


def measure(setting: Setting) -> Measured:
    folder = setting.scratch
    use_scratch_adapters(setting)
    (folder / "right.yaml").write_text(RIGHT)
    (folder / "figures.yaml").write_text(FIGURES)
    tasks = written_tasks(setting)
    warm = mostly_dear(setting, tasks)
    assay.collect(
        "text_to_sql",
        rubric="text_to_sql",
        data=tasks,
        model=warm,
        n=SAMPLES,
        prompt_format="lean",
        parameters={**PARAMETERS, "temperature": 1.0},
        seed=setting.seed,
        store=folder / "answers.db",
        threads=1,
        progress=Lines(),
    )
    rows, models = dict[str, int](), {"before": warm}
    for name, least in LEAST.items():
        exported = assay.export(
            "sft", folder / f"{name}-rows", store=folder / "answers.db", min_quality=least, gates=Gates(min_clean=0)
        )
        settings = SFTSettings(
            model=warm, epochs=EPOCHS, learning_rate=RATE, min_quality=least, eval_fraction=0.0, seed=setting.seed
        )
        rows[name] = exported.rows
        models[name] = str(train_sft(folder / f"{name}-rows", name, settings, progress=Lines()).name)
    models["after"] = models.pop("cost")
    grades = {side: answered(setting, tasks, model) for side, model in models.items()}
    right = {side: {task: of["right"] for task, of in tasks_of.items()} for side, tasks_of in grades.items()}
    both = [task for task in right["before"] if all(of[task] == 1 for of in right.values())]
    steps = {side: {task: tasks_of[task]["steps"] * MOST for task in both} for side, tasks_of in grades.items()}
    facts = {"rows": rows, "answers_a_question": SAMPLES, "warm_up": WARM * WARM_EPOCHS}
    return Measured(values={"right": right, "instructions": steps}, facts=facts)


def written_tasks(setting: Setting) -> str:
    """Writes the database with its indexes, and the questions; the path of these."""
    database, path = setting.scratch / "clinic.sqlite", setting.scratch / "questions.jsonl"
    made(CLINIC, database, setting.seed)
    with closing(sqlite3.connect(database)) as opened:
        opened.execute(f"CREATE INDEX by_town ON {CLINIC.one} ({CLINIC.name})")
        opened.execute(f"CREATE INDEX by_patient ON {CLINIC.many} ({CLINIC.one}Id)")
        opened.commit()
    rows = questions(CLINIC, database, setting.seed, SPLITS, PER_KIND)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def mostly_dear(setting: Setting, tasks: str) -> str:
    """A model that has seen right queries, most of which compare by LIKE; its name."""
    rng = random.Random(setting.seed)
    rows = map(json.loads, Path(tasks).read_text().splitlines())
    sql_of = {row["inputs"]["question"]: row["expected"]["sql"] for row in rows if row["split"] == "train"}

    def answer(request: Any) -> str:
        asked = request.messages[-1].parts[0].text
        sql = next(sql for question, sql in sql_of.items() if question in asked)
        return f"sql: {sql if rng.random() < CHEAP else sql.replace(' = ', ' LIKE ')}"

    return warmed_up(
        setting,
        "text_to_sql",
        answer,
        rows=WARM,
        epochs=WARM_EPOCHS,
        learning_rate=WARM_RATE,
        rubric=str(setting.scratch / "right.yaml"),
        data=tasks,
        prompt_format="lean",
        parameters=PARAMETERS,
    )


def answered(setting: Setting, tasks: str, model: str) -> dict[str, dict[str, float]]:
    """Grades by sealed question."""
    evaluation = held_out(
        setting,
        "text_to_sql",
        rubric=str(setting.scratch / "figures.yaml"),
        data=tasks,
        test=TEST,
        model=model,
        prompt_format="lean",
        parameters={**PARAMETERS, "temperature": 0.1},
    )
    return {task: dict(result.grades) for task, result in evaluation.results.items()}
