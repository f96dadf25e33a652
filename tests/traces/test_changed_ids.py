"""Tool results whose ids the client changed."""

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from assay.traces import Rollout, Store
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of
from rigs.serving import post, served
from rigs.upstream import response_body

CALLS = [("c1", "f", '{"a": 1}'), ("c2", "g", "{}"), ("c3", "f", '{"a": 1}')]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]


def run_of(folder: Path, *bodies: dict[str, Any], path: str = "/v1/chat/completions") -> Rollout:
    """The rollout of these requests; each is answered with three calls, until it has results."""

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        last = body["messages"][-1]
        has_result = last["role"] == "tool" or isinstance(last["content"], list)
        text, calls = ("done", []) if has_result and not body.get("more") else ("", CALLS)
        return web.json_response(response_body("messages" if "messages" in path else "chat", 1, "m", text, calls))

    app = web.Application()
    app.router.add_post(path, answer)
    with Store(folder / "s.db") as store, served(app) as behind:
        gateway = Gateway(store, upstream_of("m", base=behind))
        with served(gateway.app()) as url:
            for body in bodies:
                assert post(url + path, {"model": "m", "tools": TOOLS, **body})[0] == 200
        store.flush()
        (rollout,) = store.rollouts()
        return store.rollout(rollout.id)


def asked(*later: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "add"}, *later], **more}


def called(*ids: str) -> dict[str, Any]:
    functions = [{"name": name, "arguments": arguments} for _, name, arguments in CALLS]
    calls = [{"id": new, "type": "function", "function": at} for new, at in zip(ids, functions, strict=True)]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def results(**texts: str) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in texts.items()]


@pytest.mark.parametrize(
    "later",
    [
        [called("c1", "c2", "c3"), *results(c3="r3", c1="r1", c2="r2")],
        [called("x1", "x2", "x3"), *results(x1="r1", x2="r2", x3="r3")],
        [called("x1", "x2", "x3"), *results(x3="r3", x1="r1", x2="r2")],
        [called("c1", "c2", "c3"), *results(x1="r1", x2="r2", x3="r3")],
        [called("c1", "x2", "x3"), *results(c1="r1", x2="r2", x3="r3")],
    ],
)
def test_results_belong_to_their_calls_in_order_where_ids_changed(tmp_path: Path, later: list[dict[str, Any]]) -> None:
    rollout = run_of(tmp_path, asked(), asked(*later))
    assert [(tool.name, tool.result) for tool in rollout.tools] == [("f", "r1"), ("g", "r2"), ("f", "r3")]


def test_every_turn_gets_its_own_results(tmp_path: Path) -> None:
    first = [called("x1", "x2", "x3"), *results(x1="r1", x2="r2", x3="r3")]
    second = [*first, called("y1", "y2", "y3"), *results(y1="s1", y2="s2", y3="s3")]
    rollout = run_of(tmp_path, asked(), asked(*first, more=1), asked(*second))
    assert [tool.result for tool in rollout.tools] == ["r1", "r2", "r3", "s1", "s2", "s3"]


def test_a_result_that_is_missing_stays_missing(tmp_path: Path) -> None:
    rollout = run_of(tmp_path, asked(), asked(called("x1", "x2", "x3"), *results(x2="r2")))
    assert [tool.result for tool in rollout.tools] == [None, "r2", None]
