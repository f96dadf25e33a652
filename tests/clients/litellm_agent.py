"""An agent on litellm, streamed, then unstreamed, then typed; the model's name decides the dialect it speaks."""

import json
import sys

import litellm
from pydantic import BaseModel


class Product(BaseModel):
    value: int
    unit: str


def calculator(expression: str) -> str:
    left, right = expression.split("*")
    return str(int(left) * int(right))


model = sys.argv[1]
schema = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
tools = [
    {
        "type": "function",
        "function": {"name": "calculator", "description": "Calculates a product.", "parameters": schema},
    }
]
messages: list = [{"role": "system", "content": "You calculate."}]
for question, streamed in ((sys.argv[2], True), ("and use the tool once more", False)):
    messages.append({"role": "user", "content": question})
    while True:
        answer = litellm.completion(model=model, messages=messages, tools=tools, stream=streamed)
        if streamed:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": calculator(**json.loads(call.function.arguments))}
            )
messages.append({"role": "user", "content": "as a product, please"})
answer = litellm.completion(model=model, messages=messages, response_format=Product)
print(json.dumps({"answer": json.loads(answer.choices[0].message.content)}))
