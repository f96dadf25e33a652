"""Recorded calls of threads that a program makes by itself belong to its rollout."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest
from unrecorded_clients import in_a_thread, scripted

from assay.models import with_recording
from assay.models.unrecorded import Unrecorded
from assay.traces import Recorder, Rollout, Store


def each_in_a_thread(ask: Callable[[str], Any], prompts: list[str]) -> None:
    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def by_executor(ask: Callable[[str], Any], prompts: list[str]) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(ask, prompts))


def by_thread_pool(ask: Callable[[str], Any], prompts: list[str]) -> None:
    with ThreadPool(2) as pool:
        pool.map(func=ask, iterable=prompts)


def by_loop(ask: Callable[[str], Any], prompts: list[str]) -> None:
    async def gathered() -> None:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(None, ask, prompt) for prompt in prompts))

    in_a_thread(lambda _: asyncio.run(gathered()), "")


@pytest.mark.parametrize("spread", [each_in_a_thread, by_executor, by_thread_pool, by_loop])
def test_recorded_calls_of_a_programs_threads_belong_to_its_rollout(spread: Callable[..., None]) -> None:
    recorder = Recorder()
    lm = with_recording(scripted(), observers=[recorder.observe])

    def run(name: str) -> Rollout:
        with recorder.active(), recorder.rollout(Rollout()) as rollout:
            time.sleep(0.05)  # both are open
            spread(lm, [f"{name} {number}" for number in range(4)])
        return rollout

    with ThreadPoolExecutor(2) as pool:
        rollouts = dict(zip("ab", pool.map(run, "ab"), strict=True))
    for name, rollout in rollouts.items():
        prompts = sorted(transition.request["messages"][0]["parts"][0]["text"] for transition in rollout.transitions)
        assert prompts == [f"{name} {number}" for number in range(4)]
    assert recorder.unrecorded == Unrecorded(0)


def ask_from_outside(recorder: Recorder, rollouts: int, tmp_path: Path) -> tuple[list[int], int]:
    """Call a model in a thread that is older than the rollouts.

    Returns the number of transitions of each open rollout, and of those outside any rollout.
    """
    begin = threading.Event()
    with Store(tmp_path / "s.db") as store:
        recorder.store = store
        lm = with_recording(scripted(), observers=[recorder.observe])
        thread = threading.Thread(target=lambda: begin.wait(120) and lm("hello"))
        thread.start()
        with ExitStack() as opened:
            open_rollouts = [opened.enter_context(recorder.rollout(Rollout())) for _ in range(rollouts)]
            begin.set()
            thread.join()
        store.flush()
        outside = sum(len(store.rollout(row.id).transitions) for row in store.rollouts() if row.source == "outside")
        return [len(rollout.transitions) for rollout in open_rollouts], outside


def test_a_call_of_an_older_thread_belongs_to_the_only_open_rollout(tmp_path: Path) -> None:
    recorder = Recorder()
    assert ask_from_outside(recorder, 1, tmp_path) == ([1], 0)
    assert recorder.unrecorded == Unrecorded(0)


def test_a_call_that_several_open_rollouts_may_have_made_is_stored_outside_and_counted(tmp_path: Path) -> None:
    recorder = Recorder()
    assert ask_from_outside(recorder, 2, tmp_path) == ([0, 0], 1)
    assert recorder.unrecorded == Unrecorded(1)
