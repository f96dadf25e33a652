"""Counts of the gateway and its agents as Prometheus text (format 0.0.4). Counters start at 0 with each process.

Names, units and texts are those of `assay.traces.otlp.metric_names`, as in OTLP.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from aiohttp import web

from assay.traces.otlp.metric_names import DURATION, Point, points_of

__all__ = ["CONTENT_TYPE", "Metrics", "metrics_text"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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
    lines = []
    for measure, points in points_of(stats, agents):
        name = measure.prometheus
        lines += [f"# HELP {name} {measure.text}", f"# TYPE {name} {measure.kind}"]
        for point in points:
            lines += (
                _summed(name, point) if measure.kind == DURATION else [f"{name}{_labels(point.labels)} {point.value}"]
            )
    return "\n".join(lines) + "\n"


def _summed(name: str, point: Point) -> Iterator[str]:
    labels = _labels(point.labels)
    yield f"{name}_bucket{_labels({**point.labels, 'le': '+Inf'})} {point.count}"
    yield f"{name}_sum{labels} {point.value:.6f}"
    yield f"{name}_count{labels} {point.count}"


def _labels(labels: Mapping[str, str]) -> str:
    def escaped(value: str) -> str:
        return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}" if labels else ""
