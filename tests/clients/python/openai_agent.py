"""The OpenAI SDK: `chat` completions, `responses` with full history, `chained` by the id of the previous response."""

import json
from typing import Any

from driver import INSTRUCTIONS, SCHEMA, calculator, run
from openai import OpenAI
from openai.types.chat import ChatCompletionMessage


def message_of(client: OpenAI, streamed: bool, **asked: Any) -> ChatCompletionMessage:
    if not streamed:
        return client.chat.completions.create(**asked).choices[0].message
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0].message


def chat(question: str, streamed: bool) -> str | None:
    client = OpenAI()
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": SCHEMA, "strict": True}}]
    messages: list = [{"role": "developer", "content": INSTRUCTIONS}, {"role": "user", "content": question}]
    while (answer := message_of(client, streamed, model="gpt-4o", messages=messages, tools=tools)).tool_calls:
        messages.append(answer.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in answer.tool_calls:
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": calculator(**json.loads(call.function.arguments))}
            )
    return answer.content


def responses(question: str, streamed: bool, chained: bool = False) -> str:
    client = OpenAI()
    tools = [{"type": "function", "name": "calculator", "parameters": SCHEMA, "strict": True}]
    items: list = [{"role": "user", "content": question}]
    asked: dict = {"model": "gpt-4o", "instructions": INSTRUCTIONS, "tools": tools}
    while True:
        if streamed:
            with client.responses.stream(**asked, input=items) as stream:
                for _ in stream:
                    pass
                answer = stream.get_final_response()
        else:
            answer = client.responses.create(**asked, input=items)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        results = [
            {"type": "function_call_output", "call_id": c.call_id, "output": calculator(**json.loads(c.arguments))}
            for c in calls
        ]
        items = results if chained else [*items, *answer.output, *results]
        if chained:
            asked["previous_response_id"] = answer.id


run(
    chat=lambda question: chat(question, False),
    chat_stream=lambda question: chat(question, True),
    responses=lambda question: responses(question, False),
    responses_stream=lambda question: responses(question, True),
    chained=lambda question: responses(question, False, True),
    chained_stream=lambda question: responses(question, True, True),
)
