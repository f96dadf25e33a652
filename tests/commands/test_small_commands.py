"""The Python functions of `serve`, `models` and `judge lint`."""

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from assay.commands.models import list_models, pull_model
from assay.commands.serve import ServeReport, Serving, serve
from assay.errors import AssayError, ModelError
from assay.evaluation.progress import SilentProgress
from assay.traces import Store
from rigs.serving import post, served
from rigs.upstream import ScriptedUpstream

CALL = {"messages": [{"role": "user", "content": "six times seven?"}]}


def test_serve_records_calls_until_it_is_stopped_from_another_thread(tmp_path: Path) -> None:
    started: list[Serving] = []
    listens = threading.Event()

    def on_start(serving: Serving) -> None:
        started.append(serving)
        listens.set()

    with served(ScriptedUpstream().app()) as behind:
        counts: list[ServeReport] = []
        thread = threading.Thread(
            target=lambda: counts.append(
                serve(model="m", upstream=behind, port=0, store=tmp_path / "s.db", key="k" * 8, on_start=on_start)
            )
        )
        thread.start()
        assert listens.wait(120)
        gateway = started[0]
        assert post(f"{gateway.url}/v1/chat/completions", CALL, Authorization="Bearer " + "k" * 8)[0] == 200
        gateway.stop()
        thread.join(120)
    gateway.stop()  # it has ended: nothing happens
    assert [(each.calls, each.stored, each.unrecorded) for each in counts] == [(1, 1, 0)]
    with Store(tmp_path / "s.db") as store:
        assert store.stats(run_id=gateway.run)["transitions"] == 1


def test_serve_says_that_its_upstream_does_not_answer(tmp_path: Path) -> None:
    said: list[str] = []

    class Said(SilentProgress):
        def say(self, text: str) -> None:
            said.append(text)

    replies: list[Any] = []

    def on_start(serving: Serving) -> None:
        def call() -> None:
            replies.append(post(f"{serving.url}/v1/chat/completions", CALL))
            serving.stop()

        threading.Thread(target=call).start()

    with socket.socket() as bound:  # bound and not listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{bound.getsockname()[1]}"
        serve(model="m", upstream=f"{dead}/v1", port=0, store=tmp_path / "s.db", on_start=on_start, progress=Said())
    ((status, reply),) = replies
    assert (status, reply["error"]["message"]) == (
        502,
        f"the upstream at {dead} does not answer: no server listens there",
    )
    assert said[0] == f"warning: no server answers at {dead}; calls fail until one does"
    assert said[1].startswith("warning: 1 call failed")


def test_serve_names_the_address_that_is_taken(tmp_path: Path) -> None:
    with served(ScriptedUpstream().app()) as behind:
        port = int(behind.rpartition(":")[2])
        with pytest.raises(AssayError, match=f"cannot listen on 127.0.0.1:{port}: .* Choose another port"):
            serve(model="m", upstream=behind, port=port, store=tmp_path / "s.db")


def test_models_are_listed_with_the_name_that_selects_them() -> None:
    report = list_models()
    assert [entry.name for entry in report.models if not entry.name.startswith("embedded/")] == []
    assert report.to_dict()["models"][0].keys() == {"name", "size", "licence", "path"}
    with pytest.raises(ModelError, match="no embedded model is called 'nonsense'"):
        pull_model("nonsense")
