"""The Protocol through which a job reports its progress, and its implementation for notebooks.

The command line has its own.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from assay.errors import spoken
from assay.support.terminal import escaped

Advance = Callable[[int], None]


class Progress(Protocol):
    """Receives the lines and progress bars of a job. Both methods are called from several threads."""

    def say(self, text: str) -> None:
        """One line for the user. Settings are in backticks, see `assay.errors.spoken`."""

    def bar(self, name: str, total: int | None) -> AbstractContextManager[Advance]:
        """Opens a progress bar.

        The context yields a function; call it with the number of items finished since its last call.

        Args:
            total: items in all; None where their number is not known.
        """
        ...


class SilentProgress(Progress):
    """Reports nothing. The default outside of notebooks; subclass it to override one of the two methods."""

    def say(self, text: str) -> None:
        pass

    def bar(self, name: str, total: int | None) -> AbstractContextManager[Advance]:
        return nullcontext(lambda _: None)


class NotebookProgress(Progress):
    """Bars of tqdm, as widgets where ipywidgets is installed, with lines above them. The default in notebooks."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tqdm warns without ipywidgets; its bars are text then
            from tqdm.auto import tqdm
        self._tqdm, self._lock = tqdm, threading.Lock()

    def say(self, text: str) -> None:
        self._tqdm.write(escaped(spoken(text, str)), file=sys.stdout)

    @contextmanager
    def bar(self, name: str, total: int | None) -> Iterator[Advance]:
        with self._tqdm(total=total, desc=escaped(name), disable=False) as bar:

            def advance(count: int) -> None:
                with self._lock:
                    bar.update(count)

            yield advance


def default_progress(progress: Progress | None = None) -> Progress:
    """The given progress. For None: bars in the kernel of a notebook, otherwise nothing."""
    if progress is not None:
        return progress
    # Only a process that is a kernel has loaded IPython and has this attribute of its shell.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return NotebookProgress() if getattr(shell, "kernel", None) is not None else SilentProgress()
