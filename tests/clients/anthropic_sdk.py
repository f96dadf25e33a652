"""An agent on the Anthropic SDK.

In order: unstreamed messages, streamed ones, the SDK's tool runner with a thread stored by the server, a typed answer.
"""

import json
import sys

from anthropic import Anthropic, beta_tool
from pydantic import BaseModel


class Product(BaseModel):
    value: int
    unit: str


@beta_tool
def calculator(expression: str) -> str:
    """Calculates a product.

    Args:
        expression: such as 2*3
    """
    left, right = expression.split("*")
    return str(int(left) * int(right))


client = Anthropic()
asked = {"model": "claude-sonnet-5", "max_tokens": 500, "system": [{"type": "text", "text": "You calculate."}]}
tools = [calculator.to_dict()]
messages: list = []
for question, streamed in ((sys.argv[1], False), ("and use the tool once more", True)):
    messages.append({"role": "user", "content": question})
    while True:
        if streamed:
            with client.messages.stream(**asked, messages=messages, tools=tools) as stream:
                text = "".join(stream.text_stream)
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**asked, messages=messages, tools=tools)
        messages.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason != "tool_use":
            break
        results = [
            {"type": "tool_result", "tool_use_id": part.id, "content": calculator.call(part.input)}
            for part in answer.content
            if part.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
messages.append({"role": "user", "content": "let the runner use the tool"})
last = client.beta.messages.tool_runner(**asked, messages=messages, tools=[calculator]).until_done()
messages.append({"role": "assistant", "content": last.content})
messages.append({"role": "user", "content": "a thread"})
thread = client.beta.messages.create(**asked, messages=messages, thread={"type": "create"})
continued = client.beta.messages.create(
    model=asked["model"],
    max_tokens=50,
    messages=[{"role": "user", "content": "that goes on"}],
    thread={"type": "continue", "previous_message_id": thread.id},
)
messages.append({"role": "assistant", "content": thread.content})
messages.append({"role": "user", "content": "that goes on"})
messages.append({"role": "assistant", "content": continued.content})
messages.append({"role": "user", "content": "as a product, please"})
print(
    json.dumps(
        {"answer": client.messages.parse(**asked, messages=messages, output_format=Product).parsed_output.model_dump()}
    )
)
