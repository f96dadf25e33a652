"""The calculator agent of openai_agent.py as a LangGraph graph. Needs `langgraph` and `langchain-openai`.

    assay train grpo --agent examples/any_agent/langgraph_agent.py:solve --name sums \
      --rubric examples/any_agent/sums.yaml --data "arithmetic:terms=2-3&digits=2-3&size=600"

As a command, `python examples/any_agent/langgraph_agent.py`, it reads the task from standard input; each run then
spends seconds on imports.
"""

import json
import sys

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from openai_agent import EXAMPLES, SYSTEM, calculated


def solve(task):
    messages = [("system", SYSTEM)]
    for question, calculation, result in EXAMPLES:
        messages += [("user", question), ("assistant", calculation)]
        messages += [("user", f"Result: {result}"), ("assistant", result)]
    messages.append(("user", task["inputs"]["question"]))
    model = ChatOpenAI(model=task["model"], base_url=task["base_url"], api_key=task["api_key"], max_tokens=40)
    *_, calculation, _, answer = graph_of(model).invoke({"messages": messages})["messages"]
    return {"calculation": calculation.content.strip(), "answer": answer.content.strip()}


def graph_of(model):
    def think(state):
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("calculate", calculate)
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", has_answer)
    graph.add_edge("calculate", "think")
    return graph.compile()


def calculate(state):
    return {"messages": [("user", f"Result: {calculated(state['messages'][-1].content.strip())}")]}


def has_answer(state):
    return END if state["messages"][-2].content.startswith("Result: ") else "calculate"


if __name__ == "__main__":
    print(json.dumps(solve(json.load(sys.stdin))))
