"""AutoGen: an assistant with a tool, unstreamed and streamed."""

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from driver import INSTRUCTIONS, calculator, run


async def agent(streamed: bool, question: str) -> str:
    client = OpenAIChatCompletionClient(model="gpt-4o")
    options = {"model_client": client, "system_message": INSTRUCTIONS, "model_client_stream": streamed}
    result = await AssistantAgent("assistant", **options, tools=[calculator], max_tool_iterations=5).run(task=question)
    await client.close()
    return result.messages[-1].content


run(sync=lambda question: agent(False, question), stream=lambda question: agent(True, question))
