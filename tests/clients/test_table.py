"""Every client of the table: a three-call tool agent, directly and through the gateway, and the rows TRL trains on."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from client_table import table_of
from harness import Client, client_setup
from nodes import NODE_CLIENTS
from training import check_rows

pytestmark = pytest.mark.slow

DIALECTS = ("chat", "chat_stream", "responses", "responses_stream")
MESSAGES = ("messages", "messages_stream")
CALCULATED = (("Calculation", {"expression": "6*7"}, "42"),) * 2
USED = (("calculator", {"expression": "6*7"}, "42"),) * 2

CALL = {"tool": "calculator", "arguments": {"expression": "6*7"}}
CODE = tuple(
    f"Thought: next\n<code>\n{code}\n</code>"
    for code in (*['print(calculator(expression="6*7"))'] * 2, 'final_answer("42")')
)
TYPED = {"value": 1, "unit": "echo"}

CLIENTS = [
    Client(name="openai", script="openai_agent.py", modes=(*DIALECTS, "chained", "chained_stream")),
    Client(name="anthropic", script="anthropic_agent.py", modes=("sync", "stream", "runner", "runner_stream")),
    Client(
        name="litellm",
        environment="project",
        script="litellm_agent.py",
        modes=(*DIALECTS[:2], *MESSAGES),
        # its client for Anthropic does not retry; a streamed call of a tool comes back with a text that it adds
        by_mode={"messages": {"retries": 1}, "messages_stream": {"retries": 1, "conversations": 3}},
    ),
    Client(name="langchain", script="langchain_agent.py", modes=(*DIALECTS, *MESSAGES)),
    Client(name="langgraph", script="langgraph_agent.py"),
    Client(name="autogen", script="autogen_agent.py"),
    Client(name="openai agents", script="agents_sdk_agent.py", modes=DIALECTS),
    Client(name="llamaindex", environment="openai2", script="llama_index_agent.py"),
    Client(name="pydantic-ai", script="pydantic_ai_agent.py", modes=("text", "text_stream")),
    Client(
        name="pydantic-ai, typed",
        script="pydantic_ai_agent.py",
        modes=("typed", "typed_stream"),
        outputs=("", "", ""),
        tools=(*USED, ("final_result", TYPED, None)),
        answer=TYPED,
    ),
    Client(
        name="smolagents",
        script="smolagents_agent.py",
        modes=("tools", "tools_stream"),
        ask=f"#answers {json.dumps([CALL, CALL, {'tool': 'final_answer', 'arguments': {'answer': '42'}}])}",
        outputs=("", "", ""),
        tools=(
            *(("calculator", {"expression": "6*7"}, None),) * 2,
            ("final_answer", {"answer": "42"}, None),
        ),  # results come back as a user's text
        answer="42",
        conversations=3,  # each request has the answers before it in words of the client
    ),
    Client(
        name="smolagents, code",
        script="smolagents_agent.py",
        modes=("code", "code_stream"),
        ask=f"#answers {json.dumps(CODE)}",
        outputs=CODE,
        tools=(),
        answer="42",
        conversations=3,
    ),
    Client(
        name="instructor",
        environment="openai2",
        script="instructor_agent.py",
        outputs=("", "", ""),
        tools=(*CALCULATED, ("Product", TYPED, None)),
        answer=TYPED,
        by_mode={"stream": {"streamed": 1, "tools": (*CALCULATED, ("PartialProduct", TYPED, None))}},
    ),
    Client(name="crewai", environment="crewai", script="crewai_agent.py"),
    Client(
        name="dspy",
        environment="project",
        script="dspy_agent.py",
        modes=("lm15", "lm15_stream", "litellm", "litellm_stream"),
        ask=f"#answers {json.dumps([CALL, CALL, {'tool': 'submit', 'arguments': {'answer': '42'}}])}",
        outputs=("", "", ""),
        tools=(*USED, ("submit", {"answer": "42"}, None)),
        answer="42",
        conversations=2,  # each step ends with a request for the form of the answer, which the next step leaves out
    ),
    Client(
        name="google genai",
        environment="google",
        script="google_genai_agent.py",
        modes=("manual", "manual_stream", "automatic", "automatic_stream", "asynchronous", "asynchronous_stream"),
    ),
    *NODE_CLIENTS,
]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_is_served_and_recorded_as_if_there_were_no_gateway(
    client: Client, tmp_path: Path, tiny_model: Path, request: pytest.FixtureRequest
) -> None:
    request.node.user_properties.append(("client name", client.name))
    with client_setup(client, tmp_path) as at:
        rows, modes = table_of(client, at)
    check_rows(tmp_path / "s.db", tiny_model, rows, modes, client)
    for row in rows:
        request.node.user_properties.append(("client", asdict(row)))
    if problems := [problem for row in rows for problem in row.problems]:
        pytest.fail("\n".join(problems), pytrace=False)
