"""Clients of a chaos run. They hold conversations through the gateway like agents, and retry failed calls.

They record every attempt and compare each received byte with the plan. `checks` compares the store with their records.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from assay.traces.messages.dialects import DIALECTS
from rigs.gateway_chaos.plan import GOOD, Call, Script, Spec, marker_of, script_of, spec_of

KEY = "chaos-gateway-key"
TOOL = {"type": "object", "properties": {"expression": {"type": "string"}, "note": {"type": "string"}}}
_TIMEOUT_S = 4.0  # maximum time between two reads
_TRIES = 8


def body_hash(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


@dataclass
class Attempt:
    """One attempt of a call, and its outcome.

    Attributes:
        outcome: `whole`, `reset`, `timeout`, `gateway` (an error of the gateway itself), or `refused` (the call did not
            reach a model, because no gateway listened or its store was unavailable).
        rollout: id of the rollout, from the gateway's response.
        sent: hash of the request's body.
        wrong: how the response differs from that of the model server; empty if it does not.
        received: number of bytes.
    """

    call: Call
    started: float
    ended: float = 0.0
    outcome: str = "refused"
    status: int = 0
    rollout: str = ""
    sent: str = ""
    wrong: str = ""
    received: int = 0

    @property
    def accepted(self) -> bool:
        return self.outcome != "refused"


@dataclass
class Management:
    """A rollout that a client closed with a reward."""

    rollout: str
    score: float
    at: float


@dataclass
class Clients:
    """All clients of a chaos run.

    Args:
        url: address of the gateway.
        calls: number of calls after which no new conversation starts, unless `more()`.
        progress: called with the number of calls after each call.
    """

    seed: int
    url: str
    calls: int
    progress: Callable[[int], None] = lambda accepted_calls: None
    more: Callable[[], bool] = lambda: False
    attempts: list[Attempt] = field(default_factory=list)
    managed: list[Management] = field(default_factory=list)
    unfinished: int = 0
    _next: int = 0
    _accepted: int = 0

    @property
    def accepted_calls(self) -> int:
        """Number of calls that the gateway accepted."""
        return self._accepted

    async def run(self, concurrent: int) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=_TIMEOUT_S)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            await asyncio.gather(*(self._work(session) for _ in range(concurrent)))

    async def _work(self, session: aiohttp.ClientSession) -> None:
        while self._accepted < self.calls or self.more():
            self._next += 1
            await _Conversation(self, session, spec_of(self.seed, self._next)).run()

    def note(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        self._accepted += attempt.accepted
        self.progress(self._accepted)


class _Conversation:
    def __init__(self, clients: Clients, session: aiohttp.ClientSession, spec: Spec) -> None:
        self.clients, self.session, self.spec = clients, session, spec
        self.marker = marker_of(spec.number)
        self.name = f"chaos-{clients.seed}-{spec.number}"
        self.base, self.headers = "", {"Authorization": f"Bearer {KEY}"}
        self.history: list[Any] = []
        self.prompt = f"{self.marker} question 0\n"
        self.previous = ""

    async def run(self) -> None:
        await self._name()
        for turn in range(self.spec.turns):
            script = await self._turn(turn)
            if script is None:
                self.clients.unfinished += 1
                return
            self._extend(script, turn)
        if self.spec.naming in ("header", "token") and self.spec.number % 2:
            await self._close()

    async def _name(self) -> None:
        if self.spec.naming == "header":
            self.headers["x-assay-rollout"] = self.name
        elif self.spec.naming == "path":
            self.base = f"/r/{self.name}"
        elif self.spec.naming == "trace":
            self.headers["traceparent"] = f"00-{hashlib.md5(self.name.encode()).hexdigest()}-{'1' * 16}-01"
        elif self.spec.naming == "token":
            rollout = await self._managed("/assay/rollouts", {"id": self.name})
            if "api_key" in rollout:
                self.name, self.headers = rollout["id"], {"Authorization": f"Bearer {rollout['api_key']}"}
            else:  # an earlier attempt, whose response was lost, created it
                self.headers["x-assay-rollout"] = self.name

    async def _turn(self, turn: int) -> Script | None:
        """The successful response to a turn; None if every attempt failed."""
        attempt = tries = 0
        until = time.monotonic() + 90
        while tries < _TRIES and time.monotonic() < until:
            call = Call(self.spec.number, turn, attempt)
            script = script_of(self.clients.seed, call)
            result = await self._call(call, script)
            if result.outcome == "whole" and script.kind in GOOD:
                self.previous = f"resp_{call.number}"
                return script
            attempt, tries = attempt + result.accepted, tries + (result.accepted and result.outcome != "gateway")
            await asyncio.sleep({"whole": 0.05, "gateway": 1.0}.get(result.outcome, 0.3))
        return None

    async def _call(self, call: Call, script: Script) -> Attempt:
        body = self._body(call)
        attempt = Attempt(call, time.time(), sent=body_hash(body))
        received = bytearray()
        try:
            url = f"{self.clients.url}{self.base}{self._path}"
            async with self.session.post(url, json=body, headers=self.headers) as response:
                attempt.outcome, attempt.status = "reset", response.status
                attempt.rollout = response.headers.get("x-assay-rollout", "")
                async for chunk in response.content.iter_any():
                    received += chunk
                attempt.outcome = "whole"
        except aiohttp.ClientConnectorError:
            attempt.outcome = "refused"
        except TimeoutError:
            attempt.outcome = "timeout"
        except (aiohttp.ClientError, OSError):
            attempt.outcome = "reset"
        attempt.ended, attempt.received = time.time(), len(received)
        self._compare(attempt, script, bytes(received))
        self.clients.note(attempt)
        return attempt

    def _compare(self, attempt: Attempt, script: Script, received: bytes) -> None:
        if attempt.outcome == "whole" and attempt.status != script.status and b'"assay_gateway"' in received:
            attempt.outcome = "refused" if attempt.status == 503 else "gateway"
            return
        expected = received == script.data and attempt.status == script.status and script.ending == "whole"
        if attempt.outcome == "whole" and not expected:
            size = f"{len(received)} of {len(script.data)} bytes"
            attempt.wrong = f"{script.kind}: status {attempt.status}, {size}, different from those of the server"
        elif not script.data.startswith(received):
            attempt.wrong = f"{script.kind}: the first {len(received)} bytes differ from those of the server"

    @property
    def _path(self) -> str:
        if self.spec.dialect == "gemini":
            return f"/v1beta/models/m:{'streamGenerateContent?alt=sse' if self.spec.stream else 'generateContent'}"
        return DIALECTS[self.spec.dialect]

    def _body(self, call: Call) -> dict[str, Any]:
        if self.spec.dialect == "gemini":
            message = {"role": "user", "parts": [{"text": f"{self.marker} question"}]}
            declarations = [{"functionDeclarations": [{"name": "calculator", "parametersJsonSchema": TOOL}]}]
            return {"metadata": {"chaos": str(call)}, "contents": [message, *self.history], "tools": declarations}
        body: dict[str, Any] = {
            "model": "m",
            "metadata": {"chaos": str(call)},
            **({"stream": True} if self.spec.stream else {}),
        }
        question = {"role": "user", "content": f"{self.marker} question"}
        if self.spec.dialect == "completions":
            return {**body, "prompt": self.prompt}
        if self.spec.dialect == "responses":
            tools = [{"type": "function", "name": "calculator", "parameters": TOOL}]
            if self.spec.chained and self.previous:
                new = self.history[self._new :]
                return {**body, "input": new, "previous_response_id": self.previous, "tools": tools}
            return {**body, "input": [question, *self.history], "tools": tools}
        if self.spec.dialect == "messages":
            return {
                **body,
                "max_tokens": 99,
                "messages": [question, *self.history],
                "tools": [{"name": "calculator", "input_schema": TOOL}],
            }
        tools = [{"type": "function", "function": {"name": "calculator", "parameters": TOOL}}]
        return {**body, "messages": [question, *self.history], "tools": tools}

    @property
    def _new(self) -> int:
        """Index of the first item after the last response in the history (dialect `responses`)."""
        responses = (index for index, item in enumerate(self.history) if item["type"] in ("message", "function_call"))
        return max(responses, default=-1) + 1

    def _extend(self, script: Script, turn: int) -> None:
        """Adds a response and the results of its tool calls to the conversation."""
        result = f"{self.marker} result {turn}"
        if self.spec.dialect == "completions":
            self.prompt += f"{script.text}\n{self.marker} question {turn + 1}\n"
        elif self.spec.dialect == "chat":
            calls = [
                {"id": c[0], "type": "function", "function": {"name": c[1], "arguments": c[2]}} for c in script.calls
            ]
            self.history.append(
                {"role": "assistant", "content": script.text or None, **({"tool_calls": calls} if calls else {})}
            )
            self.history += [{"role": "tool", "tool_call_id": c[0], "content": result} for c in script.calls]
        elif self.spec.dialect == "responses":
            if script.text or not script.calls:
                self.history.append(
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": script.text}]}
                )
            self.history += [
                {"type": "function_call", "call_id": c[0], "name": c[1], "arguments": c[2]} for c in script.calls
            ]
            self.history += [{"type": "function_call_output", "call_id": c[0], "output": result} for c in script.calls]
        elif self.spec.dialect == "gemini":
            parts: list[dict[str, Any]] = [{"text": script.text}] if script.text or not script.calls else []
            parts += [{"functionCall": {"name": c[1], "args": json.loads(c[2])}} for c in script.calls]
            self.history.append({"role": "model", "parts": parts})
            responses = [{"functionResponse": {"name": c[1], "response": {"result": result}}} for c in script.calls]
            self.history += [{"role": "user", "parts": responses}] if responses else []
        else:
            blocks: list[dict[str, Any]] = (
                [{"type": "text", "text": script.text}] if script.text or not script.calls else []
            )
            blocks += [{"type": "tool_use", "id": c[0], "name": c[1], "input": json.loads(c[2])} for c in script.calls]
            self.history.append({"role": "assistant", "content": blocks})
            if script.calls:
                results = [{"type": "tool_result", "tool_use_id": c[0], "content": result} for c in script.calls]
                self.history.append({"role": "user", "content": results})

    async def _close(self) -> None:
        score = (self.spec.number % 11) / 10
        closed = await self._managed(f"/assay/rollouts/{self.name}/close", {"status": "done", "reward": score})
        if "id" in closed:
            self.clients.managed.append(Management(closed["id"], score, time.time()))

    async def _managed(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """JSON of a POST to the gateway's own API, retried while it is unavailable; empty after 90 seconds."""
        until = time.monotonic() + 90
        timeout = aiohttp.ClientTimeout(total=40)
        while time.monotonic() < until:
            try:
                headers = {"Authorization": f"Bearer {KEY}"}
                url = self.clients.url + path
                async with self.session.post(url, json=body, headers=headers, timeout=timeout) as response:
                    result: dict[str, Any] = await response.json()
                    if response.status != 503:
                        return result
            except (aiohttp.ClientError, OSError, TimeoutError):
                pass
            await asyncio.sleep(0.3)
        return {}
