"""A scripted model server in all dialects of the gateway, for tests and benchmarks of what stands in front of one.

    python -m assay.testing.upstream [--port 0] [--log FILE] [--chunks 8] [--delay-ms 0]

It answers `echo: TEXT` to a conversation's last text, and calls the first tool offered where that text holds `use the tool` and no
result has come back yet; with `#both` it says something first and calls it twice in one answer, with `#steps2` it calls it in two answers, one
after the other. A tool that the request insists on by name is called; where tools must be called, the first that was not called before. A JSON
schema that the request asks for is answered with a small instance. `#answers LIST` in a user's text says each answer itself, as JSON: a text, or
`{"tool": NAME, "arguments": {…}}`; which one is told by the answers that came since. `#401` (which says the key back), `#429`, `#500`, `#die`,
`#hang`, `#garbage` and `#badtool` in the text make it misbehave, `#once429` the first time only; `#late` waits half a second after a
stream's last event, `#pause` before it. With a log it writes a line a completed call before the answer's last byte is sent.
"""

import argparse
import asyncio
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from assay.testing.upstream_gemini import as_list, gemini_stream, gemini_whole
from assay.traces import gemini
from assay.traces.asked import insisted_tool, must_call
from assay.traces.dialects import DIALECTS, chat_messages, chat_tools, part_texts

__all__ = ["ScriptedUpstream", "answer_body", "answer_events"]

Call = tuple[str, str, str]  # id, name, arguments as text
Parts = Callable[[str], list[str]]
Message = dict[str, Any]
_REMEMBERED = 256  # answers that a later request may continue by id


class ScriptedUpstream:
    """Counts its calls in `calls`; `app()` is an aiohttp application."""

    def __init__(self, *, log: Path | None = None, chunks: int = 8, delay_s: float = 0.0, name: str = "echo") -> None:
        self.calls, self.chunks, self.delay_s, self.name = 0, chunks, delay_s, name
        self.headers: list[dict[str, str]] = []
        self.queries: list[str] = []
        self._refused: set[str] = set()
        self._conversations: dict[str, tuple[list[Message], Any]] = {}  # id of an answer -> the conversation up to it, its tools
        self._log = open(log, "a", buffering=1) if log else None  # noqa: SIM115

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        for dialect, path in DIALECTS.items():
            app.router.add_post(gemini.ROUTE if dialect == "gemini" else path, self._handler(dialect))
            if dialect in ("chat", "completions"):
                app.router.add_post("/openai/deployments/{name}" + path.removeprefix("/v1"), self._handler(dialect))  # Azure's
        app.router.add_get("/v1/models", self._models)
        return app

    def restart(self, at: int = 0) -> None:
        """Numbers the next answer `at + 1` and forgets what was refused: the same requests get the same bytes again."""
        self.calls = at
        self._refused.clear()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.name, "object": "model"}]})

    def _handler(self, dialect: str) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            self.calls += 1
            number = self.calls
            self.headers = [*self.headers[-99:], dict(request.headers)]
            self.queries = [*self.queries[-99:], request.query_string]
            kept, tools = self._continued(body)
            body = {**body, **({"tools": tools} if tools and dialect == "messages" else {})}
            messages = [*kept, *chat_messages({"dialect": dialect, "body": body})]
            said, since = _instruction(messages)
            if "#401" in said:
                key = request.headers.get("x-goog-api-key" if dialect == "gemini" else "Authorization")
                told = {"error": {"message": f"bad key {key}", "type": "scripted"}}
                return web.json_response(told, status=401)
            for status in (429, 500):
                if f"#{status}" in said or (f"#once{status}" in said and said not in self._refused):
                    self._refused.add(said)
                    told = {"error": {"message": f"scripted {status}", "type": "scripted"}}
                    return web.json_response(told, status=status, headers={"Retry-After": "7"} if f"#{status}" in said else {})
            if "#garbage" in said:
                return web.Response(body=b"{this is no json", content_type="application/json")
            text, calls = _script(dialect, body, said, since, f"call_{number}")
            if dialect == "responses" or body.get("thread"):
                self._remember(f"{'resp' if dialect == 'responses' else 'msg'}_{number}", messages, body.get("tools"), text, calls)
            if not (body.get("stream") or request.match_info.get("verb") == "streamGenerateContent"):
                await self._pause(said)
                if "#die" in said and request.transport is not None:
                    request.transport.close()
                self._note(request, said)
                return web.json_response(answer_body(dialect, number, self.name, text, calls))
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            given = answer_events(dialect, number, self.name, text, calls, self.chunks, usage)
            if dialect == "gemini" and request.query.get("alt") != "sse":
                return await self._stream(request, said, as_list(given), kind="application/json")
            return await self._stream(request, said, given)

        return handle

    def _continued(self, body: dict[str, Any]) -> tuple[list[Message], Any]:
        """The messages before those of a request that continues an answer by its id, and the tools that were offered."""
        previous = body.get("previous_response_id") or (body.get("thread") or {}).get("previous_message_id")
        return self._conversations.get(str(previous), ([], None))

    def _remember(self, name: str, messages: list[Message], tools: Any, text: str, calls: Sequence[Call]) -> None:
        asked = [{"id": call[0], "type": "function", "function": {"name": call[1], "arguments": call[2]}} for call in calls]
        self._conversations[name] = [*messages, {"role": "assistant", "content": text, **({"tool_calls": asked} if asked else {})}], tools
        if len(self._conversations) > _REMEMBERED:
            del self._conversations[next(iter(self._conversations))]

    async def _pause(self, said: str) -> None:
        if "#hang" in said:
            await asyncio.sleep(3600)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)

    def _note(self, request: web.Request, said: str) -> None:
        if self._log is not None:
            self._log.write(f"{time.time():.6f} {request.path_qs} {said[:80]!r}\n")

    async def _stream(self, request: web.Request, said: str, given: Iterator[bytes], kind: str = "text/event-stream") -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        events = list(given)
        for at, event in enumerate(events):
            if at == len(events) // 2:
                await self._pause(said)
                if "#die" in said and request.transport is not None:
                    request.transport.abort()
                    return response
            if at == len(events) - 1:
                self._note(request, said)
                await asyncio.sleep(0.5 if "#pause" in said else 0)
            await response.write(event)
        if "#late" in said:
            await asyncio.sleep(0.5)
        await response.write_eof()
        return response


def _instruction(messages: Sequence[Message]) -> tuple[str, Sequence[Message]]:
    """What decides on the answer: the last user's text that says `#answers`, else the last user's text; and the messages after it."""
    texts = [(at, part_texts(message.get("content"))) for at, message in enumerate(messages) if message["role"] == "user"]
    at, said = next((found for found in reversed(texts) if "#answers" in found[1]), texts[-1] if texts else (-1, ""))
    return said, messages[at + 1 :]


def _script(dialect: str, body: dict[str, Any], said: str, since: Sequence[Message], call_id: str) -> tuple[str, list[Call]]:
    """The text to say and the tools to call."""
    request = {"dialect": dialect, "body": body}
    if "#answers" in said:
        return _told(said, sum(message["role"] == "assistant" for message in since), call_id)
    tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in chat_tools(request)}
    if (name := insisted_tool(request)) is not None and name in tools:
        return "", [(call_id, name, _arguments(tools[name]))]
    called = [call["function"]["name"] for message in since for call in message.get("tool_calls") or ()]
    answered = bool(since) and since[-1]["role"] == "tool"
    steps = max(sum("tool_calls" in message for message in since), answered)
    wanted = int(found[1]) if (found := re.search(r"#steps(\d+)", said)) else 1
    if tools and "use the tool" in said and steps < wanted:
        first = next(iter(tools))
        arguments = "{broken" if "#badtool" in said else _arguments(tools[first])
        if "#both" in said:
            return "twice, then", [(f"{call_id}_{at}", first, arguments) for at in (1, 2)]
        return "", [(call_id, first, arguments)]
    if tools and must_call(request):
        name = next((name for name in tools if name not in called), next(reversed(tools)))
        return "", [(call_id, name, _arguments(tools[name]))]
    if schema := gemini.asked_schema(body) if dialect == "gemini" else _asked_schema(body):
        return json.dumps(_instance(schema, schema)), []
    return f"echo: {since[-1].get('content') if answered else said}", []


def _told(said: str, turn: int, call_id: str) -> tuple[str, list[Call]]:
    """The answer of this turn in the list that a user's text holds; the last one where there are no more."""
    answers = json.JSONDecoder().raw_decode(said.partition("#answers")[2].lstrip())[0]
    answer = answers[min(turn, len(answers) - 1)]
    return (answer, []) if isinstance(answer, str) else ("", [(call_id, answer["tool"], json.dumps(answer["arguments"]))])


def _arguments(schema: dict[str, Any]) -> str:
    given = {"expression": "6*7"}
    if (known := schema.get("properties")) and "expression" not in known:
        given = _instance(schema, schema)
    return json.dumps(given)


def _asked_schema(body: dict[str, Any]) -> dict[str, Any]:
    told = [body.get("response_format"), body.get("output_format"), *((body.get(name) or {}).get("format") for name in ("text", "output_config"))]
    asked: dict[str, Any] = next((found for found in told if found), {})
    schema: dict[str, Any] = asked.get("schema") or (asked.get("json_schema") or {}).get("schema") or {}
    return schema


def _instance(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """A small value that a JSON schema allows; not for patterns, bounds and the like."""
    if "$ref" in schema:
        found: Any = root
        for name in schema["$ref"].removeprefix("#/").split("/"):
            found = found[name]
        return _instance(found, root)
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


def answer_body(dialect: str, number: int, model: str, text: str, calls: Sequence[Call]) -> dict[str, Any]:
    tokens = len(text.split())
    if dialect == "chat":
        message: dict[str, Any] = {"role": "assistant", "content": text or None}
        if calls:
            message["tool_calls"] = [{"id": c[0], "type": "function", "function": {"name": c[1], "arguments": c[2]}} for c in calls]
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop", "logprobs": None}
        usage = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
        return {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": 1, "model": model, "choices": [choice], "usage": usage}
    if dialect == "completions":
        usage = {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
        choice = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}
        return {"id": f"cmpl-{number}", "object": "text_completion", "created": 1, "model": model, "choices": [choice], "usage": usage}
    if dialect == "responses":
        items: list[dict[str, Any]] = [
            {
                "type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed",
                "content": [{"type": "output_text", "text": text, "annotations": []}],
            }
        ] if text or not calls else []  # fmt: skip
        for at, c in enumerate(calls):
            name = f"fc_{number}_{at}"
            items.append({"type": "function_call", "id": name, "call_id": c[0], "name": c[1], "arguments": c[2], "status": "completed"})
        return {
            "id": f"resp_{number}", "object": "response", "created_at": 1, "status": "completed", "model": model, "output": items, "tools": [],
            "tool_choice": "auto", "parallel_tool_calls": True, "metadata": {}, "error": None, "incomplete_details": None, "instructions": None,
            "usage": {
                "input_tokens": 7, "output_tokens": tokens, "total_tokens": 7 + tokens, "input_tokens_details": {"cached_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 0},
            },
        }  # fmt: skip
    if dialect == "gemini":
        return gemini_whole(number, model, text, [(name, _object(arguments)) for _, name, arguments in calls])
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text or not calls else []
    blocks += [{"type": "tool_use", "id": c[0], "name": c[1], "input": _object(c[2])} for c in calls]
    return {
        "id": f"msg_{number}", "type": "message", "role": "assistant", "model": model, "content": blocks,
        "stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None, "usage": {"input_tokens": 7, "output_tokens": tokens},
    }  # fmt: skip


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def answer_events(
    dialect: str, number: int, model: str, text: str, calls: Sequence[Call], chunks: int, usage: bool
) -> Iterator[bytes]:  # fmt: skip
    """The stream of an answer: what it says in parts, then each call's arguments in parts."""
    whole = answer_body(dialect, number, model, text, calls)

    def parts(said: str) -> list[str]:
        size = max(1, -(-len(said) // chunks))
        return [said[at : at + size] for at in range(0, len(said), size)] or [""]

    streams = {
        "chat": _chat_stream,
        "completions": _text_stream,
        "responses": _responses_stream,
        "messages": _anthropic_stream,
        "gemini": gemini_stream,
    }
    yield from streams[dialect](whole, text, calls, parts, usage)


def _chat_stream(whole: dict[str, Any], text: str, calls: Sequence[Call], parts: Parts, usage: bool) -> Iterator[bytes]:
    head = {"id": whole["id"], "object": "chat.completion.chunk", "created": 1, "model": whole["model"]}

    def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
        return f"data: {json.dumps({**head, 'choices': [{'index': 0, 'delta': delta, 'finish_reason': finish}]})}\n\n".encode()

    yield chunk({"role": "assistant", "content": None if calls and not text else ""})
    for part in parts(text) if text or not calls else ():
        yield chunk({"content": part})
    for index, (call_id, name, arguments) in enumerate(calls):
        for at, part in enumerate(parts(arguments)):
            first: dict[str, Any] = {"id": call_id, "type": "function"} if at == 0 else {}
            function = {"arguments": part, **({"name": name} if at == 0 else {})}
            yield chunk({"tool_calls": [{"index": index, **first, "function": function}]})
    yield chunk({}, "tool_calls" if calls else "stop")
    if usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': whole['usage']})}\n\n".encode()
    yield b"data: [DONE]\n\n"


def _text_stream(whole: dict[str, Any], text: str, calls: Sequence[Call], parts: Parts, usage: bool) -> Iterator[bytes]:
    head = {key: whole[key] for key in ("id", "object", "created", "model")}
    for part, finish in (*((part, None) for part in parts(text)), ("", "stop")):
        yield f"data: {json.dumps({**head, 'choices': [{'index': 0, 'text': part, 'finish_reason': finish, 'logprobs': None}]})}\n\n".encode()
    if usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': whole['usage']})}\n\n".encode()
    yield b"data: [DONE]\n\n"


def _event(kind: str, **told: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **told})}\n\n".encode()


def _responses_stream(whole: dict[str, Any], text: str, calls: Sequence[Call], parts: Parts, usage: bool) -> Iterator[bytes]:
    number = itertools.count()

    def event(kind: str, **told: Any) -> bytes:
        return _event(kind, **told, sequence_number=next(number))

    yield event("response.created", response={**whole, "status": "in_progress", "output": []})
    for index, item in enumerate(whole["output"]):
        called = item["type"] == "function_call"
        where = {"item_id": item["id"], "output_index": index}
        yield event("response.output_item.added", output_index=index, item={**item, **({"arguments": ""} if called else {"content": []})})
        if called:
            for part in parts(item["arguments"]):
                yield event("response.function_call_arguments.delta", **where, delta=part)
            yield event("response.function_call_arguments.done", **where, arguments=item["arguments"], name=item["name"])
        else:
            said = item["content"][0]
            yield event("response.content_part.added", **where, content_index=0, part={**said, "text": ""})
            for part in parts(text):
                yield event("response.output_text.delta", **where, content_index=0, logprobs=[], delta=part)
            yield event("response.output_text.done", **where, content_index=0, logprobs=[], text=text)
            yield event("response.content_part.done", **where, content_index=0, part=said)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.completed", response=whole)


def _anthropic_stream(whole: dict[str, Any], text: str, calls: Sequence[Call], parts: Parts, usage: bool) -> Iterator[bytes]:
    arguments = [call[2] for call in calls]
    yield _event("message_start", message={**whole, "content": [], "stop_reason": None})
    for index, block in enumerate(whole["content"]):
        called = block["type"] == "tool_use"
        yield _event("content_block_start", index=index, content_block={**block, **({"input": {}} if called else {"text": ""})})
        for part in parts(arguments.pop(0) if called else text):
            delta = {"type": "input_json_delta", "partial_json": part} if called else {"type": "text_delta", "text": part}
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta={"stop_reason": whole["stop_reason"], "stop_sequence": None}, usage={"output_tokens": 3})
    yield _event("message_stop")


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
