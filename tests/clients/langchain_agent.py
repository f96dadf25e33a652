"""A LangChain agent: `bind_tools` and a loop, unstreamed, then streamed, then a typed answer; `chat` completions,
`responses` or Anthropic `messages`."""

import json
import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Product(BaseModel):
    """A product."""

    value: int
    unit: str


@tool
def calculator(expression: str) -> str:
    """Calculates a product such as 2*3."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


if sys.argv[1] == "messages":
    plain = ChatAnthropic(model="claude-sonnet-5", max_tokens=500)
else:
    plain = ChatOpenAI(model="gpt-4o", use_responses_api=sys.argv[1] == "responses")
model = plain.bind_tools([calculator])
messages: list = [SystemMessage("You calculate.")]
for question, streamed in ((sys.argv[2], False), ("and use the tool once more", True)):
    messages.append(HumanMessage(question))
    while True:
        if streamed:
            reply = None
            for chunk in model.stream(messages):
                reply = chunk if reply is None else reply + chunk
        else:
            reply = model.invoke(messages)
        messages.append(reply)
        if not reply.tool_calls:
            break
        messages += [calculator.invoke(call) for call in reply.tool_calls]
messages.append(HumanMessage("as a product, please"))
print(json.dumps({"answer": plain.with_structured_output(Product).invoke(messages).model_dump()}))
