"""`assay serve`: the gateway in front of a model, until it is stopped.

An agent of the registry loads DSPy, the gateway alone does not.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from assay.commands.groups import InStore, Listening, Reported
from assay.errors import AssayError, ConfigError, StoreError
from assay.jobs.groups import StoredJudge
from assay.models.limits import LAST_CALLS_S
from assay.models.prices import price_text
from assay.models.roles import DEFAULT_MODEL
from assay.models.unrecorded import Unrecorded
from assay.support.numbers import counted
from assay.support.options import Flag, Parse, Positive, function_of
from assay.support.report import OBJECT, Report
from assay.traces.gateway import MAX_BODY_MB

if TYPE_CHECKING:
    from assay.commands.advancing import Advancer
    from assay.commands.deployed import DeployedAgent, DeployedTexts
    from assay.traces.gateway.server import Gateway
    from assay.traces.otlp.exporter import Endpoint, Exporter
    from assay.traces.store import Store

    _Registered = Mapping[str, DeployedAgent | DeployedTexts]

# How long the end waits for a database that does not answer, first and once more after an error.
# Rows that it has not written by then stay in a file, and are written when the store is opened next.
FLUSH_TIMEOUT_S, SECOND_FLUSH_TIMEOUT_S = 25.0, 2.0
_JUDGED_S = 10.0  # how long the end waits for judges; what they have not scored, `assay traces score` does
_OF_AGENT = ("agent_rubric", "agent_timeout_s", "replace_lms", "advance_s")
_Seconds = Annotated[float, Ge(0.1), Flag(metavar="SECONDS")]


@dataclass(frozen=True, kw_only=True, repr=False)
class Serving(Report):
    """A gateway that listens.

    Attributes:
        url: base URL, with the port that was bound.
        model: name of the model that answers; empty where the upstream's own choice is passed through.
        run: id of its run in the store.
        key: key that was generated, because none was given; null otherwise.
        stop: ends the gateway; may be called from any thread.
        agents: the agents that are served, each with the version that its units get without a deployment.
        texts: the agents that run elsewhere, with the version whose texts they get without a deployment.
        database: where it records, without a password.
    """

    has_key: ClassVar[bool] = True

    url: str
    model: str
    run: str
    key: str | None
    stop: Callable[[], None] = field(metadata=OBJECT)
    agents: Mapping[str, str] = field(metadata=OBJECT)
    texts: Mapping[str, str] = field(metadata=OBJECT)
    database: str = field(metadata=OBJECT)

    def warnings(self) -> Iterator[str]:
        yield f"gateway at {self.url} to {self.model}, recorded in {self.database}; Ctrl-C ends it"
        for name, version in self.agents.items():
            yield f"  agent {name}, now {version}: POST {self.url}/agents/{name}"
        for name, version in self.texts.items():
            yield f"  texts of the agent {name}, now {version}: start it with a base URL of this gateway"
        bases = f"OPENAI_BASE_URL={self.url}/v1  ANTHROPIC_BASE_URL={self.url}  GOOGLE_GEMINI_BASE_URL={self.url}"
        yield f"  {bases}" + ("" if self.key else "  (callers must send the key)")
        if self.key:
            yield f"  ASSAY_KEY={self.key}  (for this run: rewards, feedback, the model, counts)"


@dataclass(frozen=True, kw_only=True, repr=False)
class ServeReport(Report):
    """What a gateway has counted when it ends.

    Attributes:
        calls: LM calls sent to a model.
        stored: those that are in the store.
        unrecorded: those that are not.
        in_flight: calls without an answer at the end.
        rows_waiting: rows that the database has not taken; they are counted as stored.
        loops: answers whose text repeated itself, with what stopping them has saved.
        passed_through: requests that were passed on and not recorded, by path.
        refused_paths: requests that the gateway does not support, by path.
        open: rollouts that were open at the end.
        closed: rollouts that ended.
        unclosed: those that nobody closed.
        model: name of the model that answered.
        agents: rollouts of agents by version and status; null without an agent.
        otlp: what was sent to the OTLP endpoint; null without one.
    """

    calls: int
    stored: int
    unrecorded: int
    in_flight: int
    rows_waiting: int
    loops: Mapping[str, int]
    passed_through: Mapping[str, int]
    refused_paths: Mapping[str, int]
    open: int
    closed: int
    unclosed: int
    model: str
    agents: Mapping[str, Mapping[str, int]] | None
    otlp: Mapping[str, int] | None

    def warnings(self) -> Iterator[str]:
        agents = ", ".join(_of_version(version, statuses) for version, statuses in sorted((self.agents or {}).items()))
        parts = [f"rollouts of agents: {agents or 'none'}"] if self.agents is not None else []
        parts += [
            f"{counted(self.calls, 'calls')} to a model: {self.stored} stored, {self.unrecorded} not recorded",
            f"rollouts never closed: {self.unclosed:,}",
        ]
        for text, counts in (
            ("passed on and not recorded", self.passed_through),
            ("requested, but not supported by the gateway", self.refused_paths),
        ):
            if counts:
                parts.append(f"{text}: {', '.join(f'{name} ({count})' for name, count in counts.items())}")
        yield "; ".join(parts)


def _of_version(version: str, statuses: Mapping[str, int]) -> str:
    failed = sum(count for status, count in statuses.items() if status not in ("done", "begun"))
    return f"{version} {sum(statuses.values()):,}" + (f" ({failed:,} failed)" if failed else "")


class Serve(StoredJudge, Listening, InStore, Reported):
    """Start a gateway that records an agent's LM calls. Set the agent's base URL to the gateway.

    It accepts the APIs of OpenAI (chat completions, Responses), Anthropic (messages) and Gemini. Ctrl-C stops it, or
    SIGTERM; from Python, in any thread, `Serving.stop`. It reports its address at the start and its counts at the end.
    Without `key`, LM calls need no key, and a key for the other routes (rewards, feedback, model, counts) is generated.

    \b
    OPENAI_BASE_URL=http://127.0.0.1:8321/v1   ANTHROPIC_BASE_URL=http://127.0.0.1:8321
    GOOGLE_GEMINI_BASE_URL=http://127.0.0.1:8321

    Raises:
        ConfigError: an address beyond loopback has no key, or a judge of `agent_rubric` has no model.
        DeploymentError: an agent has no version to run.
        AssayError: the address cannot be bound.
    """

    OF_JUDGE: ClassVar[Sequence[str]] = ("judge_api_base", "judge_api_key_env", "judge_thinking")

    model: Annotated[str | None, Flag(metavar="NAME")] = None
    """Model that answers: embedded/NAME or a litellm name; with `upstream`, the name that the server knows. Without
    `upstream` the default is embedded/smollm2-135m."""
    upstream: Annotated[str | None, Flag(metavar="URL")] = None
    """Base URL of a server that implements OpenAI chat completions (vLLM, llama.cpp, a provider)."""
    upstream_key: Annotated[str | None, Flag(env="ASSAY_UPSTREAM_KEY", key=False)] = field(default=None, repr=False)
    """API key sent to the upstream; by default the key that each caller sends."""
    price: Annotated[str | Sequence[float] | None, Flag(metavar="IN,OUT"), Parse(price_text)] = None
    """Price of the model in US dollars for a million tokens of prompt and answer: 0.15,0.60. Also that of the judges
    with this model. By default the cost of the gateway's calls to a server is unknown."""
    port: Annotated[int, Ge(0), Le(65535)] = 8321
    """Port to bind; 0 selects a free port."""
    idle_s: _Seconds = 600.0
    """Seconds without a call after which a rollout ends."""
    max_body_mb: Positive = MAX_BODY_MB
    """Maximum request body in MiB; a larger request is answered with status 413."""
    max_connections: Positive | None = None
    """Maximum number of concurrent connections; others wait. By default a third of the open-file limit (ulimit -n), at
    most 2000."""
    connection_idle_s: _Seconds = 75.0
    """Seconds after which a connection without a request is closed."""
    receive_s: _Seconds = 60.0
    """Time limit for receiving a request body, plus 1 second for each 64 KiB."""
    upstream_idle_s: _Seconds = 600.0
    """Seconds in which the upstream sends nothing, or the caller reads nothing, after which a call fails."""
    loops: Literal["off", "alarm", "stop"] = "alarm"
    """What to do with an answer whose text repeats itself: alarm marks its call with the failure kind loop, stop also
    ends a streamed answer, off disables the check."""
    registered: Annotated[Sequence[str], Flag(metavar="NAME")] = ()
    """Agent of the registry that POST /agents/NAME runs, or whose texts are replaced in its requests; repeatable."""
    agent_rubric: Annotated[str | None, Flag(metavar="R", path=True)] = None
    """Rubric that scores the rollouts of `registered` agents when they end. Its judges score after the answer."""
    agent_timeout_s: _Seconds = 600.0
    """Time limit of one rollout of a `registered` agent; beyond it the agent has failed."""
    replace_lms: bool = False
    """Call the model of the version in place of the models that the program of a `registered` agent makes itself. By
    default these are called as they are, also if a model is named."""
    advance_s: Annotated[float, Ge(0)] = 10.0
    """Seconds between two evaluations of the deployment of a `registered` agent; with 0 only assay deploy advance
    evaluates it."""
    otlp: Literal["off", "metrics", "structure", "content"] = "off"
    """What is sent to an OTLP/HTTP endpoint as it comes: metrics; structure, also the rollouts that have ended, without
    their texts; content, with them."""
    otlp_endpoint: Annotated[str | None, Flag(metavar="URL")] = None
    """OTLP/HTTP address, to which /v1/traces and /v1/metrics are added; by default $OTEL_EXPORTER_OTLP_ENDPOINT."""
    otlp_tenants: Annotated[Sequence[str], Flag(name="--otlp-tenant", metavar="NAME")] = ()
    """Tenant whose rollouts are sent too; repeatable."""
    on_start: Annotated[Callable[[Serving], None] | None, Flag(key=False, shown=False)] = None
    """Called once the gateway listens; an error that it raises ends the gateway."""

    def check(self) -> None:
        if unused := self.changed(*_OF_AGENT) if not self.registered else []:
            raise ConfigError("would have no effect without `registered`", field=unused[0])
        if self.judge_model is not None and self.agent_rubric is None:
            raise ConfigError("would have no effect without `agent_rubric`", field="judge_model")
        if unused := self.changed("otlp_endpoint", "otlp_tenants") if self.otlp == "off" else []:
            raise ConfigError("would have no effect with `otlp` off", field=unused[0])

    @classmethod
    def of_file(cls, stored: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the project file sets, without a judge's model for other commands, or what belongs to none."""
        uses_judge = {"agent_rubric", "judge_model"} <= {*stored, *given}
        return {name: value for name, value in stored.items() if uses_judge or not name.startswith("judge_")}

    @property
    def answering(self) -> str | None:
        """The model that answers; None where the upstream's own choice is passed through."""
        return DEFAULT_MODEL if self.model is None and self.upstream is None else self.model

    def run(self) -> ServeReport:
        logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # a broken connection: the call is in the store
        return asyncio.run(self._serve())

    async def _serve(self) -> ServeReport:
        from assay.jobs.ending import on_ending_signals
        from assay.traces.gateway.connections import ConnectionLimits, Listener
        from assay.traces.gateway.server import Gateway
        from assay.traces.gateway.upstreams import silent_server, upstream_of
        from assay.traces.otlp.exporter import Endpoint
        from assay.traces.records import new_id
        from assay.traces.store import Store

        limits = ConnectionLimits(
            most=self.max_connections, idle_s=self.connection_idle_s, receive_s=self.receive_s,
            stalled_s=self.upstream_idle_s,
        )  # fmt: skip
        upstream = upstream_of(
            self.answering, base=self.upstream, key=self.upstream_key, price=self.price, idle_s=self.upstream_idle_s
        )
        endpoint = None if self.otlp == "off" else Endpoint.of(self.otlp_endpoint)
        store, run_id = Store(self.store), f"serve-{new_id()[:12]}"
        started_at = store.clock.now()
        registered = _registered(self, store)
        agents = {name: agent for name, agent in registered.items() if callable(agent)}
        texts = {name: agent for name, agent in registered.items() if not callable(agent)}
        for agent in registered.values():
            if (note := agent.router.champion.note) is not None:
                self.reporter.say(f"note: {note}")
        gateway = Gateway(
            store, upstream, agents=agents, texts=texts, key=self.key, host=self.host, names=tuple(self.allow_host),
            run_id=run_id, idle_s=self.idle_s, max_body=self.max_body_mb << 20, receive_s=self.receive_s,
            one_server=self.upstream is not None, loops=self.loops,
        )  # fmt: skip
        listener = Listener(gateway.app(), limits, gateway.connections.answered, shutdown_s=LAST_CALLS_S)
        try:
            port = await self.listen(listener)
        except AssayError:
            store.close()
            raise
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        # Before the address is published: the process that reads it may send a signal at once.
        on_ending_signals(loop, lambda: listener.abort() if ended.is_set() else ended.set())
        stored = {name: getattr(self, name) for name in ("upstream", "host", "port", "idle_s", "loops")}
        config = {"model": self.answering, **stored, "limits": asdict(limits)}

        def put_run(status: str, unrecorded: Unrecorded) -> None:
            store.put_run(
                run_id, kind="serve", config=config, status=status, started_at=started_at, unrecorded=unrecorded
            )

        # Unknown until the end writes the count: a killed gateway cannot report what it did not record.
        put_run("running", Unrecorded(0, f"the gateway {run_id} has not ended, or was killed"))
        advancers = _advancers(self, registered)
        exporter = None if endpoint is None else _exporter(self, endpoint, gateway, registered)

        def stop() -> None:
            with suppress(RuntimeError):  # the loop is closed: the gateway has ended
                loop.call_soon_threadsafe(ended.set)

        if self.upstream is not None and (place := await silent_server(self.upstream)):
            self.reporter.say(f"warning: no server answers at {place}; calls fail until one does")
        try:
            if self.on_start is not None:
                self.on_start(Serving(
                    url=f"http://{'[' + self.host + ']' if ':' in self.host else self.host}:{port}",
                    model=upstream.name, run=run_id, key=None if self.key else gateway.access.key, stop=stop,
                    agents={name: agent.router.champion.name for name, agent in agents.items()},
                    texts={name: agent.router.champion.name for name, agent in texts.items()},
                    database=store.address.shown,
                ))  # fmt: skip
            await ended.wait()
        finally:
            await listener.close()
            for advancer in advancers:
                await asyncio.to_thread(advancer.stop)
            for agent in registered.values():
                await asyncio.to_thread(agent.wait, _JUDGED_S)
            if exporter is not None:
                await asyncio.to_thread(exporter.stop)
            wait_s = FLUSH_TIMEOUT_S
            try:  # before the counts are read: `stored` counts rows that are in the database
                await asyncio.to_thread(store.flush, wait_s)
            except StoreError as error:
                self.reporter.say(str(error))
                wait_s = SECOND_FLUSH_TIMEOUT_S
            counts = gateway.stats()
            put_run("done", Unrecorded(counts["unrecorded"]))
            with suppress(StoreError):  # the same error was reported above
                store.close(wait_s)
        if gateway.failed:
            self.reporter.say(f"warning: {counted(gateway.failed, 'calls')} failed; assay traces list shows them")
        rollouts = _rollouts_of(registered) if registered else None
        return ServeReport(**counts, agents=rollouts, otlp=exporter.to_dict() if exporter else None)


def _rollouts_of(agents: "_Registered") -> dict[str, dict[str, int]]:
    """Rollouts of this process by version and status."""
    counts: dict[str, dict[str, int]] = {}
    for agent in agents.values():
        for (version, _, status), count in agent.counts.items():
            of_version = counts.setdefault(version, {})
            of_version[status] = of_version.get(status, 0) + count
    return counts


def _exporter(settings: Serve, endpoint: "Endpoint", gateway: "Gateway", agents: "_Registered") -> "Exporter":
    """The thread that sends rollouts and metrics; started."""
    from assay.traces.otlp.exporter import Exporter

    stores = list({id(store): store for store in (gateway.store, *(agent.store for agent in agents.values()))}.values())
    exporter = Exporter(
        endpoint, stores, rollouts=settings.otlp != "metrics", content=settings.otlp == "content",
        tenants=tuple(settings.otlp_tenants), metrics=lambda: (gateway.stats(), agents),
    )  # fmt: skip
    exporter.start()
    return exporter


def _registered(settings: Serve, store: "Store") -> "_Registered":
    """The registered agents by name; one that has no champion is an error now."""
    if not settings.registered:
        return {}
    from assay.commands.deployed import DeployedTexts, deployed
    from assay.deployment.registry import Registry

    judge: dict[str, Any] = {
        "judge_model": settings.judge_model, "judge_api_base": settings.judge_api_base,
        "judge_api_key_env": settings.judge_api_key_env, "judge_thinking": settings.judge_thinking,
        "price": settings.price if settings.judge_model and settings.judge_model == settings.answering else None,
    }  # fmt: skip
    agents: dict[str, DeployedAgent | DeployedTexts] = {}
    for name in settings.registered:
        if not Registry(store.engine).runs_elsewhere(name):
            agents[name] = deployed(
                name, store=settings.store, rubric=settings.agent_rubric, timeout_s=settings.agent_timeout_s,
                replace_lms=settings.replace_lms, **judge,
            )  # fmt: skip
        elif unused := settings.changed("agent_rubric", "agent_timeout_s", "replace_lms"):
            raise ConfigError(
                f"is for agents that the gateway runs, and {name} runs elsewhere: its rollouts are scored by POST "
                f"/assay/rollouts/ID/reward, or by assay deploy advance {name} --rubric R", field=unused[0],
            )  # fmt: skip
        else:
            agents[name] = DeployedTexts(store, name)
    return agents


def _advancers(settings: Serve, agents: "_Registered") -> "list[Advancer]":
    """Threads that advance the deployments of the agents; started."""
    if not settings.registered or not settings.advance_s:
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


serve = function_of(Serve, "serve")
