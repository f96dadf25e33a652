"""Model calls follow no redirect, because a redirect would send the body and the key to the host that it names.

litellm and the SDKs under it tell `httpx` to follow redirects, and it then sends the body on. DSPy's own transports
follow none.
"""

import importlib.util
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from assay.models.scope import having

_refused: ContextVar[bool] = ContextVar("assay_no_redirects", default=False)
_installed = False


def no_redirects() -> AbstractContextManager[bool]:
    """Inside, requests made through httpx in this thread or task end at a redirect; their client raises an error."""
    _install()
    return having(_refused, True)


def _install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    for name in ("httpx", "httpx2"):  # litellm and mcp use either
        if importlib.util.find_spec(name) is not None:
            module = importlib.import_module(name)
            module.Client.send = _ending_at_redirects(module.Client.send)
            module.AsyncClient.send = _ending_at_redirects(module.AsyncClient.send)


def _ending_at_redirects(send: Any) -> Any:
    """Wrap `send`, synchronous or not: the coroutine of an asynchronous one is returned to its caller."""

    @wraps(send)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return send(*args, **({**kwargs, "follow_redirects": False} if _refused.get() else kwargs))

    return guarded
