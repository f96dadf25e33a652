"""Counts of a gateway and its agents as OTLP metrics, with the names of `names.METRICS`. Sends nothing."""

from collections.abc import Iterator, Mapping
from typing import Any

from assay.traces.otlp.names import METRICS
from assay.traces.otlp.spans import attributes_of, resource, scope

__all__ = ["metrics_request"]

_CUMULATIVE = 2
_Point = tuple[float | int, dict[str, str]]


def metrics_request(
    stats: Mapping[str, Any], agents: Mapping[str, Any], *, since: float, now: float, service: str = "assay"
) -> dict[str, Any]:
    """An export request in OTLP's JSON encoding.

    Args:
        stats: the counts of the gateway.
        agents: deployed agents by name, see `assay.traces.gateway.agent_routes.AgentRunner`.
        since: when the process began to count, seconds since the epoch.
        now: seconds since the epoch.
    """
    points: dict[str, list[_Point]] = {key: [(stats[key], {})] for key in METRICS if key in stats}
    for key, value, labels in _of_agents(agents):
        points.setdefault(key, []).append((value, labels))
    times = {"startTimeUnixNano": str(int(since * 1e9)), "timeUnixNano": str(int(now * 1e9))}
    metrics = [_metric(key, points[key], times) for key in METRICS if key in points]
    scopes = [{"scope": scope(), "metrics": metrics}]
    return {"resourceMetrics": [{"resource": resource(service), "scopeMetrics": scopes}]}


def _of_agents(agents: Mapping[str, Any]) -> Iterator[tuple[str, float | int, dict[str, str]]]:
    for agent, runner in agents.items():
        for (version, arm, status), count in sorted(dict(runner.counts).items()):
            yield "rollouts", count, {"agent": agent, "version": version, "arm": arm, "status": status}
        for (version, arm), seconds in sorted(dict(runner.seconds).items()):
            yield "seconds", float(seconds), {"agent": agent, "version": version, "arm": arm}
        for version, count in sorted(dict(runner.fallbacks).items()):
            yield "fallbacks", count, {"agent": agent, "version": version}


def _metric(key: str, points: list[_Point], times: Mapping[str, str]) -> dict[str, Any]:
    name, unit, rises, text = METRICS[key]
    data = [
        {
            **(times if rises else {"timeUnixNano": times["timeUnixNano"]}),
            **({"asInt": str(value)} if isinstance(value, int) else {"asDouble": value}),
            "attributes": attributes_of({f"assay.{label}": text for label, text in labels.items()}),
        }
        for value, labels in points
    ]
    kind: dict[str, Any] = {"dataPoints": data}
    if rises:
        kind.update(aggregationTemporality=_CUMULATIVE, isMonotonic=True)
    return {"name": name, "unit": unit, "description": text, "sum" if rises else "gauge": kind}
