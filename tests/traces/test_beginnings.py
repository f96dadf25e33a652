"""The known prefix of a conversation is not parsed again, and results are as if it were."""

import json
from typing import Any

import pytest

from assay.support.scrubbing import MARK, add_secrets
from assay.traces.gateway.requests import Beginnings, ClientRequest, storable

Body = dict[str, Any]
SECRET = "planted-credential-1a2b3c4d"


def turns(dialect: str, count: int, *, planted: int = -1) -> list[Body]:
    """The requests of a conversation of so many turns, with a credential's field in the result of one."""
    body: Body = {
        "model": "m",
        "messages": [{"role": "user", "content": "begin"}],
        **({"system": "be brief"} if dialect == "messages" else {}),
    }
    bodies = [json.loads(json.dumps(body))]
    for turn in range(count):
        arguments = json.dumps({"expression": f"6*{turn}", **({"api_key": SECRET} if turn == planted else {})})
        if dialect == "chat":
            call = {"id": f"c{turn}", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
            more = [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"c{turn}", "content": "42"},
            ]
        else:
            use = {"type": "tool_use", "id": f"c{turn}", "name": "calculator", "input": json.loads(arguments)}
            result = [
                {"type": "tool_result", "tool_use_id": f"c{turn}", "content": "42"},
                {"type": "text", "text": "and now?"},
            ]
            more = [{"role": "assistant", "content": [use]}, {"role": "user", "content": result}]
        body["messages"] += more
        bodies.append(json.loads(json.dumps(body)))
    return bodies


def read(beginnings: Beginnings, dialect: str, body: Body) -> ClientRequest:
    """As a call reads its request."""
    known = beginnings.of(dialect, body)
    assert known is not None
    stored = storable(body, [], checked=known.known)
    client_request = ClientRequest(dialect, stored, begun=known.chain if stored["messages"] is body["messages"] else ())
    if stored["messages"] is body["messages"]:
        beginnings.keep(known, client_request.chain)
    return client_request


@pytest.mark.parametrize("planted", [-1, 0, 3])
@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_a_cached_beginning_gives_the_same_request_as_no_cache(dialect: str, planted: int) -> None:
    beginnings = Beginnings()
    for body in turns(dialect, 5, planted=planted):
        cached, uncached = read(beginnings, dialect, body), ClientRequest(dialect, storable(body, []))
        assert list(cached.body.items()) == list(uncached.body.items())
        assert (cached.chain, cached.task) == (uncached.chain, uncached.task)
        assert SECRET not in json.dumps(cached.body)


def test_a_key_that_is_registered_later_is_removed_from_a_cached_beginning() -> None:
    beginnings, later = Beginnings(), "told-after-the-first-call-77"
    *_, last, body = turns("chat", 3)
    for request in (last, body):
        request["messages"][0]["content"] = f"with {later}"
    assert later in json.dumps(read(beginnings, "chat", last).body)
    add_secrets(later)
    assert read(beginnings, "chat", body).body["messages"][0]["content"] == f"with {MARK}"
