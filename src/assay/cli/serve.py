"""`assay serve`: the gateway in front of a model."""

import asyncio
import logging
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from assay.cli.flags import command_settings, settings_flags
from assay.cli.options import json_option, key_option, store_option
from assay.cli.shared import Console, print_json
from assay.cli.wording import counted
from assay.runs.settings import ServeSettings
from assay.support.scrubbing import unscrubbed

if TYPE_CHECKING:
    from assay.api.deploy.advancing import Advancer
    from assay.traces.gateway.connections import ConnectionLimits
    from assay.traces.gateway.server import Gateway
    from assay.traces.store import Store

__all__ = ["FLUSH_TIMEOUT_S", "SECOND_FLUSH_TIMEOUT_S", "command"]


# How long the end of the command waits for a database that does not answer, first and once more after an error.
# Rows that it has not written by then stay in a file, and are written when the store is opened next.
FLUSH_TIMEOUT_S, SECOND_FLUSH_TIMEOUT_S = 25.0, 2.0


@click.command("serve")
@settings_flags(ServeSettings)
@key_option(
    "API key sent to the upstream, or $ASSAY_UPSTREAM_KEY; by default the key that each caller sends.",
    "ASSAY_UPSTREAM_KEY",
    "--upstream-key",
)
@key_option(
    "Key that callers must send, or $ASSAY_KEY. Without it LM calls need no key, "
    "and a key for the other routes (rewards, feedback, model, counts) is generated and printed.",
    "ASSAY_KEY",
)
@store_option()
@json_option("Print the address at the start and the counts at the end as JSON lines.")
def command(upstream_key: str | None, key: str | None, store: str | None, as_json: bool, **values: Any) -> None:
    """Start a gateway that records an agent's LM calls. Set the agent's base URL to the gateway.

    It accepts the APIs of OpenAI (chat completions, Responses), Anthropic (messages) and Gemini. Ctrl-C stops it.

    \b
    OPENAI_BASE_URL=http://127.0.0.1:8321/v1   ANTHROPIC_BASE_URL=http://127.0.0.1:8321
    GOOGLE_GEMINI_BASE_URL=http://127.0.0.1:8321
    """
    settings = ServeSettings(**command_settings(values, ServeSettings))
    asyncio.run(_serve(settings, upstream_key=upstream_key, key=key, store=store, as_json=as_json))


async def _serve(
    settings: ServeSettings, *, upstream_key: str | None, key: str | None, store: str | None, as_json: bool
) -> None:
    from assay.traces.gateway.connections import ConnectionLimits, Listener
    from assay.traces.gateway.server import Gateway
    from assay.traces.gateway.upstreams import upstream_of
    from assay.traces.records import new_id
    from assay.traces.store import Store

    # aiohttp prints a traceback for each broken connection; the failed call is in the store.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    limits = ConnectionLimits(
        most=settings.max_connections, idle_s=settings.connection_idle_s, receive_s=settings.receive_s,
        stalled_s=settings.upstream_idle_s,
    )  # fmt: skip
    upstream = upstream_of(
        settings.answering, base=settings.upstream, key=upstream_key, idle_s=settings.upstream_idle_s
    )
    opened, run_id = Store(store), f"serve-{new_id()[:12]}"
    agents = _agents(settings, store)
    gateway = Gateway(
        opened, upstream, agents=agents, key=key, host=settings.host,
        names=tuple(settings.allow_host), run_id=run_id, idle_s=settings.idle_s, max_body=settings.max_body_mb << 20,
        receive_s=settings.receive_s, one_server=settings.upstream is not None, loops=settings.loops,
    )  # fmt: skip
    listener = Listener(gateway.app(), limits, gateway.connections.answered)
    address = await _listen(listener, settings, opened)
    ended = asyncio.Event()
    # Before the address is printed: the process that reads it may send a signal at once.
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    run = _Run(run_id, opened, gateway, _config(settings, limits))
    run.begin()
    advancers = _advancers(settings, agents)
    _show_start(address, run_id, upstream.name, gateway.access.key, store=store, key=key, as_json=as_json)
    try:
        await ended.wait()
    finally:
        await listener.close()
        for advancer in advancers:
            await asyncio.to_thread(advancer.stop)
        counts = await run.end()
    if as_json:
        print_json(counts)
    Console().say(_summary(counts))


def _agents(settings: ServeSettings, store: str | None) -> dict[str, Any]:
    """The deployed agents by name; one that has no champion is an error now."""
    if not settings.agent:
        return {}
    from assay.api.deployed import deployed

    return {name: deployed(name, store=store, rubric=settings.agent_rubric) for name in settings.agent}


def _advancers(settings: ServeSettings, agents: dict[str, Any]) -> "list[Advancer]":
    """Threads that advance the deployments of the agents; started."""
    if not settings.agent or not settings.advance_s:
        return []
    from assay.api.deploy.advancing import Advancer

    advancers = [
        Advancer(agent.store, name, rubric=agent.rubric, every_s=settings.advance_s)
        for name, agent in agents.items()
        if "@" not in name  # one version, without a deployment
    ]
    for advancer in advancers:
        advancer.start()
    return advancers


async def _listen(listener: Any, settings: ServeSettings, opened: "Store") -> str:
    """Starts listening. Returns the base URL, with the port that was bound."""
    from assay.errors import AssayError

    host, port = settings.host, settings.port
    try:
        bound = await listener.start(host, port)
    except OSError as error:
        opened.close()
        raise AssayError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port") from None
    return f"http://{'[' + host + ']' if ':' in host else host}:{bound}"


def _config(settings: ServeSettings, limits: "ConnectionLimits") -> dict[str, Any]:
    """The settings that are stored with the run."""
    config = {name: getattr(settings, name) for name in ("upstream", "host", "port", "idle_s", "loops")}
    return {"model": settings.answering, **config, "limits": asdict(limits)}


class _Run:
    """The gateway's run in the store: written as running at the start, with its counts at the end."""

    def __init__(self, run_id: str, opened: "Store", gateway: "Gateway", config: dict[str, Any]) -> None:
        self.id, self._store, self._gateway = run_id, opened, gateway
        self._config, self._started_at = config, time.time()

    def begin(self) -> None:
        from assay.traces.missed import Unrecorded

        # Unknown until the end writes the count: a killed gateway cannot report what it did not record.
        self._report_status("running", Unrecorded(0, f"the gateway {self.id} has not ended, or was killed"))

    async def end(self) -> dict[str, Any]:
        """Writes what is left and closes the store. Returns the counts of the gateway."""
        from assay.errors import StoreError
        from assay.traces.missed import Unrecorded

        wait_s = FLUSH_TIMEOUT_S
        try:  # before the counts are read: `stored` counts rows that are in the database
            await asyncio.to_thread(self._store.flush, wait_s)
        except StoreError as error:
            Console().say(str(error))
            wait_s = SECOND_FLUSH_TIMEOUT_S
        counts = self._gateway.stats()
        self._report_status("done", Unrecorded(counts["unrecorded"]))
        with suppress(StoreError):  # the same error was printed above
            self._store.close(wait_s)
        return counts

    def _report_status(self, status: str, unrecorded: Any) -> None:
        self._store.put_run(
            self.id, kind="serve", config=self._config, status=status, started_at=self._started_at,
            unrecorded=unrecorded,
        )  # fmt: skip


def _show_start(
    address: str, run_id: str, model: str, used_key: str | None, *, store: str | None, key: str | None, as_json: bool
) -> None:
    """Prints address, model and the gateway's key, if it was generated because none was given (`key`)."""
    from assay.traces.store import store_url, url_without_password

    if as_json:
        generated = {"key": used_key} if key is None else {}
        print_json({"url": address, "model": model, "run": run_id, **generated}, with_key=True)
    console = Console()
    database = url_without_password(store_url(store)).removeprefix("sqlite:///")
    console.say(f"{model} at {address}, recorded in {database}; Ctrl-C ends it")
    bases = f"OPENAI_BASE_URL={address}/v1  ANTHROPIC_BASE_URL={address}  GOOGLE_GEMINI_BASE_URL={address}"
    console.say(f"  {bases}" + ("" if key is None else "  (callers must send the key)"))
    if key is None:
        line = f"  ASSAY_KEY={used_key}  (for this run: rewards, feedback, the model, counts)"
        print(line, file=unscrubbed(sys.stderr), flush=True)


def _summary(counts: dict[str, Any]) -> str:
    """The counts of a gateway's run, in one sentence."""
    passed = ", ".join(f"{name} ({count})" for name, count in counts["passed_through"].items())
    unsupported = ", ".join(f"{path} ({count})" for path, count in counts["refused_paths"].items())
    return (
        f"{counted(counts['calls'], 'calls')} went to a model, {counts['stored']} are stored, "
        f"{counts['unrecorded']} were not recorded; rollouts never closed: {counts['unclosed']:,}"
        + (f"; passed on and not recorded: {passed}" if passed else "")
        + (f"; requested, but not supported by the gateway: {unsupported}" if unsupported else "")
    )
