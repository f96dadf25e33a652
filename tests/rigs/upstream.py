"""A scripted model server in all dialects of the gateway, for tests and benchmarks of the gateway and other clients.

    PYTHONPATH=tests python -m rigs.upstream [--port 0] [--log FILE] [--chunks 8] [--delay-ms 0]

The last user text decides on the response. By default the server responds `echo: TEXT`. Other responses:

- `use the tool` in the text: calls the first tool of the request, once. With `#both` it responds with a text and two
  calls; with `#steps2` it calls the tool in two consecutive responses.
- A tool that the request requires by name (`tool_choice`) is called. Where any tool is required, it is the first one
  that was not called before.
- A JSON schema in the request: a small instance of it.
- `#answers LIST` in the text: LIST contains the responses as JSON, one for each turn: a text, or
  `{"tool": NAME, "arguments": {…}}`.

Failures: `#401` (the error contains the client's key), `#429`, `#500`, `#die`, `#hang`, `#garbage` and `#badtool` in
the text; `#once429` and `#once500` fail for the first request only. `#late` waits half a second after the last event of
a stream, `#pause` before it.

With `--log` the server writes one line for each completed call, before it sends the last byte of the response.
"""

import argparse
import asyncio
import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from assay.traces.messages import gemini
from assay.traces.messages.dialects import DIALECTS, chat_messages, chat_tools, part_texts
from assay.traces.messages.final_answer import insisted_tool, must_call
from rigs.upstream_dialects import ScriptedCall, as_list, response_body, response_events

Message = dict[str, Any]
_STORED_CONVERSATIONS = 256  # responses that a later request can continue by id


class ScriptedUpstream:
    """The server. `app()` returns it as an aiohttp application; `calls` is the number of calls so far."""

    def __init__(self, *, log: Path | None = None, chunks: int = 8, delay_s: float = 0.0, name: str = "echo") -> None:
        self.calls, self.chunks, self.delay_s, self.name = 0, chunks, delay_s, name
        self.headers: list[dict[str, str]] = []
        self.queries: list[str] = []
        self._failed_once: set[str] = set()
        # id of a response -> the messages up to and including it, and the tools of its request
        self._conversations: dict[str, tuple[list[Message], Any]] = {}
        self._log = open(log, "a", buffering=1) if log else None  # noqa: SIM115

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        for dialect, path in DIALECTS.items():
            app.router.add_post(gemini.ROUTE if dialect == "gemini" else path, self._handler(dialect))
            if dialect in ("chat", "completions"):
                azure = "/openai/deployments/{name}" + path.removeprefix("/v1")
                app.router.add_post(azure, self._handler(dialect))
        app.router.add_get("/v1/models", self._models)
        return app

    def restart(self, at: int = 0) -> None:
        """Numbers the next response `at + 1` and resets `#once…`: repeated requests get the same bytes again."""
        self.calls = at
        self._failed_once.clear()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.name, "object": "model"}]})

    def _handler(self, dialect: str) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            self.calls += 1
            number = self.calls
            self.headers = [*self.headers[-99:], dict(request.headers)]
            self.queries = [*self.queries[-99:], request.query_string]
            earlier, tools = self._continued(body)
            body = {**body, **({"tools": tools} if tools and dialect == "messages" else {})}
            messages = [*earlier, *chat_messages({"dialect": dialect, "body": body})]
            prompt, since = _instruction(messages)
            if (failure := self._failure(dialect, request, prompt)) is not None:
                return failure
            text, calls = _script(dialect, body, prompt, since, f"call_{number}")
            if dialect == "responses" or body.get("thread"):
                response_id = f"{'resp' if dialect == 'responses' else 'msg'}_{number}"
                self._remember(response_id, messages, body.get("tools"), text, calls)
            if not (body.get("stream") or request.match_info.get("verb") == "streamGenerateContent"):
                await self._pause(prompt)
                if "#die" in prompt and request.transport is not None:
                    request.transport.close()
                self._write_log(request, prompt)
                return web.json_response(response_body(dialect, number, self.name, text, calls))
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            events = response_events(dialect, number, self.name, text, calls, self.chunks, usage)
            if dialect == "gemini" and request.query.get("alt") != "sse":
                return await self._stream(request, prompt, as_list(events), kind="application/json")
            return await self._stream(request, prompt, events)

        return handle

    def _failure(self, dialect: str, request: web.Request, prompt: str) -> web.Response | None:
        """The failed response that the prompt asks for, if any."""
        if "#401" in prompt:
            key = request.headers.get("x-goog-api-key" if dialect == "gemini" else "Authorization")
            return web.json_response({"error": {"message": f"bad key {key}", "type": "scripted"}}, status=401)
        for status in (429, 500):
            if f"#{status}" in prompt or (f"#once{status}" in prompt and prompt not in self._failed_once):
                self._failed_once.add(prompt)
                error = {"error": {"message": f"scripted {status}", "type": "scripted"}}
                headers = {"Retry-After": "7"} if f"#{status}" in prompt else {}
                return web.json_response(error, status=status, headers=headers)
        if "#garbage" in prompt:
            return web.Response(body=b"{this is no json", content_type="application/json")
        return None

    def _continued(self, body: dict[str, Any]) -> tuple[list[Message], Any]:
        """Messages and tools of the conversation that the request continues by id; empty for a new conversation."""
        previous = body.get("previous_response_id") or (body.get("thread") or {}).get("previous_message_id")
        return self._conversations.get(str(previous), ([], None))

    def _remember(
        self, response_id: str, messages: list[Message], tools: Any, text: str, calls: Sequence[ScriptedCall]
    ) -> None:
        message: Message = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for call_id, name, arguments in calls
            ]
        self._conversations[response_id] = ([*messages, message], tools)
        if len(self._conversations) > _STORED_CONVERSATIONS:
            del self._conversations[next(iter(self._conversations))]

    async def _pause(self, prompt: str) -> None:
        if "#hang" in prompt:
            await asyncio.sleep(3600)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)

    def _write_log(self, request: web.Request, prompt: str) -> None:
        if self._log is not None:
            self._log.write(f"{time.time():.6f} {request.path_qs} {prompt[:80]!r}\n")

    async def _stream(
        self, request: web.Request, prompt: str, events: Iterator[bytes], kind: str = "text/event-stream"
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        pieces = list(events)
        for index, event in enumerate(pieces):
            if index == len(pieces) // 2:
                await self._pause(prompt)
                if "#die" in prompt and request.transport is not None:
                    request.transport.abort()
                    return response
            if index == len(pieces) - 1:
                self._write_log(request, prompt)
                await asyncio.sleep(0.5 if "#pause" in prompt else 0)
            await response.write(event)
        if "#late" in prompt:
            await asyncio.sleep(0.5)
        await response.write_eof()
        return response


def _instruction(messages: Sequence[Message]) -> tuple[str, Sequence[Message]]:
    """The user text that decides on the response, and the messages after it.

    It is the last user text with `#answers`; without one, the last user text.
    """
    texts = [
        (index, part_texts(message.get("content")))
        for index, message in enumerate(messages)
        if message["role"] == "user"
    ]
    last = texts[-1] if texts else (-1, "")
    index, prompt = next((entry for entry in reversed(texts) if "#answers" in entry[1]), last)
    return prompt, messages[index + 1 :]


def _script(
    dialect: str, body: dict[str, Any], prompt: str, since: Sequence[Message], call_id: str
) -> tuple[str, list[ScriptedCall]]:
    """Text and tool calls of the response.

    Args:
        since: messages after the one that contains `prompt`.
    """
    request = {"dialect": dialect, "body": body}
    if "#answers" in prompt:
        return _listed_answer(prompt, sum(message["role"] == "assistant" for message in since), call_id)
    tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in chat_tools(request)}
    if (name := insisted_tool(request)) is not None and name in tools:
        return "", [(call_id, name, _arguments(tools[name]))]
    called = [call["function"]["name"] for message in since for call in message.get("tool_calls") or ()]
    has_result = bool(since) and since[-1]["role"] == "tool"
    # a request can contain the result without the message that called the tool
    steps_done = max(sum("tool_calls" in message for message in since), has_result)
    steps = int(match[1]) if (match := re.search(r"#steps(\d+)", prompt)) else 1
    if tools and "use the tool" in prompt and steps_done < steps:
        first = next(iter(tools))
        arguments = "{broken" if "#badtool" in prompt else _arguments(tools[first])
        if "#both" in prompt:
            return "twice, then", [(f"{call_id}_{number}", first, arguments) for number in (1, 2)]
        return "", [(call_id, first, arguments)]
    if tools and must_call(request):
        name = next((name for name in tools if name not in called), next(reversed(tools)))
        return "", [(call_id, name, _arguments(tools[name]))]
    if schema := gemini.output_schema(body) if dialect == "gemini" else _response_schema(body):
        return json.dumps(_instance(schema, schema)), []
    return f"echo: {since[-1].get('content') if has_result else prompt}", []


def _listed_answer(prompt: str, turn: int, call_id: str) -> tuple[str, list[ScriptedCall]]:
    """The response number `turn` of the `#answers` list; the last one where the list is shorter."""
    answers = json.JSONDecoder().raw_decode(prompt.partition("#answers")[2].lstrip())[0]
    answer = answers[min(turn, len(answers) - 1)]
    if isinstance(answer, str):
        return answer, []
    return "", [(call_id, answer["tool"], json.dumps(answer["arguments"]))]


def _arguments(schema: dict[str, Any]) -> str:
    """Arguments for a tool: an expression where it takes one or has no schema, else an instance of its schema."""
    arguments = {"expression": "6*7"}
    if (properties := schema.get("properties")) and "expression" not in properties:
        arguments = _instance(schema, schema)
    return json.dumps(arguments)


def _response_schema(body: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema that the request sets for the response; empty without one."""
    formats = [
        body.get("response_format"),
        body.get("output_format"),
        *((body.get(name) or {}).get("format") for name in ("text", "output_config")),
    ]
    chosen: dict[str, Any] = next((entry for entry in formats if entry), {})
    schema: dict[str, Any] = chosen.get("schema") or (chosen.get("json_schema") or {}).get("schema") or {}
    return schema


def _instance(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """A small value that the JSON schema allows. Ignores patterns, bounds and other constraints."""
    if "$ref" in schema:
        target: Any = root
        for name in schema["$ref"].removeprefix("#/").split("/"):
            target = target[name]
        return _instance(target, root)
    for name in ("const", "default"):
        if name in schema:
            return schema[name]
    for name in ("anyOf", "oneOf", "allOf"):
        if schema.get(name):
            return _instance(schema[name][0], root)
    if "enum" in schema:
        return schema["enum"][0]
    if "properties" in schema:
        return {name: _instance(value, root) for name, value in schema["properties"].items()}
    kind = schema.get("type", "string")
    return {"object": {}, "array": [], "integer": 1, "number": 0.5, "boolean": True, "null": None}.get(kind, "echo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    upstream = ScriptedUpstream(log=arguments.log, chunks=arguments.chunks, delay_s=arguments.delay_ms / 1000)

    async def serve() -> None:
        runner = web.AppRunner(upstream.app(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", arguments.port, backlog=1024).start()
        print(json.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}), flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
