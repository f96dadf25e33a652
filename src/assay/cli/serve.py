"""`assay serve`: the gateway in front of a model."""

import asyncio
import logging
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import click

from assay.cli.shared import Console, print_json
from assay.cli.wording import counted
from assay.scrubbing import unscrubbed

__all__ = ["command"]


_FLUSH_S, _AGAIN_S = 25.0, 2.0  # that the end waits for a store that is away; what it has not taken then waits in a file


@click.command("serve")
@click.option("--model", metavar="NAME", help="Model that answers: embedded/NAME or a litellm name; with --upstream the server's own name.")
@click.option("--upstream", metavar="URL", help="A server that speaks OpenAI chat completions (vLLM, llama.cpp, a provider).")
@click.option(
    "--upstream-key", envvar="ASSAY_UPSTREAM_KEY", help="Key of the upstream, or $ASSAY_UPSTREAM_KEY; by default callers' own are passed on."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind; non-loopback addresses require --key.")
@click.option("--port", type=click.IntRange(0, 65535), default=8321, show_default=True, help="Port to bind; 0 takes a free one.")
@click.option(
    "--key",
    envvar="ASSAY_KEY",
    help="Key that callers must send, or $ASSAY_KEY. Without it calls need none; one is made and printed for rewards, feedback, model and counts.",
)
@click.option("--allow-host", multiple=True, metavar="NAME", help="Further host name under which this gateway is reached.")
@click.option("--idle-s", type=click.FloatRange(0.1), default=600.0, show_default=True, help="Seconds without a call after which a rollout ends.")
@click.option("--max-body-mb", type=click.IntRange(1), default=10, show_default=True)
@click.option(
    "--max-connections",
    type=click.IntRange(1),
    help="Largest number of concurrent connections; others wait. By default a third of the descriptors (ulimit -n), at most 2000.",
)
@click.option(
    "--connection-idle-s",
    type=click.FloatRange(0.1),
    default=75.0,
    show_default=True,
    help="Seconds after which a connection without a request is closed.",
)
@click.option(
    "--receive-s",
    type=click.FloatRange(0.1),
    default=60.0,
    show_default=True,
    help="Seconds in which a request's body must arrive, plus 1 for each 64 KiB.",
)
@click.option(
    "--upstream-idle-s",
    type=click.FloatRange(0.1),
    default=600.0,
    show_default=True,
    help="Seconds after which a call fails if the upstream sends nothing or the caller reads nothing.",
)
@click.option("--store", help="Database of traces; by default .assay/assay.db or $ASSAY_STORE.")
@click.option("--json", "as_json", is_flag=True, help="Print the address, and at the end the counts, as JSON lines.")
def command(**values: Any) -> None:
    """Record any agent that speaks OpenAI chat completions, Responses, Anthropic messages or Gemini: set its base URL to this gateway.

    \b
    OPENAI_BASE_URL=http://127.0.0.1:8321/v1   ANTHROPIC_BASE_URL=http://127.0.0.1:8321
    GOOGLE_GEMINI_BASE_URL=http://127.0.0.1:8321
    """
    if values["model"] is None and values["upstream"] is None:
        values["model"] = "embedded/smollm2-135m"
    asyncio.run(_serve(**values))


async def _serve(
    *, model: str | None, upstream: str | None, upstream_key: str | None, host: str, port: int, key: str | None, allow_host: tuple[str, ...],
    idle_s: float, max_body_mb: int, max_connections: int | None, connection_idle_s: float, receive_s: float, upstream_idle_s: float,
    store: str | None, as_json: bool,
) -> None:  # fmt: skip
    import time

    from assay.errors import AssayError, StoreError
    from assay.traces.connections import ConnectionLimits, Listener
    from assay.traces.gateway import Gateway
    from assay.traces.location import store_url
    from assay.traces.missed import Unrecorded
    from assay.traces.records import new_id
    from assay.traces.store import Store, shown_url
    from assay.traces.upstreams import upstream_of

    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # a connection that breaks is in the store, and no traceback
    shown, started, run_id = Console(), time.time(), f"serve-{new_id()[:12]}"
    limits = ConnectionLimits(most=max_connections, idle_s=connection_idle_s, receive_s=receive_s, stalled_s=upstream_idle_s)
    answers = upstream_of(model, base=upstream, key=upstream_key, idle_s=upstream_idle_s)
    opened = Store(store)
    gateway = Gateway(
        opened, answers, key=key, host=host, names=allow_host, run_id=run_id, idle_s=idle_s, max_body=max_body_mb << 20,
        receive_s=receive_s, one_server=upstream is not None,
    )  # fmt: skip
    config = {"model": model, "upstream": upstream, "host": host, "port": port, "idle_s": idle_s, "limits": asdict(limits)}
    listener = Listener(gateway.app(), limits, gateway.connections.answered)
    try:
        where = await listener.start(host, port)
    except OSError as error:
        opened.close()
        raise AssayError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port") from None
    address = f"http://{'[' + host + ']' if ':' in host else host}:{where}"
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # before it says that it is there: who started it may end it at once
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    unknown = Unrecorded(0, f"the gateway {run_id} has not ended, or was killed")  # until its own count is there
    opened.put_run(run_id, kind="serve", config=config, status="running", started_at=started, unrecorded=unknown)
    if as_json:
        print_json({"url": address, "model": answers.name, "run": run_id, **({"key": gateway.access.key} if key is None else {})}, with_key=True)
    shown.say(f"{answers.name} at {address}, recorded in {shown_url(store_url(store)).removeprefix('sqlite:///')}; Ctrl-C ends it")
    bases = f"OPENAI_BASE_URL={address}/v1  ANTHROPIC_BASE_URL={address}  GOOGLE_GEMINI_BASE_URL={address}"
    shown.say(f"  {bases}" + ("" if key is None else "  (callers must send the key)"))
    if key is None:
        print(f"  ASSAY_KEY={gateway.access.key}  (for this run: rewards, feedback, the model, counts)", file=unscrubbed(sys.stderr), flush=True)
    try:
        await ended.wait()
    finally:
        await listener.close()
        waits_s = _FLUSH_S
        try:  # counts are of what is written
            await asyncio.to_thread(opened.flush, waits_s)
        except StoreError as error:
            shown.say(str(error))
            waits_s = _AGAIN_S
        audit = gateway.stats()
        opened.put_run(run_id, kind="serve", config=config, status="done", started_at=started, unrecorded=Unrecorded(audit["unrecorded"]))
        with suppress(StoreError):  # it was said above
            opened.close(waits_s)
    past, through = audit["not_spoken"], audit["passed_through"]
    if as_json:
        print_json(audit)
    shown.say(
        f"{counted(audit['calls'], 'calls')} went to a model, {audit['stored']} are stored, {audit['unrecorded']} were not recorded; "
        f"rollouts never closed: {audit['unclosed']:,}"
        + (f"; passed on and not recorded: {', '.join(f'{name} ({count})' for name, count in through.items())}" if through else "")
        + (f"; asked for and not spoken here: {', '.join(f'{path} ({count})' for path, count in past.items())}" if past else "")
    )
