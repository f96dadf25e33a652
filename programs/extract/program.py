"""The program `extract`: reads the fields that the data expects from a text."""

from collections.abc import Sequence
from typing import Unpack

import dspy

from assay.datasets import Task
from assay.errors import ProgramError
from assay.programs.agent import AgentSettings, OneCallAgent


class Extract(OneCallAgent):
    """Extracts typed fields from a text.

    Args:
        fields: field name -> JSON type (`string`, `integer`, `number`, `boolean`).
    """

    def __init__(self, fields: dict[str, str], **agent: Unpack[AgentSettings]) -> None:
        super().__init__(**agent)
        kinds = {"string": str, "integer": int, "number": float, "boolean": bool}
        if not isinstance(fields, dict):
            raise ProgramError(f"fields={fields!r} must be a mapping of names to types, such as {{'city': 'string'}}")
        if not fields:
            raise ProgramError("extract reads its fields from the data: compile it and run the artifact")
        if unknown := sorted(set(fields.values()) - kinds.keys()):
            raise ProgramError(f"extract needs fields of the types {sorted(kinds)}, got {unknown}")
        if clash := {"text", "thought", "draft"} & fields.keys():
            raise ProgramError(f"extract cannot have fields named {sorted(clash)}")
        self.config = {"fields": dict(fields)}
        outputs = {
            name: (kinds[kind], dspy.OutputField(max_length=500) if kind == "string" else dspy.OutputField())
            for name, kind in fields.items()
        }
        self.predict = dspy.Predict(
            dspy.Signature({"text": (str, dspy.InputField()), **outputs}, f"Extract {', '.join(fields)} from the text.")
        )

    @classmethod
    def from_tasks(cls, tasks: Sequence[Task]) -> "Extract":
        """Creates the program with the expected fields of the tasks; a field with several types is a string."""
        types: dict[str, set[str]] = {}
        names = {bool: "boolean", int: "integer", float: "number"}
        for task in tasks:
            for name, value in task.expected.items():
                types.setdefault(name, set()).add(names.get(type(value), "string"))
        return cls({name: kinds.pop() if len(kinds) == 1 else "string" for name, kinds in sorted(types.items())})
