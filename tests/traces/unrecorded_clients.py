"""Clients of several libraries that call a model server, directly and in threads, for tests of unrecorded calls."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import dspy
import pytest

from assay.testing import ScriptedEngine
from rigs.serving import served
from rigs.upstream import ScriptedUpstream

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with served(ScriptedUpstream().app()) as url:
        yield url


def scripted() -> dspy.LM:
    return dspy.LM("scripted", engine=ScriptedEngine(lambda request: "hello"), cache=False)


def in_a_thread(function: Callable[[str], Any], url: str) -> None:
    thread = threading.Thread(target=function, args=(url,))
    thread.start()
    thread.join()
