"""The shipped program `text_to_sql`: writes a query, reads what the database says, and tries again."""

import re
from typing import Any, ClassVar, Unpack

import dspy
from dspy.utils.exceptions import AdapterParseError

from assay.errors import FailureKind
from assay.models.loops import ToolLoopDetector
from assay.programs.agent import GUIDE, Agent, AgentSettings
from assay.programs.sql import QueryError, QueryLimits, open_database, schema_text
from assay.programs.thinking import with_thought
from assay.traces.recorder import note_failure

_QUERY = 600  # characters that the model may write
_RECORDED_ROWS = 20  # rows of a result in traces
_SPACES = re.compile(r"""('(?:[^']|'')*'|"(?:[^"]|"")*")|(?:\s|--[^\n]*)+""")


class TextToSQL(Agent):
    """Answers questions about a database with one reading query.

    Inputs are `question` and `database`, the path of an SQLite file or a URL of PostgreSQL. The output is `sql` with
    its `rows` (None if no query was accepted), `truncated`, `cost` and `steps`. The schema is read from the database:
    all of it if it fits into half of `context_length`, otherwise the tables that the question is about.

    A query that the database refuses is answered by its error, with the nearest names that exist, and rewritten, up
    to `max_steps` times; the same query with the same error twice ends the run with the failure kind `loop`. Queries
    can only read, and are stopped at the limits.

    Demonstrations show the tables that the query was written for: a training task with an expected `sql` is run with
    that query, without a model. The model thinks from `reasoning_depth` 4 on. `tool_usage_threshold` has no effect:
    every query is run.

    Args:
        rows, steps, seconds, characters: of `QueryLimits`, the limits of a query.
    Raises:
        ConfigError: a limit is not above 0, or `database` is neither a file nor a URL.
    """

    input_names: ClassVar = ("question", "database")
    guided: ClassVar = True

    def __init__(
        self,
        *,
        rows: int = 200,
        steps: int = 10_000_000,
        seconds: float = 2.0,
        characters: int = 2000,
        **agent: Unpack[AgentSettings],
    ) -> None:
        super().__init__(**agent)
        self.limits = QueryLimits(rows=rows, steps=steps, seconds=seconds, characters=characters)
        self.config = {"rows": rows, "steps": steps, "seconds": seconds, "characters": characters}
        fields = {
            "tables": (str, dspy.InputField(desc="tables with their columns; -> is a reference")),
            "question": (str, dspy.InputField()),
            "errors": (str, dspy.InputField(desc="earlier queries, and what the database said")),
            "sql": (str, dspy.OutputField(desc="one query", max_length=_QUERY)),
        }
        self.write = dspy.Predict(dspy.Signature(fields, "Write one SQL query that answers the question."))

    def solve(self, **inputs: Any) -> dspy.Prediction:
        database = open_database(str(inputs.get("database", "")))
        limits = self.limits
        tool = dspy.Tool(lambda sql: database.query(sql, limits), name="query")
        question = str(inputs.get("question", ""))
        # at four characters per token, half of the context is for the schema
        values = {
            "tables": schema_text(database.tables(), question, 2 * self.agent_parameters.context_length),
            "question": question,
        }
        expected = (dspy.settings.get(GUIDE) or {}).get("sql")
        label = _on_one_line(expected) if isinstance(expected, str) else ""
        errors: list[str] = []
        steps: list[dict[str, Any]] = []
        loops = ToolLoopDetector()
        sql, result = "", None
        for _ in range(self.agent_parameters.max_steps):
            try:
                sql = self._demonstrated(values, label) if label and not steps else self._written(values, errors)
            except AdapterParseError:
                errors.append("a query that could not be read")
                continue
            step: dict[str, Any] = {"tool": "query", "arguments": {"sql": sql}, "result": None, "error": None}
            steps.append(step)
            try:
                result = tool(sql=sql)
            except QueryError as error:
                step["error"] = str(error)
                errors.append(f"{sql}: {error}")
                if loops.add("query", {"sql": sql}, str(error)) is not None:
                    note_failure(FailureKind.LOOP)
                    break
                continue
            step["result"] = str(result.rows[:_RECORDED_ROWS])
            break
        if result is None:
            return dspy.Prediction(sql=sql, rows=None, truncated=False, cost=None, steps=steps)
        rows = [[value.hex() if isinstance(value, bytes) else value for value in row] for row in result.rows]
        return dspy.Prediction(sql=sql, rows=rows, truncated=result.truncated, cost=result.cost, steps=steps)

    def _demonstrated(self, values: dict[str, str], label: str) -> str:
        """The expected query, as a step in the trace that the predictor made."""
        if dspy.settings.trace is not None:
            inputs = self.fit_context(self.write, self.write.signature, dict(values), [], "errors")
            dspy.settings.trace.append((self.write, inputs, dspy.Prediction(sql=label)))
        return label

    def _written(self, values: dict[str, str], errors: list[str]) -> str:
        signature = with_thought(self.write.signature, self.deep_thought_tokens)
        filled = self.fit_context(self.write, signature, dict(values), errors, "errors")
        return _on_one_line(str(self.write(signature=signature, **filled).sql))


def _on_one_line(sql: str) -> str:
    """A query without line comments, and without spaces that mean nothing; texts and names in quotes stay."""
    return _SPACES.sub(lambda match: match[1] or " ", sql).strip()
