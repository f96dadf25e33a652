"""The Protocol through which a job reports its progress. Does not print: the command line does."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

__all__ = ["Advance", "Progress", "SilentProgress"]

Advance = Callable[[int], None]


class Progress(Protocol):
    """Receives the lines and progress bars of a job. Both methods are called from several threads."""

    def say(self, text: str) -> None:
        """One line for the user."""

    def bar(self, name: str, total: int | None) -> AbstractContextManager[Advance]:
        """Opens a progress bar.

        The context yields a function; call it with the number of items finished since its last call.

        Args:
            total: items in all; None where their number is not known.
        """
        ...


class SilentProgress(Progress):
    """Reports nothing. The default; subclass it to override one of the two methods."""

    def say(self, text: str) -> None:
        pass

    def bar(self, name: str, total: int | None) -> AbstractContextManager[Advance]:
        return nullcontext(lambda _: None)
