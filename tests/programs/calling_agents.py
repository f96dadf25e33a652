"""Agents for tests, which call the model at the base URL of their task as any client does."""

import json
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def post(task: Mapping[str, Any], path: str, body: Mapping[str, Any]) -> Any:
    """The JSON answer of a call; raises `HTTPError` as urllib does."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {task['api_key']}"}
    data = json.dumps({"model": task["model"], **body}).encode()
    request = urllib.request.Request(f"{task['base_url']}{path}", data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def chat(task: Mapping[str, Any], *messages: tuple[str, str], **body: Any) -> dict[str, Any]:
    """The message of a chat completion."""
    listed = [{"role": role, "content": content} for role, content in messages]
    message: dict[str, Any] = post(task, "/chat/completions", {"messages": listed, **body})["choices"][0]["message"]
    return message


def of_file(path: str, **body: Any) -> Callable[[dict[str, Any]], Any]:
    """An agent that sends the text of a file as its system message."""

    def agent(task: dict[str, Any]) -> Any:
        messages = (("system", Path(path).read_text()), ("user", task["inputs"]["question"]))
        return {"answer": chat(task, *messages, **body)["content"]}

    return agent
