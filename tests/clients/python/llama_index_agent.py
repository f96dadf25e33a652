"""LlamaIndex: a FunctionAgent on an OpenAI-like model, unstreamed and streamed."""

import os

from driver import INSTRUCTIONS, calculator, run
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


async def agent(streamed: bool, question: str) -> str:
    options = {"api_base": os.environ["MODEL_BASE_URL"], "api_key": os.environ["MODEL_API_KEY"]}
    llm = OpenAILike(model="gpt-4o", is_chat_model=True, is_function_calling_model=True, **options)
    handler = FunctionAgent(tools=[calculator], llm=llm, system_prompt=INSTRUCTIONS, streaming=streamed).run(
        user_msg=question
    )
    async for _ in handler.stream_events():
        pass
    return str(await handler)


run(sync=lambda question: agent(False, question), stream=lambda question: agent(True, question))
