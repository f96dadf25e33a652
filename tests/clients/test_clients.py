"""Unchanged agents on the real client libraries, recorded by `assay serve` in front of a scripted model.

Long conversations: several questions, streamed and not, two parallel tool calls, typed answers. `test_table.py` has
shorter ones of more clients, compared byte by byte. Libraries that conflict with the project's own are installed from
`requirements/` into environments in the user's cache (one or two minutes the first time). ASSAY_NO_CLIENTS=1 skips
the tests of these libraries.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from harness import HERE, KEY, SERVE, TYPED, environment, started, variables

from assay.traces import Rollout, Store
from assay.traces.messages.dialects import chat_messages
from rigs import module_command
from rigs.serving import get, post

pytestmark = pytest.mark.slow

TWICE, ONCE = "use the tool #both: six times seven", "use the tool: six times seven"


@pytest.fixture(scope="session")
def newest() -> str:
    return environment("newest")


# -- the gateway


class Stage:
    """`assay serve` and its upstream server, each in its own process; `rollouts` lists those stored since `mark`."""

    def __init__(self, url: str, store: Path, log: Path | None) -> None:
        self.url, self.store, self.log = url, store, log
        self.mark()

    def mark(self) -> None:
        self._known, self._before = {rollout.id for rollout in self._all()}, self._counts()

    def _all(self) -> list[Rollout]:
        with Store(self.store) as store:
            return [store.rollout(rollout.id) for rollout in store.rollouts(limit=None)][::-1]

    def _counts(self) -> dict[str, int]:
        stats = get(f"{self.url}/assay/stats", Authorization=f"Bearer {KEY}")
        answered = len(self.log.read_text().splitlines()) if self.log and self.log.is_file() else 0
        return {name: stats[name] for name in ("calls", "stored", "unrecorded")} | {
            "answered": answered,
            "past": sum(stats["refused_paths"].values()),
        }

    def counts(self) -> dict[str, int]:
        """Number of calls forwarded, stored and missed by the gateway, answered upstream, and not via the gateway."""
        return {name: count - self._before[name] for name, count in self._counts().items()}

    def rollouts(self, calls: int) -> list[Rollout]:
        """New rollouts, once so many calls of theirs are in the store."""
        for _ in range(100):
            rollouts = [rollout for rollout in self._all() if rollout.id not in self._known]
            if sum(len(rollout.transitions) for rollout in rollouts) >= calls:
                get(
                    f"{self.url}/assay/rollouts/{rollouts[-1].id}", Authorization=f"Bearer {KEY}"
                )  # pending rows are written before it answers
                return [rollout for rollout in self._all() if rollout.id not in self._known]
            time.sleep(0.1)
        raise AssertionError(f"{calls} calls were expected in the store: {self.counts()}")

    def begin(
        self, python: str, script: str, *arguments: str, path: str = "", key: str = KEY
    ) -> "subprocess.Popen[str]":
        """Starts an agent whose base address and key are the gateway's."""
        command = [python, str(HERE / script), *arguments]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables(self.url + path, key)
        )

    def run(self, python: str, script: str, *arguments: str, **options: str) -> Any:
        """What an agent answers."""
        return answer_of(self.begin(python, script, *arguments, **options))


def answer_of(process: "subprocess.Popen[str]") -> Any:
    output, complaints = process.communicate(timeout=120)
    assert process.returncode == 0, complaints[-4000:]
    return json.loads(output)["answer"]


@pytest.fixture(scope="module")
def _stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("clients")
    with ExitStack() as running:
        behind = running.enter_context(started(*module_command("rigs.upstream"), "--log", str(folder / "log")))
        flags = ("--upstream", behind, "--upstream-key", "upstream-secret", "--store", str(folder / "s.db"))
        yield Stage(running.enter_context(started(*SERVE, *flags)), folder / "s.db", folder / "log")


@pytest.fixture
def stage(_stage: Stage) -> Stage:
    """One gateway for all tests: consecutive agents with equal requests must not be mistaken for each other."""
    _stage.mark()
    return _stage


def whole(
    stage: Stage,
    answer: Any,
    dialect: str,
    *,
    first: str = TWICE,
    outputs: list[str] | None = None,
    tools: int = 3,
    streamed: int = 2,
) -> Rollout:
    """Checks that a run was recorded as one rollout: every call, every tool call with its result, the final answer."""
    expected = outputs or ["twice, then" if "#both" in first else "", "echo: 42", "", "echo: 42", TYPED]
    (rollout,) = stage.rollouts(len(expected))
    calls = len(expected)
    assert stage.counts() == {"calls": calls, "stored": calls, "answered": calls, "unrecorded": 0, "past": 0}
    assert [(t.t, t.request["dialect"], t.error) for t in rollout.transitions] == [
        (at, dialect, None) for at in range(calls)
    ]
    assert [t.output for t in rollout.transitions] == expected
    assert [t.constrained for t in rollout.transitions] == [False] * (calls - 1) + [expected[-1] == TYPED]
    roles = [message["role"] for t in rollout.transitions for message in chat_messages(t.request)]
    assert ("assistant", "assistant") not in pairwise(roles)  # one answer is one message, whatever the dialect
    assert sum(bool(t.request["body"].get("stream")) for t in rollout.transitions) == streamed
    assert [(tool.name, tool.arguments, tool.result, tool.error) for tool in rollout.tools] == [
        ("calculator", {"expression": "6*7"}, "42", None)
    ] * tools
    assert (rollout.source, rollout.inputs, rollout.score) == ("gateway", {"prompt": first}, None)
    assert rollout.prediction == {"answer": expected[-1]}
    assert answer == (json.loads(TYPED) if expected[-1] == TYPED else expected[-1])
    return rollout


# -- the clients


@pytest.mark.parametrize("mode", ["chat", "responses", "chained"])
def test_the_newest_openai_sdk_is_recorded_whole(stage: Stage, newest: str, mode: str) -> None:
    whole(stage, stage.run(newest, "openai_sdk.py", mode, TWICE), "chat" if mode == "chat" else "responses")
    assert stage.log is not None
    paths = [line.split()[1] for line in stage.log.read_text().splitlines()[-5:]]
    assert [path.endswith("/responses?beta=true") for path in paths] == [mode == "chained"] * 2 + [False] * 3


@pytest.mark.parametrize("mode", ["chat", "responses", "chained"])
def test_the_projects_own_openai_sdk_is_recorded_whole(stage: Stage, mode: str) -> None:
    whole(stage, stage.run(sys.executable, "openai_sdk.py", mode, TWICE), "chat" if mode == "chat" else "responses")


def test_the_anthropic_sdk_with_its_tool_runner_is_recorded_whole(stage: Stage, newest: str) -> None:
    outputs = ["twice, then", "echo: 42", "", "echo: 42", "", "echo: 42", "echo: a thread", "echo: that goes on", TYPED]
    whole(stage, stage.run(newest, "anthropic_sdk.py", TWICE), "messages", outputs=outputs, tools=4)


@pytest.mark.parametrize(("mode", "streamed"), [("whole", 0), ("streamed", 5)])
def test_autogen_assistants_are_recorded_whole(stage: Stage, newest: str, mode: str, streamed: int) -> None:
    whole(stage, stage.run(newest, "autogen_agent.py", mode, TWICE), "chat", streamed=streamed)


@pytest.mark.parametrize(
    ("model", "dialect", "first"), [("openai/gpt-4o", "chat", TWICE), ("anthropic/claude-sonnet-4-5", "messages", ONCE)]
)
def test_litellm_is_recorded_whole_also_where_it_rewrites_the_conversation(
    stage: Stage, model: str, dialect: str, first: str
) -> None:
    whole(
        stage,
        stage.run(sys.executable, "litellm_agent.py", model, first),
        dialect,
        first=first,
        tools=3 if first == TWICE else 2,
    )


@pytest.mark.parametrize("engine", ["lm15", "litellm"])
def test_a_dspy_agent_is_one_rollout_and_a_call_of_its_own_another(stage: Stage, engine: str) -> None:
    answer = stage.run(sys.executable, "dspy_agent.py", engine, TWICE)
    agent, typed = stage.rollouts(4)
    assert stage.counts() == {"calls": 4, "stored": 4, "answered": 4, "unrecorded": 0, "past": 0}
    assert [(tool.name, tool.arguments, tool.result) for tool in agent.tools] == [
        *[("calculator", {"expression": "6*7"}, "42")] * 2,
        ("submit", {"answer": "echo"}, None),
    ]
    assert [t.t for t in agent.transitions] == [0, 1, 2]
    assert (agent.prediction, typed.prediction) == ({"answer": "echo"}, json.loads(TYPED))
    assert answer == json.loads(TYPED)


# -- which rollout


def test_runs_of_one_task_after_one_another_and_at_once_are_rollouts_of_one_group(stage: Stage) -> None:
    first = f"{TWICE}, for the group"
    for _ in range(2):
        stage.run(sys.executable, "openai_sdk.py", "chat", first)
    for process in [stage.begin(sys.executable, "openai_sdk.py", "chat", first) for _ in range(2)]:
        answer_of(process)
    rollouts = stage.rollouts(20)
    assert [len(rollout.transitions) for rollout in rollouts] == [5] * 4
    assert len({rollout.group_id for rollout in rollouts}) == 1
    assert all([tool.result for tool in rollout.tools] == ["42"] * 3 for rollout in rollouts)
    assert stage.counts() == {"calls": 20, "stored": 20, "answered": 20, "unrecorded": 0, "past": 0}


def test_similar_conversations_without_tools_are_not_confused(stage: Stage) -> None:
    answers = [stage.run(sys.executable, "plain_chat.py", "Hello") for _ in range(2)]
    rollouts = stage.rollouts(4)
    assert [[t.output for t in rollout.transitions] for rollout in rollouts] == [
        ["echo: Hello", "echo: And goodbye."]
    ] * 2
    assert [rollout.prediction for rollout in rollouts] == [{"answer": answer} for answer in answers]


@pytest.mark.parametrize("mode", ["chat", "responses"])
def test_a_call_that_the_sdk_tries_again_by_itself_stays_in_its_rollout(stage: Stage, mode: str) -> None:
    answer = stage.run(sys.executable, "openai_sdk.py", mode, f"{TWICE} #once429 {mode}")
    (rollout,) = stage.rollouts(6)
    assert [(t.error or "")[:8] for t in rollout.transitions] == ["HTTP 429"] + [""] * 5
    assert [tool.result for tool in rollout.tools] == ["42"] * 3
    assert (rollout.prediction, answer) == ({"answer": TYPED}, json.loads(TYPED))
    assert stage.counts() == {"calls": 6, "stored": 6, "answered": 5, "unrecorded": 0, "past": 0}


@pytest.mark.parametrize("first", ["Hello #late", "Hello #pause"])  # the stream ends late, or its last event comes late
def test_a_client_that_continues_at_the_finish_reason_is_recorded_completely(
    stage: Stage, newest: str, first: str
) -> None:
    outputs = [f"echo: {first}", "echo: And goodbye."]
    whole(stage, stage.run(newest, "plain_chat.py", first), "chat", first=first, outputs=outputs, tools=0, streamed=1)


def test_a_client_that_closes_a_stream_at_its_last_event_is_recorded_whole(stage: Stage, newest: str) -> None:
    whole(
        stage,
        stage.run(newest, "autogen_agent.py", "streamed", f"{TWICE} #late"),
        "chat",
        first=f"{TWICE} #late",
        streamed=5,
    )


def test_a_client_that_leaves_when_it_has_read_the_finish_has_its_answer_recorded(stage: Stage) -> None:
    client = openai.OpenAI(base_url=f"{stage.url}/v1", api_key=KEY)
    messages: list[dict[str, str]] = [{"role": "user", "content": "Hello #pause"}]
    with client.chat.completions.create(model="any", messages=messages, stream=True) as parts:
        next(part for part in parts if part.choices[0].finish_reason)
    (rollout,) = stage.rollouts(1)
    assert (rollout.transitions[0].error, rollout.prediction) == (None, {"answer": "echo: Hello #pause"})


@pytest.mark.parametrize("how", ["path", "key"])
def test_a_run_that_is_named_is_one_rollout_whatever_it_asks(stage: Stage, how: str) -> None:
    _, opened = post(
        f"{stage.url}/assay/rollouts",
        {"task_id": f"t-{how}", "expected": {"answer": "42"}},
        Authorization=f"Bearer {KEY}",
    )
    options = {"path": f"/r/{opened['id']}"} if how == "path" else {"key": opened["api_key"]}
    stage.run(sys.executable, "dspy_agent.py", "lm15", TWICE, **options)  # its typed call is a conversation of its own
    report = {"reward": 0.75}
    assert post(f"{stage.url}/assay/rollouts/{opened['id']}/close", report, Authorization=f"Bearer {KEY}")[0] == 200
    (rollout,) = stage.rollouts(4)
    assert (rollout.id, rollout.task_id, rollout.expected) == (opened["id"], f"t-{how}", {"answer": "42"})
    assert (rollout.status, rollout.score, rollout.prediction) == ("done", 0.75, json.loads(TYPED))
    assert [t.t for t in rollout.transitions] == [0, 1, 2, 3]


def test_anthropics_sdk_is_named_by_path_too_and_the_cli_shows_the_run(stage: Stage, newest: str) -> None:
    stage.run(newest, "anthropic_sdk.py", TWICE, path="/r/my-run")
    (rollout,) = stage.rollouts(9)
    assert rollout.metadata["client_id"] == "my-run"
    command = [sys.executable, "-m", "assay", "traces", "show", rollout.id, "--json", "--store", str(stage.store)]
    record = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert [t["output"] for t in record["transitions"]][-3:] == ["echo: a thread", "echo: that goes on", TYPED]
    assert [tool["result"] for t in record["transitions"] for tool in t["tools"]] == ["42"] * 4


def test_without_the_key_a_client_gets_an_error_that_it_can_read_and_nothing_is_recorded(stage: Stage) -> None:
    process = stage.begin(sys.executable, "openai_sdk.py", "chat", TWICE, key="another-key")
    _, complaints = process.communicate(timeout=120)
    assert "AuthenticationError" in complaints
    assert "wrong or missing key" in complaints
    assert stage.counts() == {"calls": 0, "stored": 0, "answered": 0, "unrecorded": 0, "past": 0}


@pytest.mark.model
def test_a_client_talks_to_the_embedded_model(embedded: str, tmp_path: Path) -> None:
    with started(*SERVE, "--model", embedded, "--store", str(tmp_path / "s.db")) as url:
        stage = Stage(url, tmp_path / "s.db", None)
        answer = stage.run(sys.executable, "plain_chat.py", "My name is Ann. Say hello.")
        (rollout,) = stage.rollouts(2)
        assert stage.counts() == {"calls": 2, "stored": 2, "answered": 0, "unrecorded": 0, "past": 0}
    assert rollout.model == embedded
    assert rollout.prediction == {"answer": answer}
    for transition in rollout.transitions:
        assert transition.token_ids is not None
        assert transition.logprobs is not None
        assert len(transition.token_ids) == len(transition.logprobs) > 0
