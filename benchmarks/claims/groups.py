"""The measurements that the rows of the table read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Group:
    """A measurement: a function of a module in `claims`."""

    module: str
    function: str = "measure"
    options: Mapping[str, Any] = field(default_factory=dict)  # of the function
    stronger: bool = False  # needs the stronger model


AGENTS = ("openai", "langgraph", "node")  # of `examples/any_agent`
GROUPS = {
    "sums": Group("sums"),
    "hand_written": Group("hand_written"),
    "sums_shipped": Group("sums_shipped"),
    "queues": Group("queues"),
    "judge": Group("judge"),
    "refinement": Group("refinement"),
    "thinking": Group("thinking"),
    "bfcl": Group("bfcl"),
    "tool_use": Group("tool_use"),
    "tool_training": Group("tool_training"),
    "game": Group("game"),
    "yields": Group("yields"),
    "sql": Group("sql"),
    "sql_training": Group("sql_training"),
    "query_cost": Group("query_cost"),
    "any_agent": Group("any_agent"),
    "any_agent_langgraph": Group("any_agent_langgraph"),
    "any_agent_node": Group("any_agent_node"),
    **{
        f"{kind}_{name}": Group("compiled_agents", f"on_{name}", {"optimizer": optimizer}, stronger=True)
        for kind, optimizer in (("compiled", "auto"), ("gepa", "gepa"))
        for name in AGENTS
    },
    "delayed_credit": Group("delayed"),
    "conversations": Group("conversations"),
    "conversation_training": Group("conversation_training"),
    "fidelity": Group("fidelity"),
    "memory": Group("memory"),
    "thinking_stronger": Group("thinking_stronger", stronger=True),
    "minimal_edits": Group("hacking"),
    "rubric_training": Group("rubric_training"),
    "document_recall": Group("document_recall"),
    "documents": Group("documents"),
    "document_training": Group("document_training"),
    "documents_stronger": Group("documents_stronger", stronger=True),
    "forgetting": Group("other_task"),
    "code_repair": Group("code_repair", stronger=True),
}
