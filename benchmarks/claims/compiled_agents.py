"""The system message of an agent that was written with anything, compiled as it is: by `auto`, and by GEPA.

The agents are those of the folder `text_agents`, on OpenAI's SDK, as a LangGraph graph and as a Node program: the model
writes a calculation, and the agent does it. Their code has one example, without which the model answers no task and
nothing can be learned from; it stays as it is during the compile, and the gateway replaces their text. A text must pass
the gate; if none does, the agent's own one counts on both sides. Each seed has tasks of its own; the reported ones are
sealed test tasks. The stronger model proposes edits.
"""

from pathlib import Path
from typing import Any

import assay
from claims.any_agent import EXAMPLE
from claims.any_agent_langgraph import add_packages
from claims.storing import Lines, Measured, Setting

AGENTS = Path(__file__).parent / "text_agents"
DATA = "arithmetic:terms=2-3&digits=2-3&size=600"
SEARCH_CALLS, TEST = 80, 40
SIZES = {"train": 40, "val": 16, "gate": 40}


def on_openai(setting: Setting, optimizer: str) -> Measured:
    return compiled(setting, f"{AGENTS / 'openai_agent.py'}:solve", optimizer)


def on_langgraph(setting: Setting, optimizer: str) -> Measured:
    add_packages(setting)
    return compiled(setting, f"{AGENTS / 'langgraph_agent.py'}:solve", optimizer)


def on_node(setting: Setting, optimizer: str) -> Measured:
    return compiled(setting, f"node {AGENTS / 'agent.mjs'}", optimizer)


def compiled(setting: Setting, agent: str, optimizer: str) -> Measured:
    """The figure `correct`: right answers to the test tasks, of the agent's own text and of the compiled one."""
    common: dict[str, Any] = {
        "rubric": str(EXAMPLE / "sums.yaml"),
        "data": f"{DATA}&seed={setting.seed}",
        "model": setting.model,
        "seed": setting.seed,
        "parameters": {"temperature": 0.1},
        "store": setting.scratch / "agents.db",
        "progress": Lines(),
        "threads": 2,
    }
    on_test: dict[str, Any] = {**common, "split": "test", "sizes": {"test": TEST}}
    report = assay.compile(
        agent=agent,
        text=[str(AGENTS / "system.md")],
        optimizer=optimizer,
        reflection_model=f"embedded:{setting.stronger}",
        max_search_calls=SEARCH_CALLS,
        sizes=SIZES,
        test=False,
        out=setting.scratch / "compiled",
        **common,
    )
    before = dict(assay.evaluate(agent=agent, **on_test).evaluation.scores)
    after = dict(assay.evaluate(report.artifact, **on_test).evaluation.scores) if report.replaces else before
    written = report.to_dict()
    facts = {"winner": report.winner, "calls": report.calls, "search_calls": written["search_calls"]}
    return Measured(values={"correct": {"before": before, "after": after}}, facts=facts)
