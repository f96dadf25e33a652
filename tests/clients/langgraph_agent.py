"""A LangGraph agent with a tool node and a memory: a thread of two questions, the second streamed token by token."""

import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def calculator(expression: str) -> str:
    """Calculates a product such as 2*3."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


model = ChatOpenAI(model="gpt-4o").bind_tools([calculator])


def think(state: MessagesState) -> dict:
    return {"messages": [model.invoke([("system", "You calculate."), *state["messages"]])]}


graph = StateGraph(MessagesState)
graph.add_node("think", think)
graph.add_node("tools", ToolNode([calculator]))
graph.add_edge(START, "think")
graph.add_conditional_edges("think", tools_condition)
graph.add_edge("tools", "think")
agent = graph.compile(checkpointer=InMemorySaver())
thread = {"configurable": {"thread_id": "1"}}
agent.invoke({"messages": [("user", sys.argv[1])]}, thread)
tokens = [
    part.content
    for part, _ in agent.stream({"messages": [("user", "and use the tool once more")]}, thread, stream_mode="messages")
]
print(json.dumps({"answer": agent.get_state(thread).values["messages"][-1].content, "parts": len(tokens)}))
