"""Rollouts of deployed agents that hang, through the gateway."""

import json
import threading
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from assay.traces import Store
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of
from rigs.serving import served

KEY = "k" * 32
HANGING = 40  # more than asyncio's own pool of threads has on any small machine


class Answer(dict[str, Any]):
    rollout, version = "r1", "support@1"


class Agent:
    """Answers once `released`, or at once if it is asked to."""

    counts: Mapping[tuple[str, str, str], int] = {}
    seconds: Mapping[tuple[str, str], float] = {}
    fallbacks: Mapping[str, int] = {}

    def __init__(self) -> None:
        self.released, self.waiting = threading.Event(), threading.Semaphore(0)

    def __call__(self, inputs: Mapping[str, Any], **fields: Any) -> Answer:
        if inputs["question"] == "hang":
            self.waiting.release()
            self.released.wait(120)
        return Answer(answer=inputs["question"])


def asked(url: str, question: str) -> str:
    body = json.dumps({"inputs": {"question": question}}).encode()
    request = urllib.request.Request(f"{url}/agents/support", body, {"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["outputs"]["answer"])


def test_rollouts_that_hang_do_not_hold_up_others(tmp_path: Path) -> None:
    agent = Agent()
    with Store(tmp_path / "s.db") as store:
        gateway = Gateway(store, upstream_of("m", base="http://127.0.0.1:9"), agents={"support": agent}, key=KEY)
        with served(gateway.app()) as url, ThreadPoolExecutor(HANGING) as clients:
            try:
                hanging = [clients.submit(asked, url, "hang") for _ in range(HANGING)]
                assert all(agent.waiting.acquire(timeout=120) for _ in hanging)
                assert asked(url, "now") == "now"
            finally:
                agent.released.set()
            assert {future.result() for future in hanging} == {"hang"}
