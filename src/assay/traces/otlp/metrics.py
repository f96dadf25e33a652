"""Counts of a gateway and its agents as OTLP metrics, with the names of `metric_names`. Sends nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from assay.traces.otlp.metric_names import COUNTER, DURATION, Measure, Point, points_of
from assay.traces.otlp.spans import attributes_of, resource, scope

__all__ = ["metrics_request"]

_CUMULATIVE = 2


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
    times = {"startTimeUnixNano": str(int(since * 1e9)), "timeUnixNano": str(int(now * 1e9))}
    metrics = [_metric(measure, points, times) for measure, points in points_of(stats, agents)]
    scopes = [{"scope": scope(), "metrics": metrics}]
    return {"resourceMetrics": [{"resource": resource(service), "scopeMetrics": scopes}]}


def _metric(measure: Measure, points: Sequence[Point], times: Mapping[str, str]) -> dict[str, Any]:
    rises = measure.kind in (COUNTER, DURATION)
    data = [
        {
            **(times if rises else {"timeUnixNano": times["timeUnixNano"]}),
            **(_summed(point) if measure.kind == DURATION else _value(point.value)),
            "attributes": attributes_of({f"assay.{label}": text for label, text in point.labels.items()}),
        }
        for point in points
    ]
    kind: dict[str, Any] = {"dataPoints": data}
    if rises:
        kind["aggregationTemporality"] = _CUMULATIVE
    if measure.kind == COUNTER:
        kind["isMonotonic"] = True
    name = {COUNTER: "sum", DURATION: "histogram"}.get(measure.kind, "gauge")
    return {"name": measure.name, "unit": measure.unit, "description": measure.text, name: kind}


def _value(value: float | int) -> dict[str, Any]:
    return {"asInt": str(value)} if isinstance(value, int) else {"asDouble": value}


def _summed(point: Point) -> dict[str, Any]:
    return {"count": str(point.count), "sum": float(point.value), "bucketCounts": [str(point.count)]}
