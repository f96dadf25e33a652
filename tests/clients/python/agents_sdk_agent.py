"""The OpenAI Agents SDK over Responses (its default) and `chat` completions, run and streamed."""

from agents import Agent, Runner, function_tool, set_tracing_disabled
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel
from driver import INSTRUCTIONS, calculator, run
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def agent(kind: type, streamed: bool, question: str) -> str:
    assistant = Agent(
        name="assistant",
        instructions=INSTRUCTIONS,
        model=kind(model="gpt-4o", openai_client=AsyncOpenAI()),
        tools=[function_tool(calculator)],
    )
    if not streamed:
        return (await Runner.run(assistant, question)).final_output
    result = Runner.run_streamed(assistant, question)
    async for _ in result.stream_events():
        pass
    return result.final_output


run(
    responses=lambda question: agent(OpenAIResponsesModel, False, question),
    responses_stream=lambda question: agent(OpenAIResponsesModel, True, question),
    chat=lambda question: agent(OpenAIChatCompletionsModel, False, question),
    chat_stream=lambda question: agent(OpenAIChatCompletionsModel, True, question),
)
