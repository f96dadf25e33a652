"""Which columns of a dataset are inputs of the program, which are expected outputs, and which are neither."""

from collections.abc import Collection
from dataclasses import dataclass, field

from assay.datasets.fields import Fields
from assay.datasets.tasks import OTHER_COLUMNS, OWNERS, UNKNOWN, USUAL_OUTPUTS, Task


@dataclass
class Columns:
    """Names of the columns of a dataset, in the order in which they came."""

    inputs: dict[str, None] = field(default_factory=dict)
    expected: dict[str, None] = field(default_factory=dict)
    metadata: dict[str, None] = field(default_factory=dict)

    def add(self, task: Task) -> None:
        self.inputs |= dict.fromkeys(task.inputs)
        self.expected |= dict.fromkeys(task.expected)
        self.metadata |= dict.fromkeys(name for name in task.metadata if name not in (OTHER_COLUMNS, UNKNOWN))


def column_lines(columns: Columns, fields: Fields | None, compared: Collection[str]) -> list[str]:
    """What a run says first of its data: the inputs, the expected outputs, and columns that are neither.

    Args:
        fields: of the program, if they are known.
        compared: fields that the rubric's criteria name.
    """
    optional = {} if fields is None else fields.optional
    outputs = set() if fields is None or not fields.outputs else {*fields.outputs, *USUAL_OUTPUTS, *compared}
    other = [name for name in columns.expected if outputs and name not in outputs]
    expected = [name for name in columns.expected if name not in other]
    lines = [f"columns: inputs {_listed(columns.inputs, fields)}; expected {', '.join(expected) or 'none'}"]
    if absent := [name for name in optional if name not in columns.inputs]:
        lines.append(f"note: no column has the optional input {', '.join(absent)}")
    if other:
        where = "they are in task.expected, for checks that read them there"
        lines.append(f"note: neither inputs nor outputs of the program: {', '.join(other)}; {where}")
    if columns.metadata:
        lines.append(f"note: neither inputs nor expected: {', '.join(columns.metadata)}; they are in task.metadata")
    return lines


def used_columns(columns: Collection[str], fields: Fields) -> str:
    """What `assay run` says first of the columns of a file: the inputs, those of the owner, and those that it leaves
    out."""
    owners = [name for name in OWNERS if name in columns]
    unused = sorted(set(columns) - fields.inputs.keys() - set(owners))
    parts = {"inputs": _listed(columns, fields), "owner": ", ".join(owners), "not used": ", ".join(unused)}
    return "columns: " + "; ".join(f"{part} {names}" for part, names in parts.items() if names)


def _listed(columns: Collection[str], fields: Fields | None) -> str:
    names = columns if fields is None else [name for name in columns if name in fields.inputs]
    optional = {} if fields is None else fields.optional
    return ", ".join(f"{name} (optional)" if name in optional else name for name in names)
