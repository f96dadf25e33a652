"""MCP servers as tools: real server processes, also ones that die, hang, or return too much."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dspy
import pytest

from assay.models.limits import ToolOverTime, limited
from assay.programs import McpServer, ToolUser
from assay.programs.mcp_servers import McpError
from assay.testing import scripted_lm

pytest.importorskip("mcp")
WAIT_S = 240  # a busy machine takes long to start a process

SERVER = '''
import os, sys, time
from mcp.server.mcpserver import MCPServer

server = MCPServer("shop")

@server.tool()
def price(item: str, count: int = 1) -> str:
    """Price of an item."""
    return str(3 * count) + " of " + item

@server.tool()
def slow(seconds: float) -> str:
    began = time.monotonic()
    time.sleep(seconds)
    return f"{began} {time.monotonic()} {os.getpid()}"

@server.tool()
def big() -> str:
    return "x" * 1_000_000

@server.tool()
def broken() -> str:
    raise ValueError("out of stock")

@server.tool()
def die() -> str:
    print("the disk is full", file=sys.stderr, flush=True)
    os._exit(3)

@server.tool()
def talk() -> str:
    for _ in range(48):
        print("x" * (1 << 16), file=sys.stderr, flush=True)
    print("the last words", file=sys.stderr, flush=True)
    return "done"

server.run("stdio")
'''


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return path


@pytest.fixture
def server(script: Path) -> Iterator[McpServer]:
    with McpServer([sys.executable, str(script)], start_timeout_s=WAIT_S) as running:
        yield running


def scripted(*turns: Any) -> Any:
    left = list(turns)

    def script(request: Any) -> str:
        fields = request.config.response_format["schema"]["properties"]
        if "arguments" in fields:
            return json.dumps({"arguments": left.pop(0)})
        tools = left.pop(0) if "action" in fields and left else []
        values = {"action": [*tools, "answer"][0], "also": tools[1:], "need": float(bool(tools)), "thought": ""}
        return json.dumps({name: values.get(name, "done") for name in fields})

    return scripted_lm(script)


@pytest.mark.slow
def test_tools_have_their_schemas_and_are_called(server: McpServer) -> None:
    tools = {tool.name: tool for tool in server.tools()}
    assert tools["price"].description == "Price of an item."
    assert tools["price"].parameters["required"] == ["item"]
    assert server.call("price", {"item": "tea", "count": 2}) == "6 of tea"
    assert server.call("big", {}).endswith("… (1,000,000 characters in all)")
    for name, arguments, reason in (("broken", {}, "broken"), ("price", {}, "item"), ("nothing", {}, "nothing")):
        with pytest.raises(McpError, match=reason):
            server.call(name, arguments)


@pytest.mark.slow
def test_an_agent_uses_a_server_and_survives_its_death(server: McpServer) -> None:
    turns = (["price"], {"item": "tea"}, ["die"], {}, ["price"], {"item": "jam", "count": None})
    with dspy.context(lm=scripted(*turns), trace=[]):
        result = ToolUser(servers=[server])(question="What does tea cost?")
    first, dead, again = result.calls
    assert first["result"] == "3 of tea"
    assert "has died; it wrote: " in dead["error"]
    assert "the disk is full" in dead["error"]
    assert again["error"] is None
    assert again["result"] == "3 of jam"  # it was started again


@pytest.mark.chaos
@pytest.mark.slow
def test_a_call_that_hangs_ends_at_its_limit(script: Path) -> None:
    with McpServer([sys.executable, str(script)], timeout_s=5, start_timeout_s=WAIT_S) as server:
        with pytest.raises(McpError, match="gave no result after 5 s"):
            server.call("slow", {"seconds": 60})
        assert server.call("price", {"item": "tea"}) == "3 of tea"
        tool = next(tool for tool in server.tools() if tool.name == "slow")
        with limited(1.0), pytest.raises(ToolOverTime):  # the limit of tools is a quarter of it
            tool.call({"seconds": 60})


def test_a_server_that_dies_at_every_start_is_given_up(tmp_path: Path) -> None:
    server = McpServer([sys.executable, "-c", "raise SystemExit('no licence')"], start_timeout_s=WAIT_S)
    for _ in range(5):
        with pytest.raises(McpError, match="no licence"):
            server.tools()
    with pytest.raises(McpError, match="died 5 times"):
        server.tools()
    with dspy.context(lm=scripted(), trace=[]), pytest.raises(McpError):  # the run fails, with this reason
        ToolUser(servers=[server])(question="hello")


@pytest.mark.slow
def test_an_address_is_a_server_too(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    served = tmp_path / "served.py"
    run = f'server.run("streamable-http", host="127.0.0.1", port={port})'
    served.write_text(SERVER.replace('server.run("stdio")', run))
    process = subprocess.Popen([sys.executable, str(served)], stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        with McpServer(url=f"http://127.0.0.1:{port}/mcp", start_timeout_s=WAIT_S) as server:
            assert server.call("price", {"item": "tea"}) == "3 of tea"
            process.kill()
            process.wait()
            with pytest.raises(McpError):
                server.call("price", {"item": "tea"})
    finally:
        process.kill()
        process.wait()
