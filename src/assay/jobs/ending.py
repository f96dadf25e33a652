"""How every run ends, whatever ends it: a cap, Ctrl-C, a signal, an exception, or its last step.

Calls in flight are waited for, so that their answers are stored and priced; then the rollouts that are still open end
as stopped. A second Ctrl-C ends at once.
"""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from assay.evaluation import Progress
from assay.models import Meter
from assay.models.limits import LAST_CALLS_S
from assay.models.meter import NO_PRICE
from assay.support.numbers import counted
from assay.support.refused import FULL_DISK
from assay.support.scrubbing import error_text
from assay.traces import Recorder, Store
from assay.traces.store.leases import TAKEN_OVER

_QUIET_S = 1.0  # of waiting, before the user is told
_LAST_STEPS_S = 0.5  # for rollouts whose last call was answered
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


def advised(stopped: str) -> str:
    """The reason of a run that ended early, with what to do: a cap is raised; other reasons say it themselves."""
    if FULL_DISK in stopped or NO_PRICE in stopped or TAKEN_OVER in stopped:
        return stopped
    return f"{stopped}; raise the cap and add `resume=True`"


def ending_signals() -> list[signal.Signals]:
    """Signals that end a command in order: Ctrl-C, SIGTERM, SIGHUP. One that is ignored (`nohup`) stays ignored."""
    known = (getattr(signal, name, None) for name in _SIGNALS)  # Windows has no SIGHUP
    return [number for number in known if number and signal.getsignal(number) not in (signal.SIG_IGN, None)]


def on_ending_signals(loop: asyncio.AbstractEventLoop, end: Callable[[], object]) -> None:
    """Makes the signals of `ending_signals` call `end` in the loop. Call it within the loop's thread.

    Outside of the main thread, which alone receives signals, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    before = {number: signal.getsignal(number) for number in ending_signals()}

    def handle(number: int, frame: Any) -> None:
        if loop.is_closed():
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)
        else:
            loop.call_soon_threadsafe(end)

    for number in before:
        try:
            loop.add_signal_handler(number, end)
        except NotImplementedError:  # the event loops of Windows
            signal.signal(number, handle)


@contextmanager
def cancelled_by_signals(meter: Meter) -> Iterator[None]:
    """Makes Ctrl-C, SIGTERM and SIGHUP cancel the meter as well.

    Running threads then stop at their next LM call. Without this a thread pool, such as DSPy's, would first finish all
    of its tasks.
    """
    if threading.current_thread() is not threading.main_thread():  # signal.signal is allowed in the main thread only
        yield
        return
    before: dict[int, Any] = {}

    def cancel(number: int, frame: Any) -> None:
        meter.cancel()
        if callable(before[number]):
            before[number](number, frame)
        else:
            raise KeyboardInterrupt(f"by {signal.Signals(number).name}")

    for number in ending_signals():
        before[number] = signal.signal(number, cancel)
    try:
        yield
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


@contextmanager
def ended_in_order(
    meter: Meter, recorder: Recorder, store: Store, progress: Progress, *, to_continue: str
) -> Iterator[None]:
    """Inside, a run is at work. Afterwards no call is in flight and no rollout is open.

    Args:
        store: of the recorder; once its disk is full, no further call is made.
        to_continue: what to do after a full disk, for its message.
    """
    reason, full = "the run ended", f"{FULL_DISK}: free space, and {to_continue}"
    meter.obstacle = lambda: full if store.full else store.obstacle
    store.keep_room()
    with cancelled_by_signals(meter):
        try:
            yield
        except BaseException as error:
            reason = error_text(error) or reason
            raise
        finally:
            meter.cancel()
            try:
                if meter.land(_QUIET_S):
                    progress.say(
                        f"waiting for {counted(meter.in_flight, 'LM calls')} in flight, {LAST_CALLS_S:g} s at most; "
                        "Ctrl-C ends at once"
                    )
                    meter.land(LAST_CALLS_S - _QUIET_S)
                end = time.monotonic() + _LAST_STEPS_S
                while recorder.open and time.monotonic() < end:
                    time.sleep(0.01)
            except KeyboardInterrupt:
                pass
            recorder.stop(f"stopped before it ended: {reason}", unanswered=meter.in_flight)
