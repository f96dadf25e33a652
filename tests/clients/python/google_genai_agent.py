"""The Google GenAI SDK: a hand-written function-call loop (`manual`), the SDK's (`automatic`), and its async client."""

from driver import INSTRUCTIONS, SCHEMA, calculator, run
from google.genai import Client, types

MODEL = "gemini-2.5-flash"
RETRIES = types.HttpOptions(
    retry_options=types.HttpRetryOptions(attempts=3, initial_delay=0.1, jitter=0.1)
)  # by default it does not try again
DECLARED = types.FunctionDeclaration(
    name="calculator", description="Calculates a product.", parameters_json_schema=SCHEMA
)
MANUAL = types.GenerateContentConfig(
    system_instruction=INSTRUCTIONS, temperature=0.2, tools=[types.Tool(function_declarations=[DECLARED])]
)
AUTOMATIC = types.GenerateContentConfig(system_instruction=INSTRUCTIONS, tools=[calculator])


def parts_of(answers: list[types.GenerateContentResponse]) -> list[types.Part]:
    """The response as it is sent back: a stream's parts unchanged, with their signatures."""
    return [part for answer in answers for part in answer.candidates[0].content.parts or ()]


def results(parts: list[types.Part]) -> list[types.Part]:
    calls = [part.function_call for part in parts if part.function_call]
    return [
        types.Part.from_function_response(name=call.name, response={"result": calculator(**call.args)})
        for call in calls
    ]


def text_of(parts: list[types.Part]) -> str:
    return "".join(part.text or "" for part in parts if not part.thought)


def manual(question: str, streamed: bool) -> str:
    client = Client(http_options=RETRIES)
    contents = [types.Content(role="user", parts=[types.Part.from_text(text=question)])]
    while True:
        asked = {"model": MODEL, "contents": contents, "config": MANUAL}
        parts = parts_of(
            list(client.models.generate_content_stream(**asked))
            if streamed
            else [client.models.generate_content(**asked)]
        )
        if not (responses := results(parts)):
            return text_of(parts)
        contents += [types.Content(role="model", parts=parts), types.Content(role="user", parts=responses)]


def automatic(question: str, streamed: bool) -> str:
    client = Client(http_options=RETRIES)  # closes its connections when it is garbage collected
    chat = client.chats.create(model=MODEL, config=AUTOMATIC)
    if not streamed:
        return chat.send_message(question).text
    return text_of(parts_of(list(chat.send_message_stream(question))))


async def asynchronous(question: str, streamed: bool) -> str:
    client = Client(http_options=RETRIES).aio
    asked = {"model": MODEL, "contents": question, "config": AUTOMATIC}
    if not streamed:
        return (await client.models.generate_content(**asked)).text
    return text_of(parts_of([answer async for answer in await client.models.generate_content_stream(**asked)]))


run(
    manual=lambda question: manual(question, False),
    manual_stream=lambda question: manual(question, True),
    automatic=lambda question: automatic(question, False),
    automatic_stream=lambda question: automatic(question, True),
    asynchronous=lambda question: asynchronous(question, False),
    asynchronous_stream=lambda question: asynchronous(question, True),
)
