"""Answers with spaces, escapes and numbers that a rewritten object would not have, and a server that gives them."""

from typing import Literal

import dspy

from assay.traces import Transition
from assay.traces.export.selection import Turn
from assay.traces.store.rows import transition_row

FORMATS = ("json", "lean", "xml", "chat")


# spaces, escapes and numbers that a parsed and rewritten object would not have
ANSWERS = {
    "json": '{"label":  "pos" ,\n  "why": "1.50 \\u00e9 \\"quoted\\" \\/ and 1e2" }',
    "lean": "label: pos\nwhy:   1.50 é \"quoted\" / and 1e2",
    "xml": "<label>pos</label>\n<why> 1.50 é \"quoted\" / and 1e2</why>",
    "chat": "[[ ## label ## ]]\npos\n\n[[ ## why ## ]]\n 1.50 é \"quoted\" / and 1e2\n\n[[ ## completed ## ]]",
}  # fmt: skip


class Sentiment(dspy.Signature):
    """Judge the text."""

    text: str = dspy.InputField()
    label: Literal["pos", "neg"] = dspy.OutputField()
    why: str = dspy.OutputField()


def as_turn(transition: Transition) -> Turn:
    row = transition_row(vars(transition))
    return Turn([row[name] for name in Turn.COLUMNS])
