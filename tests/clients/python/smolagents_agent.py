"""smolagents: a ToolCallingAgent and a CodeAgent, unstreamed and streamed."""

import os

from driver import calculator, run
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

TOOL = tool(calculator)


def agent(kind: type, streamed: bool, question: str) -> object:
    model = OpenAIModel("gpt-4o", api_base=os.environ["MODEL_BASE_URL"], api_key=os.environ["MODEL_API_KEY"])
    return kind(tools=[TOOL], model=model, stream_outputs=streamed, max_steps=5).run(question)


run(
    tools=lambda question: agent(ToolCallingAgent, False, question),
    tools_stream=lambda question: agent(ToolCallingAgent, True, question),
    code=lambda question: agent(CodeAgent, False, question),
    code_stream=lambda question: agent(CodeAgent, True, question),
)
