"""LangGraph: a graph with a tool node and a memory, invoked, and streamed token by token."""

from driver import INSTRUCTIONS, calculator, run
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


def agent(streamed: bool, question: str) -> str:
    model = ChatOpenAI(model="gpt-4o").bind_tools([tool(calculator)])

    def think(state: MessagesState) -> dict:
        return {"messages": [model.invoke([("system", INSTRUCTIONS), *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([tool(calculator)]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    compiled = graph.compile(checkpointer=InMemorySaver())
    thread, state = {"configurable": {"thread_id": "1"}}, {"messages": [("user", question)]}
    if streamed:
        for _ in compiled.stream(state, thread, stream_mode="messages"):
            pass
    else:
        compiled.invoke(state, thread)
    return compiled.get_state(thread).values["messages"][-1].content


run(sync=lambda question: agent(False, question), stream=lambda question: agent(True, question))
