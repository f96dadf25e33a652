"""Every client of the table: a three-call tool agent against the scripted model alone and through the gateway, and rows that TRL trains on."""

from dataclasses import asdict
from pathlib import Path

import pytest
from harness import Client, bench, table_of
from nodes import NODE_CLIENTS
from training import check_rows

pytestmark = pytest.mark.slow

CLIENTS = [
    Client(
        name="google genai",
        environment="google",
        script="google_genai_agent.py",
        modes=("manual", "manual_stream", "automatic", "automatic_stream", "asynchronous", "asynchronous_stream"),
    ),
    Client(
        name="openai",
        environment="newest",
        script="openai_agent.py",
        modes=("chat", "chat_stream", "responses", "responses_stream", "chained", "chained_stream"),
    ),
    *NODE_CLIENTS,
]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_is_served_and_recorded_as_if_there_were_no_gateway(
    client: Client, tmp_path: Path, tiny_model: Path, request: pytest.FixtureRequest
) -> None:
    request.node.user_properties.append(("client name", client.name))
    with bench(client, tmp_path) as at:
        rows, modes = table_of(client, at)
    check_rows(tmp_path / "s.db", tiny_model, rows, modes, len(client.outputs))
    for row in rows:
        request.node.user_properties.append(("client", asdict(row)))
    assert [problem for row in rows for problem in row.problems] == []
