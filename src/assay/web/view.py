"""`assay view`: the local page over the store."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from assay.commands.groups import InExistingStore, Listening
from assay.support.options import Flag, function_of
from assay.support.report import Report

_WARM_UP_S = 1.0  # after the start: the first page is not delayed by it


@dataclass(frozen=True, kw_only=True, repr=False)
class PageAddress(Report):
    """Where the page is.

    Attributes:
        address: URL with the token that opens the page once.
    """

    has_key: ClassVar[bool] = True

    address: str

    def lines(self) -> Iterator[str]:
        yield f"{self.address}\nThe address opens the page once, in one browser. Ctrl-C stops it."


class View(Listening, InExistingStore):
    """Open the local page of the store: runs, rollouts and comparisons. Ctrl-C stops it.

    The printed address ends in a token that opens the page once; the browser then keeps a cookie. On the page of a
    rollout the keys 0 to 9 rate it. `key` opens the page too.
    """

    port: Annotated[int, Ge(0), Le(65535)] = 8322
    """Port to bind; 0 selects a free port."""
    on_start: Annotated[Callable[[PageAddress], None] | None, Flag(key=False, shown=False)] = None
    """Called once the page can be opened."""

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        from assay.jobs.ending import on_ending_signals
        from assay.traces.gateway.connections import ConnectionLimits, Listener
        from assay.traces.store import store_address
        from assay.web.server import LocalPage, PageAccess, reachable

        logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # a traceback for each broken connection
        access = PageAccess(self.key, host=self.host, names=tuple(self.allow_host))
        where = None if self.store is None else str(self.store)
        without_password = None if where is None or store_address(where).secret else where
        with self.opened() as store:
            page = LocalPage(store, access, where=where, store_flag=without_password)
            listener = Listener(page.app(), ConnectionLimits(most=100), set(), shutdown_s=1.0)
            port = await self.listen(listener)
            ended, loop = asyncio.Event(), asyncio.get_running_loop()
            # Before the address is printed: the process that reads it may send a signal at once.
            on_ending_signals(loop, ended.set)
            loop.call_later(_WARM_UP_S, page.warm_up)
            try:
                if self.on_start is not None:
                    self.on_start(PageAddress(address=f"http://{reachable(self.host)}:{port}/?token={access.token}"))
                await ended.wait()
            finally:
                await listener.close()


view = function_of(View, "view")
