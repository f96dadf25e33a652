"""litellm: the model's name decides the dialect."""

import json

import litellm
from driver import INSTRUCTIONS, SCHEMA, calculator, run

TOOLS = [
    {
        "type": "function",
        "function": {"name": "calculator", "description": "Calculates a product.", "parameters": SCHEMA},
    }
]


def agent(model: str, streamed: bool, question: str) -> str:
    messages: list = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}]
    while True:
        answer = litellm.completion(model=model, messages=messages, tools=TOOLS, stream=streamed)
        if streamed:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": calculator(**json.loads(call.function.arguments))}
            )


run(
    chat=lambda question: agent("openai/gpt-4o", False, question),
    chat_stream=lambda question: agent("openai/gpt-4o", True, question),
    messages=lambda question: agent("anthropic/claude-sonnet-4-5", False, question),
    messages_stream=lambda question: agent("anthropic/claude-sonnet-4-5", True, question),
)
