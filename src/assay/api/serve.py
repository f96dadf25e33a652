"""Public API for `assay serve`: the gateway in front of a model, until it is stopped.

Does not print or show keys: the command line does. An agent of the registry loads DSPy, the gateway alone does not.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from assay.errors import AssayError, StoreError
from assay.evaluation.progress import Progress, default_progress
from assay.models.limits import LAST_CALLS_S
from assay.models.unrecorded import Unrecorded
from assay.runs.ending import ending_signals
from assay.runs.settings import ServeSettings
from assay.runs.settings.store_options import ServeOptions
from assay.support.keywords import takes
from assay.traces.gateway.connections import ConnectionLimits, Listener
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import upstream_of
from assay.traces.otlp.exporter import Endpoint, Exporter
from assay.traces.records import new_id
from assay.traces.store import Store

if TYPE_CHECKING:
    from assay.commands.advancing import Advancer
    from assay.commands.deployed import DeployedAgent

# How long the end waits for a database that does not answer, first and once more after an error.
# Rows that it has not written by then stay in a file, and are written when the store is opened next.
FLUSH_TIMEOUT_S, SECOND_FLUSH_TIMEOUT_S = 25.0, 2.0
_JUDGED_S = 10.0  # how long the end waits for judges; what they have not scored, `assay traces score` does


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A gateway that listens.

    Attributes:
        url: base URL, with the port that was bound.
        model: name of the model that answers; empty where the upstream's own choice is passed through.
        run_id: its run in the store.
        key: key of the gateway: the given one, or the one that was generated.
        stop: ends the gateway; may be called from any thread.
        agents: the agents that are served, each with the version that its units get without a deployment.
    """

    url: str
    model: str
    run_id: str
    key: str
    stop: Callable[[], None]
    agents: Mapping[str, str] = field(default_factory=dict)


@takes(ServeSettings)
def serve(
    *,
    store: str | Path | None = None,
    key: str | None = None,
    upstream_key: str | None = None,
    on_start: Callable[[Serving], None] | None = None,
    progress: Progress | None = None,
    **options: Unpack[ServeOptions],
) -> dict[str, Any]:
    """Serves a model, or an upstream, and records the calls, until it is stopped. Returns the counts of the gateway.

    In the main thread SIGINT and SIGTERM stop it; `Serving.stop` does in any.

    Args:
        key: that callers must send. None: LM calls need none, and one for the other routes is generated.
        upstream_key: API key sent to the upstream; None for the key that each caller sends.
        on_start: called once the gateway listens; an error that it raises ends the gateway.
        options: the fields of `assay.runs.settings.ServeSettings`.
    Raises:
        ConfigError: a setting breaks its rule, an address beyond loopback has no key, or a judge of `agent_rubric` has
            no model.
        DeploymentError: an agent has no version to run.
        AssayError: the address cannot be bound.
    """
    settings = ServeSettings(**options)
    return asyncio.run(_serve(settings, store, key, upstream_key, on_start, default_progress(progress)))


async def _serve(
    settings: ServeSettings, store: str | Path | None, key: str | None, upstream_key: str | None,
    on_start: Callable[[Serving], None] | None, progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    limits = ConnectionLimits(
        most=settings.max_connections, idle_s=settings.connection_idle_s, receive_s=settings.receive_s,
        stalled_s=settings.upstream_idle_s,
    )  # fmt: skip
    upstream = upstream_of(
        settings.answering,
        base=settings.upstream,
        key=upstream_key,
        price=settings.price,
        idle_s=settings.upstream_idle_s,
    )
    endpoint = None if settings.otlp == "off" else Endpoint.of(settings.otlp_endpoint)
    opened, run_id = Store(store), f"serve-{new_id()[:12]}"
    agents = _agents(settings, store)
    for agent in agents.values():
        if (note := agent.router.champion.note) is not None:
            progress.say(f"note: {note}")
    gateway = Gateway(
        opened, upstream, agents=agents, key=key, host=settings.host,
        names=tuple(settings.allow_host), run_id=run_id, idle_s=settings.idle_s, max_body=settings.max_body_mb << 20,
        receive_s=settings.receive_s, one_server=settings.upstream is not None, loops=settings.loops,
    )  # fmt: skip
    listener = Listener(gateway.app(), limits, gateway.connections.answered, shutdown_s=LAST_CALLS_S)
    address = await _listen(listener, settings, opened)
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    # Before the address is published: the process that reads it may send a signal at once.
    if threading.current_thread() is threading.main_thread():
        for number in ending_signals():
            loop.add_signal_handler(number, lambda: listener.abort() if ended.is_set() else ended.set())
    run = _Run(run_id, opened, gateway, _config(settings, limits), progress)
    run.begin()
    advancers = _advancers(settings, agents)
    exporter = None if endpoint is None else _exporter(settings, endpoint, gateway, agents)

    def stop() -> None:
        with suppress(RuntimeError):  # the loop is closed: the gateway has ended
            loop.call_soon_threadsafe(ended.set)

    try:
        if on_start is not None:
            champions = {name: agent.router.champion.name for name, agent in agents.items()}
            on_start(Serving(
                url=address, model=upstream.name, run_id=run_id, key=gateway.access.key, stop=stop, agents=champions
            ))  # fmt: skip
        await ended.wait()
    finally:
        await listener.close()
        for advancer in advancers:
            await asyncio.to_thread(advancer.stop)
        for agent in agents.values():
            await asyncio.to_thread(agent.wait, _JUDGED_S)
        if exporter is not None:
            await asyncio.to_thread(exporter.stop)
        counts = await run.end()
    if agents:
        counts["agents"] = _rollouts_of(agents)
    return counts if exporter is None else {**counts, "otlp": exporter.to_dict()}


def _rollouts_of(agents: "Mapping[str, DeployedAgent]") -> dict[str, dict[str, int]]:
    """Rollouts of this process by version and status."""
    counts: dict[str, dict[str, int]] = {}
    for agent in agents.values():
        for (version, _, status), count in agent.counts.items():
            of_version = counts.setdefault(version, {})
            of_version[status] = of_version.get(status, 0) + count
    return counts


def _exporter(
    settings: ServeSettings, endpoint: Endpoint, gateway: Gateway, agents: "Mapping[str, DeployedAgent]"
) -> Exporter:
    """The thread that sends rollouts and metrics; started."""
    stores = list({id(store): store for store in (gateway.store, *(agent.store for agent in agents.values()))}.values())
    exporter = Exporter(
        endpoint, stores, rollouts=settings.otlp != "metrics", content=settings.otlp == "content",
        tenants=tuple(settings.otlp_tenants), metrics=lambda: (gateway.stats(), agents),
    )  # fmt: skip
    exporter.start()
    return exporter


def _agents(settings: ServeSettings, store: str | Path | None) -> "dict[str, DeployedAgent]":
    """The deployed agents by name; one that has no champion is an error now."""
    if not settings.agent:
        return {}
    from assay.commands.deployed import deployed

    judge: Any = {
        "judge_model": settings.judge_model, "judge_api_base": settings.judge_api_base,
        "judge_api_key_env": settings.judge_api_key_env, "judge_thinking": settings.judge_thinking,
        "price": settings.judge_price,
    }  # fmt: skip
    return {
        name: deployed(
            name,
            store=store,
            rubric=settings.agent_rubric,
            timeout_s=settings.agent_timeout_s,
            replace_lms=settings.replace_lms,
            **judge,
        )
        for name in settings.agent
    }


def _advancers(settings: ServeSettings, agents: "Mapping[str, DeployedAgent]") -> "list[Advancer]":
    """Threads that advance the deployments of the agents; started."""
    if not settings.agent or not settings.advance_s:
        return []
    from assay.commands.advancing import Advancer

    advancers = [
        Advancer(agent.store, name, rubric=agent.rubric, every_s=settings.advance_s)
        for name, agent in agents.items()
        if "@" not in name  # one version, without a deployment
    ]
    for advancer in advancers:
        advancer.start()
    return advancers


async def _listen(listener: Listener, settings: ServeSettings, opened: Store) -> str:
    """Starts listening. Returns the base URL, with the port that was bound."""
    host, port = settings.host, settings.port
    try:
        bound = await listener.start(host, port)
    except OSError as error:
        opened.close()
        raise AssayError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another port", flag="--port"
        ) from None
    return f"http://{'[' + host + ']' if ':' in host else host}:{bound}"


def _config(settings: ServeSettings, limits: ConnectionLimits) -> dict[str, Any]:
    """The settings that are stored with the run."""
    config = {name: getattr(settings, name) for name in ("upstream", "host", "port", "idle_s", "loops")}
    return {"model": settings.answering, **config, "limits": asdict(limits)}


class _Run:
    """The gateway's run in the store: written as running at the start, with its counts at the end."""

    def __init__(
        self, run_id: str, opened: Store, gateway: Gateway, config: dict[str, Any], progress: Progress
    ) -> None:
        self.id, self._store, self._gateway, self._progress = run_id, opened, gateway, progress
        self._config, self._started_at = config, time.time()

    def begin(self) -> None:
        # Unknown until the end writes the count: a killed gateway cannot report what it did not record.
        self._report_status("running", Unrecorded(0, f"the gateway {self.id} has not ended, or was killed"))

    async def end(self) -> dict[str, Any]:
        """Writes what is left and closes the store. Returns the counts of the gateway."""
        wait_s = FLUSH_TIMEOUT_S
        try:  # before the counts are read: `stored` counts rows that are in the database
            await asyncio.to_thread(self._store.flush, wait_s)
        except StoreError as error:
            self._progress.say(str(error))
            wait_s = SECOND_FLUSH_TIMEOUT_S
        counts = self._gateway.stats()
        self._report_status("done", Unrecorded(counts["unrecorded"]))
        with suppress(StoreError):  # the same error was reported above
            self._store.close(wait_s)
        return counts

    def _report_status(self, status: str, unrecorded: Unrecorded) -> None:
        self._store.put_run(
            self.id, kind="serve", config=self._config, status=status, started_at=self._started_at,
            unrecorded=unrecorded,
        )  # fmt: skip
