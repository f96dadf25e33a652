"""`assay view`: the local page over the store."""

import asyncio
import logging
import signal
from typing import Any

import click

from assay.cli.flags import command_settings, settings_flags
from assay.cli.options import json_option, key_option, store_option
from assay.cli.shared import open_store, print_json
from assay.runs.settings import ViewSettings
from assay.support.terminal import echo

_WARM_UP_S = 1.0  # after the start: the first page is not delayed by it


@click.command("view")
@settings_flags(ViewSettings)
@key_option("Key that opens the page, or $ASSAY_KEY. Needed to bind an address other than loopback.", "ASSAY_KEY")
@store_option()
@json_option("Print one JSON line with the address at the start.")
def command(key: str | None, store: str | None, as_json: bool, **values: Any) -> None:
    """Open the local page of the store: runs, rollouts and comparisons. Ctrl-C stops it.

    The printed address ends in a token that opens the page once; the browser then keeps a cookie. On the page of a
    rollout the keys 0 to 9 rate it.
    """
    settings = ViewSettings(**command_settings(values, ViewSettings))
    asyncio.run(_serve(settings, key=key, store=store, as_json=as_json))


async def _serve(settings: ViewSettings, *, key: str | None, store: str | None, as_json: bool) -> None:
    from assay.errors import AssayError
    from assay.traces.gateway.connections import ConnectionLimits, Listener
    from assay.web.access import PageAccess
    from assay.web.server import LocalPage, reachable

    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # a traceback for each broken connection
    access = PageAccess(key, host=settings.host, names=tuple(settings.allow_host))
    opened = open_store(store)
    try:
        page = LocalPage(opened, access, where=store, store_flag=_without_password(store))
        listener = Listener(page.app(), ConnectionLimits(most=100), set(), shutdown_s=1.0)
        try:
            port = await listener.start(settings.host, settings.port)
        except OSError as error:
            raise AssayError(
                f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}; choose another --port"
            ) from None
        ended = asyncio.Event()
        # Before the address is printed: the process that reads it may send a signal at once.
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        asyncio.get_running_loop().call_later(_WARM_UP_S, page.warm_up)
        _show_start(f"http://{reachable(settings.host)}:{port}/?token={access.token}", as_json=as_json)
        try:
            await ended.wait()
        finally:
            await listener.close()
    finally:
        opened.close()


def _show_start(address: str, *, as_json: bool) -> None:
    """Prints the address, whose token every other output masks."""
    if as_json:
        print_json({"address": address}, with_key=True)
        return
    echo(f"{address}\nThe address opens the page once, in one browser. Ctrl-C stops it.", with_key=True)


def _without_password(store: str | None) -> str | None:
    """`--store` as the page's commands show it; None if it has a password."""
    from assay.traces.store import url_without_password

    return store if store is not None and url_without_password(store) == store else None
