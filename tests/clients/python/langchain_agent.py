"""LangChain: `bind_tools` and a loop, over `chat` completions, `responses` and Anthropic `messages`."""

from driver import INSTRUCTIONS, calculator, run
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

TOOL = tool(calculator)


def agent(dialect: str, streamed: bool, question: str) -> str:
    plain = (
        ChatAnthropic(model="claude-sonnet-5", max_tokens=500)
        if dialect == "messages"
        else ChatOpenAI(model="gpt-4o", use_responses_api=dialect == "responses")
    )
    model = plain.bind_tools([TOOL])
    messages: list = [SystemMessage(INSTRUCTIONS), HumanMessage(question)]
    while True:
        if streamed:
            parts = list(model.stream(messages))
            reply = sum(parts[1:], parts[0])
        else:
            reply = model.invoke(messages)
        if not reply.tool_calls:
            return reply.text
        messages += [reply, *(TOOL.invoke(call) for call in reply.tool_calls)]


run(
    chat=lambda question: agent("chat", False, question),
    chat_stream=lambda question: agent("chat", True, question),
    responses=lambda question: agent("responses", False, question),
    responses_stream=lambda question: agent("responses", True, question),
    messages=lambda question: agent("messages", False, question),
    messages_stream=lambda question: agent("messages", True, question),
)
