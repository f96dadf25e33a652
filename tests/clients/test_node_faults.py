"""Faults in front of Node clients, directly and through the gateway: retries and aborted streams."""

from collections.abc import Iterator
from functools import partial

import pytest
from harness import Client, ClientSetup, Run, client_setup
from nodes import node_command

pytestmark = pytest.mark.slow

SDKS = ("openai", "anthropic", "vercel", "langchain")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientSetup]:
    client = Client(name="faults (Node)", command=partial(node_command, "faults_agent.mjs"))
    with client_setup(client, tmp_path_factory.mktemp("faults")) as started:
        yield started


def both(stage: ClientSetup, mode: str, question: str) -> tuple[list[Run], list[int]]:
    """A run alone and one through the gateway, and how many calls each made."""
    runs, calls = [], []
    for through in (False, True):
        runs.append(stage.run(mode, question, 100, through=through))
        calls.append(stage.upstream.calls - 100)
    return runs, calls


@pytest.mark.parametrize("mode", [f"{sdk}{suffix}" for sdk in SDKS for suffix in ("", "_stream")])
def test_a_call_that_fails_once_is_tried_again_by_the_client_alone(stage: ClientSetup, mode: str) -> None:
    question = f"Hello of {mode} #once500"
    (alone, through), calls = both(stage, mode, question)
    assert alone.reply == through.reply == {"answer": f"echo: {question}"}
    assert (calls, alone.statuses, through.statuses) == ([2, 2], [500, 200], [500, 200])
    (rollout,) = stage.new_rollouts(2)
    assert [(t.error or "")[:8] for t in rollout.transitions] == ["HTTP 500", ""]
    assert rollout.prediction == through.reply


@pytest.mark.parametrize("mode", [f"{sdk}{suffix}" for sdk in SDKS for suffix in ("", "_stream")])
def test_an_answer_that_breaks_off_is_asked_for_as_often_as_without_the_gateway(stage: ClientSetup, mode: str) -> None:
    (alone, through), calls = both(stage, mode, f"Hello of {mode} #die")
    assert calls[0] == calls[1]
    assert [list(run.reply) for run in (alone, through)] == [["error"]] * 2
    (rollout,) = stage.new_rollouts(calls[1])
    assert [t.failure for t in rollout.transitions] == ["model"] * calls[1]


@pytest.mark.parametrize("sdk", SDKS)
def test_a_stream_that_is_aborted_and_what_follows_are_one_rollout(stage: ClientSetup, sdk: str) -> None:
    (alone, through), calls = both(stage, f"{sdk}_abort", f"Hello of {sdk} #hang")
    assert alone.reply == through.reply == {"answer": "echo: never mind"}
    assert calls == [2, 2]
    (rollout,) = stage.new_rollouts(2)
    assert [t.failure for t in rollout.transitions] == ["cap", None]
    assert rollout.prediction == {"answer": "echo: never mind"}
