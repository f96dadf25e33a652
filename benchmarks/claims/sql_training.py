"""Text to SQL on a schema that was not trained on: the model as it is, and fine-tuned on five other schemas.

The train databases are of a library, a school, a shop, farms and ships; the reported one is the clinic of
`claims.sql`, with the same four kinds of question. The rows are the expected queries as the agent would write them.
Trained and plain model answer the same questions.
"""

import json
import random
from typing import Any

from claims.query_cost import RIGHT
from claims.sql import LIBRARY, Schema, database, on_clinic, questions
from claims.storing import Measured, Setting
from claims.trained import use_scratch_adapters, warmed_up

SCHEMAS = (
    LIBRARY,
    Schema("Teacher", "District", "Age", "Course", "teachers", "courses"),
    Schema("Customer", "Region", "Points", "Purchase", "customers", "purchases"),
    Schema("Farmer", "Village", "Acres", "Field", "farmers", "fields"),
    Schema("Ship", "Harbour", "Length", "Voyage", "ships", "voyages"),
)
PER_KIND, ROWS, EPOCHS, RATE = 10, 160, 2, 1e-3


def measure(setting: Setting) -> Measured:
    use_scratch_adapters(setting)
    (setting.scratch / "right.yaml").write_text(RIGHT)
    rows = [
        row
        for schema in SCHEMAS
        for row in questions(schema, database(schema, setting), setting.seed, ("train",), PER_KIND)
    ]
    random.Random(setting.seed).shuffle(rows)
    sql_of = {row["inputs"]["question"]: row["expected"]["sql"] for row in rows}
    path = setting.scratch / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def answer(request: Any) -> str:
        asked = request.messages[-1].parts[0].text
        return f"sql: {next(sql for question, sql in sql_of.items() if question in asked)}"

    trained = warmed_up(
        setting,
        "text_to_sql",
        answer,
        rows=ROWS,
        epochs=EPOCHS,
        learning_rate=RATE,
        rubric=str(setting.scratch / "right.yaml"),
        data=str(path),
        prompt_format="lean",
        parameters={"max_steps": 1},
    )
    sides = {"before": ("text_to_sql", setting.model), "after": ("text_to_sql", trained)}
    facts = {"rows": min(ROWS, len(rows)), "schemas": len(SCHEMAS)}
    return Measured(values=on_clinic(setting, sides), facts=facts)
