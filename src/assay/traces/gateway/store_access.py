"""Store calls of the gateway in threads of their own, so that an unreachable store does not block the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import sqlalchemy as sa

from assay.errors import StoreError

__all__ = ["FLUSH_S", "StoreAccess"]

FLUSH_S = 25.0  # that a request waits for waiting rows; below `_STORE_S`, so that the store can give its own reason
_STORE_S = 30.0  # that a request waits for the store


class StoreAccess:
    """Runs functions that wait for the store.

    Reads have threads of their own: calls that wait until rows are written would otherwise occupy all of them while the
    store is unreachable.
    """

    def __init__(self) -> None:
        self._readers, self._waiters = (ThreadPoolExecutor(4, f"assay-gateway-{name}") for name in ("reads", "waits"))

    async def call(self, function: Callable[..., Any], *arguments: Any, waits: bool = True) -> Any:
        """The function's result.

        Args:
            waits: the function waits until rows are written; False for one that only reads.
        Raises:
            StoreError: the store is unreachable or too slow.
        """
        try:
            threads = self._waiters if waits else self._readers
            call = asyncio.get_running_loop().run_in_executor(threads, partial(function, *arguments))
            return await asyncio.wait_for(call, _STORE_S)
        except TimeoutError:
            raise StoreError(
                f"the store did not answer within {_STORE_S:g} s: another process holds its lock, or it is unreachable"
            ) from None
        except sa.exc.SQLAlchemyError as error:
            raise StoreError(f"the store does not answer: {getattr(error, 'orig', error)}") from error

    def shutdown(self) -> None:
        """Ends the threads without waiting for calls that are under way."""
        for threads in (self._readers, self._waiters):
            threads.shutdown(wait=False)
