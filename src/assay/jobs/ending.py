"""How every run ends, whatever ends it: a cap, Ctrl-C, a signal, an exception, or its last step; and its report.

Calls in flight are waited for, so that their answers are stored and priced; then the rollouts that are still open end
as stopped. A second Ctrl-C ends at once.

The report of a run that has ended is in the store, and `--resume` returns it on any machine without calling a model.
Without it an ended run would be replayed. A replay may call a model again, for a call that had failed or in a program
that is not deterministic, and would then exceed its cap. Runs that were killed, or whose model failed, have no stored
report: they are resumed.
"""

import asyncio
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from assay.errors import ArtifactError, AssayError, StopRun, unspoken
from assay.evaluation import Progress
from assay.models import Caps, Meter
from assay.models.limits import LAST_CALLS_S
from assay.models.meter import NO_PRICE, ONCE_BACK
from assay.sources.artifact_files import is_artifact
from assay.support.numbers import counted
from assay.support.report import FULL_DISK
from assay.support.scrubbing import error_text, message
from assay.support.values import digest_of
from assay.traces import Recorder, Store
from assay.traces.store.leases import TAKEN_OVER
from assay.traces.store.location import home_of

_QUIET_S = 1.0  # of waiting, before the user is told
_LAST_STEPS_S = 0.5  # for rollouts whose last call was answered
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


def advised(stopped: str) -> str:
    """The reason of a run that ended early, with what to do: a cap is raised; other reasons say it themselves."""
    if any(reason in stopped for reason in (FULL_DISK, NO_PRICE, TAKEN_OVER, ONCE_BACK)):
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


_FORMAT = 2
_LONGEST = 4_000  # characters of an error


def status_and_reason(error: BaseException) -> tuple[str, str | None]:
    """The status of a run that ended with an error: stopped by the user or a cap, or failed; and why."""
    text = message(unspoken(error)) if isinstance(error, AssayError) else error_text(error)
    status = "stopped" if isinstance(error, StopRun | KeyboardInterrupt) else "failed"
    return status, text.strip()[:_LONGEST] or None


class FinishedRun:
    """The stored report of a run.

    Args:
        store: of the run.
        run: its id.
        caps: caps of this attempt. If one is higher than when the run ended, the run continues.
        about: everything else that the report depends on. If it has changed, the stored report is not used.
    """

    def __init__(self, store: Store, run: str, *, caps: Caps, about: Mapping[str, Any]) -> None:
        self.store, self.run, self.caps = store, run, asdict(caps)
        self.about = digest_of(dict(about))

    def report(self, progress: Progress, *, out: str | Path | None = None) -> dict[str, Any] | None:
        """The report, ready for JSON; None if the run has not ended or can continue.

        An artifact that was removed is made again by a replay. One of another machine is only named in a note.

        Args:
            out: folder to copy the artifact to.
        """
        self.store.flush()
        content = self.store.states(self.run).get(self.run, {})
        if content.get("format") != _FORMAT or content["about"] != self.about or self._raised(content["caps"]):
            return None
        report: dict[str, Any] = content["report"]
        if FULL_DISK in (report["stopped"] or ""):  # not a cap: it continues as soon as there is space
            return None
        if "artifact" in report:
            if is_artifact(report["artifact"]):
                report["artifact"] = str(_copied(Path(report["artifact"]), out))
            elif content["place"] == self._place:
                return None
            else:
                note = (
                    f"the artifact is on {content['place'][0]}, where this run ended, in {report['artifact']}: copy "
                    "that folder to use it here"
                )
                report["notes"].append(note)
                progress.say(f"note: {note}")
        if report["stopped"] is None:
            progress.say("this run has finished: its report is given again, and nothing is run")
        else:
            progress.say(
                f"nothing is left under this cap ({report['stopped']}): the report is given again. "
                "Raise the cap to continue"
            )
        return report

    def keep(self, report: Mapping[str, Any]) -> None:
        """Stores the report of a run that is done, or that was stopped by a cap."""
        content = {"format": _FORMAT, "about": self.about, "caps": self.caps, "place": self._place}
        self.store.put_state(self.run, {**content, "report": dict(report)})

    @property
    def _place(self) -> list[str]:
        """Host and folder of the artifacts of this machine."""
        return [socket.gethostname(), str(home_of(self.store.url).absolute())]

    def _raised(self, before: Mapping[str, float | None]) -> bool:
        caps = self.caps
        return any(cap is not None and (caps[name] is None or caps[name] > cap) for name, cap in before.items())


def _copied(artifact: Path, out: str | Path | None) -> Path:
    place = artifact if out is None else Path(out).resolve()
    if not place.exists():
        try:
            shutil.copytree(artifact, place)
        except OSError as error:
            raise ArtifactError(
                f"cannot write the artifact to {place}: {error}. Choose another folder with `out=…`"
            ) from error
    return place if is_artifact(place) else artifact
