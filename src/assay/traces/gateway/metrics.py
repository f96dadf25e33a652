"""Counts of the gateway and its agents as Prometheus text (format 0.0.4). Counters start at 0 with each process."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from aiohttp import web

__all__ = ["CONTENT_TYPE", "Metrics", "metrics_text"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GATEWAY = (  # key of the gateway's counts, name, type, help
    ("calls", "assay_gateway_calls_total", "counter", "LM calls that were sent to a model."),
    ("stored", "assay_gateway_calls_stored_total", "counter", "LM calls that are in the store."),
    ("unrecorded", "assay_gateway_calls_unrecorded_total", "counter", "LM calls that are not in the store."),
    ("in_flight", "assay_gateway_calls_in_flight", "gauge", "LM calls that are not answered yet."),
    ("rows_waiting", "assay_gateway_rows_waiting", "gauge", "Rows that wait for the database."),
    ("open", "assay_gateway_rollouts_open", "gauge", "Rollouts that are open."),
)


class Metrics:
    """GET /metrics; needs the gateway's key.

    Args:
        stats: the counts of the gateway.
        agents: deployed agents by name, see `assay.traces.gateway.agent_routes.AgentRunner`.
    """

    def __init__(self, stats: Callable[[], Mapping[str, Any]], agents: Mapping[str, Any]) -> None:
        self.stats, self.agents = stats, agents

    async def get(self, request: web.Request) -> web.Response:
        text = metrics_text(self.stats(), self.agents)
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})


def metrics_text(stats: Mapping[str, Any], agents: Mapping[str, Any]) -> str:
    """The text of all metrics."""
    return "\n".join([*_gateway(stats), *_agents(agents)]) + "\n"


def _gateway(stats: Mapping[str, Any]) -> Iterator[str]:
    for key, name, kind, text in _GATEWAY:
        yield from _head(name, kind, text)
        yield f"{name} {stats[key]}"


def _agents(agents: Mapping[str, Any]) -> Iterator[str]:
    if not agents:
        return
    yield from _head("assay_agent_rollouts_total", "counter", "Rollouts by agent, version, arm and status.")
    for agent, runner in agents.items():
        for (version, arm, status), count in sorted(dict(runner.counts).items()):
            labels = _labels(agent=agent, version=version, arm=arm, status=status)
            yield f"assay_agent_rollouts_total{labels} {count}"
    yield from _head("assay_agent_rollout_seconds", "summary", "Duration of rollouts.")
    for agent, runner in agents.items():
        counts = dict(runner.counts)
        for (version, arm), seconds in sorted(dict(runner.seconds).items()):
            labels = _labels(agent=agent, version=version, arm=arm)
            number = sum(count for key, count in counts.items() if key[:2] == (version, arm))
            yield f"assay_agent_rollout_seconds_sum{labels} {seconds:.6f}"
            yield f"assay_agent_rollout_seconds_count{labels} {number}"
    yield from _head("assay_agent_fallbacks_total", "counter", "Rollouts of a version that the champion took over.")
    for agent, runner in agents.items():
        for version, count in sorted(dict(runner.fallbacks).items()):
            yield f"assay_agent_fallbacks_total{_labels(agent=agent, version=version)} {count}"


def _head(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _labels(**labels: str) -> str:
    def escaped(value: str) -> str:
        return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}"
