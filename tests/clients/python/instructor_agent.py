"""instructor: each step is a typed answer from a forced tool call; the last one arrives in parts if streamed."""

import instructor
from driver import INSTRUCTIONS, calculator, run
from openai import OpenAI
from pydantic import BaseModel


class Calculation(BaseModel):
    """A product to calculate."""

    expression: str


class Product(BaseModel):
    """A product."""

    value: int
    unit: str


def agent(streamed: bool, question: str) -> dict:
    client = instructor.from_openai(OpenAI())
    messages: list = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}]
    for _ in range(2):
        asked, answer = client.create_with_completion(model="gpt-4o", messages=messages, response_model=Calculation)
        (call,) = answer.choices[0].message.tool_calls
        messages.append({"content": "", **answer.choices[0].message.model_dump(exclude_none=True)})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": calculator(asked.expression)})
    if not streamed:
        return client.create(model="gpt-4o", messages=messages, response_model=Product).model_dump()
    *_, last = client.create_partial(model="gpt-4o", messages=messages, response_model=Product)
    return last.model_dump()


run(sync=lambda question: agent(False, question), stream=lambda question: agent(True, question))
