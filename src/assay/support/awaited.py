"""Results of functions that may be async."""

import contextvars
import inspect
from typing import Any


def completed(result: Any) -> Any:
    """Awaits an awaitable in a new event loop and returns its result; any other value is returned unchanged.

    If the current thread already runs a loop (a notebook), a new thread is used.
    """
    if not inspect.isawaitable(result):
        return result
    import asyncio  # here, because rubrics load without it
    from concurrent.futures import ThreadPoolExecutor

    async def wait() -> Any:
        return await result

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, asyncio.run, wait()).result()
