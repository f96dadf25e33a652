"""The calculator agent of openai_agent.py as a LangGraph graph. Needs `langgraph` and `langchain-openai`.

    assay train grpo --agent "python examples/any_agent/langgraph_agent.py" --name sums \
      --rubric examples/any_agent/sums.yaml --data "arithmetic:terms=2-3&digits=2-3&size=600"

It reads the task from standard input, and the address of the model from the environment, as LangChain does.
"""

import json
import os
import sys

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from openai_agent import EXAMPLES, calculated


def think(state):
    return {"messages": [model.invoke(state["messages"])]}


def calculate(state):
    return {"messages": [("user", f"Result: {calculated(state['messages'][-1].content.strip())}")]}


def has_answer(state):
    return END if state["messages"][-2].content.startswith("Result: ") else "calculate"


model = ChatOpenAI(model=os.environ["ASSAY_MODEL"], max_tokens=40)
graph = StateGraph(MessagesState)
graph.add_node("think", think)
graph.add_node("calculate", calculate)
graph.add_edge(START, "think")
graph.add_conditional_edges("think", has_answer)
graph.add_edge("calculate", "think")
agent = graph.compile()

if __name__ == "__main__":
    messages = [("system", "Write the calculation. Given its result, write the answer.")]
    for question, calculation, result in EXAMPLES:
        messages += [("user", question), ("assistant", calculation)]
        messages += [("user", f"Result: {result}"), ("assistant", result)]
    messages.append(("user", json.load(sys.stdin)["inputs"]["question"]))
    print(json.dumps({"answer": agent.invoke({"messages": messages})["messages"][-1].content.strip()}))
