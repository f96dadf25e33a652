"""An agent on the OpenAI SDK: chat completions (`chat`), Responses with history (`responses`) or by id (`chained`).

The first answer is unstreamed, the second streamed, the third typed.
"""

import json
import sys

from openai import OpenAI
from pydantic import BaseModel

QUESTIONS = (sys.argv[2], "and use the tool once more")
SCHEMA = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
    "additionalProperties": False,
}


class Product(BaseModel):
    value: int
    unit: str


def calculator(expression: str) -> str:
    left, right = expression.split("*")
    return str(int(left) * int(right))


def chat(client: OpenAI) -> Product:
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": SCHEMA, "strict": True}}]
    messages = [{"role": "developer", "content": "You calculate."}]
    for question, streamed in zip(QUESTIONS, (False, True), strict=True):
        messages.append({"role": "user", "content": question})
        while True:
            if streamed:
                with client.chat.completions.stream(model="gpt-4o", messages=messages, tools=tools) as stream:
                    for _ in stream:
                        pass
                    message = stream.get_final_completion().choices[0].message
            else:
                message = (
                    client.chat.completions.create(model="gpt-4o", messages=messages, tools=tools).choices[0].message
                )
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = calculator(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    messages.append({"role": "user", "content": "as a product, please"})
    return (
        client.chat.completions.parse(model="gpt-4o", messages=messages, response_format=Product)
        .choices[0]
        .message.parsed
    )


def responses(client: OpenAI, chained: bool) -> Product:
    tools = [{"type": "function", "name": "calculator", "parameters": SCHEMA, "strict": True}]
    items: list = []
    previous = None
    for question, streamed in zip(QUESTIONS, (False, True), strict=True):
        items.append({"role": "user", "content": question})
        while True:
            asked = {"model": "gpt-4o", "instructions": "You calculate.", "input": items, "tools": tools}
            if chained and previous:
                asked["previous_response_id"] = previous
            if streamed:
                with client.responses.stream(**asked) as stream:
                    for _ in stream:
                        pass
                    answer = stream.get_final_response()
            else:
                answer = (client.beta if chained else client).responses.create(**asked)
            previous, items = answer.id, [] if chained else [*items, *answer.output]
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                break
            for call in calls:
                items.append(
                    {
                        "type": "function_call_output",
                        "call_id": call.call_id,
                        "output": calculator(**json.loads(call.arguments)),
                    }
                )
    items.append({"role": "user", "content": "as a product, please"})
    asked = {"previous_response_id": previous} if chained else {}
    return client.responses.parse(
        model="gpt-4o", instructions="You calculate.", input=items, text_format=Product, **asked
    ).output_parsed


mode = sys.argv[1]
product = chat(OpenAI()) if mode == "chat" else responses(OpenAI(), chained=mode == "chained")
print(json.dumps({"answer": product.model_dump()}))
