"""pydantic-ai: answers in text and typed (by a tool for the answer), run and streamed."""

from driver import INSTRUCTIONS, calculator, run
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel


class Product(BaseModel):
    value: int
    unit: str


async def agent(kind: type, streamed: bool, question: str) -> object:
    assistant = Agent(OpenAIChatModel("gpt-4o"), instructions=INSTRUCTIONS, tools=[calculator], output_type=kind)
    if streamed:
        async with assistant.run_stream(question) as result:
            async for _ in result.stream_output(debounce_by=None):
                pass
            output = await result.get_output()
    else:
        output = (await assistant.run(question)).output
    return output.model_dump() if isinstance(output, BaseModel) else output


run(
    text=lambda question: agent(str, False, question),
    text_stream=lambda question: agent(str, True, question),
    typed=lambda question: agent(Product, False, question),
    typed_stream=lambda question: agent(Product, True, question),
)
