"""The agent of openai_agent.py as a LangGraph graph."""

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from openai_agent import EXAMPLE, SYSTEM, calculated


def solve(task):
    model = ChatOpenAI(model=task["model"], base_url=task["base_url"], api_key=task["api_key"], max_tokens=24)
    graph = StateGraph(MessagesState)
    graph.add_node("write", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_edge(START, "write")
    graph.add_edge("write", END)
    question = {"role": "user", "content": task["inputs"]["question"]}
    messages = [{"role": "system", "content": SYSTEM}, *EXAMPLE, question]
    calculation = graph.compile().invoke({"messages": messages})["messages"][-1].content.strip()
    return {"calculation": calculation, "answer": calculated(calculation)}
