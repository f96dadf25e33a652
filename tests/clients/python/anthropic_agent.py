"""The Anthropic SDK: a loop over messages, unstreamed and streamed, and its tool runner."""

from anthropic import Anthropic, beta_tool
from driver import INSTRUCTIONS, calculator, run

TOOL = beta_tool(calculator)
ASKED = {"model": "claude-sonnet-5", "max_tokens": 500, "system": [{"type": "text", "text": INSTRUCTIONS}]}


def loop(question: str, streamed: bool) -> str:
    client = Anthropic()
    messages: list = [{"role": "user", "content": question}]
    while True:
        if streamed:
            with client.messages.stream(**ASKED, messages=messages, tools=[TOOL.to_dict()]) as stream:
                for _ in stream:
                    pass
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**ASKED, messages=messages, tools=[TOOL.to_dict()])
        if answer.stop_reason != "tool_use":
            return answer.content[0].text
        uses = [part for part in answer.content if part.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": part.id, "content": TOOL.call(part.input)} for part in uses]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]


def runner(question: str, streamed: bool) -> str:
    asked = {**ASKED, "messages": [{"role": "user", "content": question}], "tools": [TOOL]}
    if not streamed:
        return Anthropic().beta.messages.tool_runner(**asked).until_done().content[0].text
    for stream in Anthropic().beta.messages.tool_runner(**asked, stream=True):
        answer = stream.get_final_message()
    return answer.content[0].text


run(
    sync=lambda question: loop(question, False),
    stream=lambda question: loop(question, True),
    runner=lambda question: runner(question, False),
    runner_stream=lambda question: runner(question, True),
)
