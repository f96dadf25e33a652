"""An agent on the OpenAI Agents SDK, over Responses (its default) or `chat` completions.

Its answers are unstreamed, then streamed, then typed.
"""

import asyncio
import json
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from pydantic import BaseModel


class Product(BaseModel):
    value: int
    unit: str


@function_tool
def calculator(expression: str) -> str:
    """Calculates a product such as 2*3."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


async def main(question: str) -> None:
    agent = Agent(name="assistant", instructions="You calculate.", model="gpt-4o", tools=[calculator])
    result = await Runner.run(agent, question)
    again = Runner.run_streamed(
        agent, [*result.to_input_list(), {"role": "user", "content": "and use the tool once more"}]
    )
    parts = [event async for event in again.stream_events() if event.type == "raw_response_event"]
    typed = agent.clone(output_type=Product)
    result = await Runner.run(typed, [*again.to_input_list(), {"role": "user", "content": "as a product, please"}])
    print(json.dumps({"answer": result.final_output.model_dump(), "parts": len(parts)}))


set_tracing_disabled(True)
if sys.argv[1] == "chat":
    set_default_openai_api("chat_completions")
asyncio.run(main(sys.argv[2]))
