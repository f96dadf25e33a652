"""AutoGen assistants with one memory: two questions for the tool, a typed answer; all `streamed` or `whole`."""

import asyncio
import json
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_core.model_context import UnboundedChatCompletionContext
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel


class Product(BaseModel):
    value: int
    unit: str


async def calculator(expression: str) -> str:
    """Calculates a product such as 2*3."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


async def main(streamed: bool, question: str) -> None:
    client = OpenAIChatCompletionClient(model="gpt-4o")
    memory = UnboundedChatCompletionContext()
    options = {
        "model_client": client,
        "model_context": memory,
        "system_message": "You calculate.",
        "model_client_stream": streamed,
    }
    agent = AssistantAgent("assistant", **options, tools=[calculator], reflect_on_tool_use=True)
    await agent.run(task=question)
    await agent.run(task="and use the tool once more")
    result = await AssistantAgent("typed", **options, output_content_type=Product).run(task="as a product, please")
    await client.close()
    print(json.dumps({"answer": result.messages[-1].content.model_dump()}))


asyncio.run(main(sys.argv[1] == "streamed", sys.argv[2]))
