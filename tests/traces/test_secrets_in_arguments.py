"""Credentials in arguments, settings and fields of a call: they alone are removed, every other byte stays."""

import json
from pathlib import Path
from typing import Any

import pytest
from planted_secrets import Echo, Planted, echo as echo, everything_in

from assay.support.scrubbing import MARK
from assay.traces import Rollout, Store, Transition
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of
from rigs.serving import post, served
from rigs.upstream import ScriptedUpstream


def stored_body(tmp_path: Path, body: dict[str, Any]) -> dict[str, Any]:
    """A request as the store has it."""
    rollout = Rollout()
    with Store(tmp_path / "s.db") as store:
        store.put_rollout(rollout)
        store.put_transition(rollout.id, Transition(t=0, model="m", request={"dialect": "chat", "body": body}))
        store.flush()
        stored: dict[str, Any] = store.rollout(rollout.id).transitions[0].request["body"]
    return stored


def request_with(arguments: str) -> dict[str, Any]:
    calls = [{"id": "c", "function": {"name": "f", "arguments": arguments}}]
    return {"messages": [{"role": "assistant", "tool_calls": calls}]}


@pytest.mark.parametrize(
    ("arguments", "masked"),
    [
        ('{"q":1.0e3 , "api_key" :"sk-Plant0123456"}', '{"q":1.0e3 , "api_key" :"[key]"}'),
        ('{"api_key": "sk-Plant0123456", "api_key": "x"}', '{"api_key": "[key]", "api_key": "x"}'),
        ('[{"a": [":", "x"], "accessToken": "Plant0123456"}]', '[{"a": [":", "x"], "accessToken": "[key]"}]'),
        (
            '{"é": "\\u00e9", "config": "{\\"api_key\\": \\"Plant0123456\\"}"}',
            '{"é": "\\u00e9", "config": "{\\"api_key\\": \\"[key]\\"}"}',
        ),
        ('{"api\\u005fkey": "Plant0123456", "cut": "of', '{"api\\u005fkey": "[key]", "cut": "of'),
        ('{"n": 1, "headers": {"Authorization": "Bearer Plant0123456', '{"n": 1, "headers": {"Authorization": "[key]"'),
        (
            '{"url": "https://u:Plant0123456@h/?X-Goog-Signature=Plant0123456&q=1"}',
            '{"url": "https://[key]@h/?X-Goog-Signature=[key]&q=1"}',
        ),
    ],
)
def test_arguments_of_a_tool_call_lose_the_credential_and_keep_every_other_byte(
    tmp_path: Path, arguments: str, masked: str
) -> None:
    assert stored_body(tmp_path, request_with(arguments)) == request_with(masked)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"password":"hunter22","token" : "word", "author": "Bearer of news", "key": "sk-learn-0123456789", "n": 1.0}',
        '{"api_key": "a task", "api_key_env": "OPENAI_KEY1", "headers": {"X-Any": "Plant0123456"}, "schema": '
        '{"api_key": {"type": "string"}}}',
        '{"url": "https://shop.example/item?code=SUMMER24&key=name1234", "uri": "https://me@h/x", "image_url": '
        '"data:image/png;base64,AA?sig=abcd1234"}',
        '{"text": "{\\"api_key\\": is no JSON", "code": "x = {\\"token\\": 1}"}',
        'api_key: "sk-Plant0123456" is no JSON',
        '{"cut": "\\',
        "",
    ],
)
def test_arguments_of_a_tool_call_without_a_credential_stay_byte_for_byte(tmp_path: Path, arguments: str) -> None:
    assert stored_body(tmp_path, request_with(arguments)) == request_with(arguments)


def test_settings_without_a_credential_stay_byte_for_byte(tmp_path: Path) -> None:
    schema = (
        '{ "type":"object", "properties": {"password": {"type":"string"}, "api_key":{"type" : "string"}}, '
        '"required":["password"] }'
    )
    args = ["--max-tokens=4096", "--token=required", "--author=me", "LANG=en_US", "note: a list", '{"a": 1.0}']
    args.append("api_key: a text about keys")
    body = {"guided_json": schema, "args": args, "stop": ["Password: ", "token:"], "messages": []}
    assert stored_body(tmp_path, body) == body


def test_json_in_settings_keeps_its_formatting(tmp_path: Path) -> None:
    settings = {"n": 1.5, "é": ["x"], "api_key": "Plant0123456"}
    forms: list[dict[str, Any]] = [{}, {"indent": 2}, {"separators": (",", ":"), "ensure_ascii": False}]
    body = {"settings": [json.dumps(settings, **form) for form in forms], "messages": []}
    assert stored_body(tmp_path, body)["settings"] == [
        json.dumps({**settings, "api_key": MARK}, **form) for form in forms
    ]


def test_a_conversation_with_a_credential_in_a_tool_call_continues(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"api_key":"sk-Plant0123456"}'}}
    upstream = ScriptedUpstream()
    with (
        Store(tmp_path / "s.db") as store,
        served(upstream.app()) as behind,
        served(Gateway(store, upstream_of("m", base=behind)).app()) as url,
    ):
        script = f"#answers {json.dumps([{'tool': 'f', 'arguments': {'api_key': 'sk-Plant0123456'}}, 'done'])}"
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        prompt = [{"role": "user", "content": script}]
        _, reply = post(f"{url}/v1/chat/completions", {"messages": prompt, "tools": tools})
        call["id"] = reply["choices"][0]["message"]["tool_calls"][0]["id"]
        turns = [
            *prompt,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "1"},
        ]
        assert post(f"{url}/v1/chat/completions", {"messages": turns, "tools": tools})[0] == 200
        store.flush()
        (rollout,) = [store.rollout(row.id) for row in store.rollouts()]
    assert (len(rollout.transitions), rollout.transitions[0].tools[0].arguments) == (2, {"api_key": MARK})


def test_fields_that_open_and_end_a_rollout_are_stored_without_credentials(
    echo: tuple[Echo, str], tmp_path: Path
) -> None:
    plant = Planted()
    with (
        Store(tmp_path / "s.db") as store,
        served(Gateway(store, upstream_of("m", base=echo[1]), key="gateway-key-1").app()) as gateway,
    ):
        owner = {"Authorization": "Bearer gateway-key-1"}
        client = {"api_key": plant(), "headers": {"X-Any": plant()}}
        extra = {"azure_ad_token": plant(), "aws_security_token": plant()}
        fields = {
            "metadata": {"client": client, "url": f"https://u:{plant()}@h"},
            "parameters": {"authorization": plant(), "extra": extra, "sas_token": plant()},
        }
        opened = post(f"{gateway}/assay/rollouts", fields, **owner)[1]
        refused = "AuthenticationError: Incorrect API key provided: {}; Authorization: Bearer {}, api_key={}"
        ended = {"status": "error", "error": refused.format(f"sk-{plant()}", plant(), plant())}
        assert post(f"{gateway}/assay/rollouts/{opened['id']}/close", ended, **owner)[0] == 200
        config = {"optimizer_settings": {"api_key": plant()}, "api_base": f"http://h?api_key={plant()}"}
        store.put_run("r", kind="k", config=config, status="done", started_at=0.0)
        store.flush()
        rollout = store.rollout(opened["id"])
    assert rollout.error == refused.format(MARK, MARK, MARK)
    assert plant.in_(everything_in(tmp_path)) == []
    assert "gateway-key-1" not in everything_in(tmp_path)
