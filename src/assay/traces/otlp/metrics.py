"""Counts of a gateway and its agents as OTLP metrics, with the names of `metric_names`. Sends nothing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.traces.otlp.spans import VERSION, attributes_of, resource, scope

# -- The metrics of a gateway and its agents: one table, from which `GET /metrics` and OTLP have names, units and texts.
#
# A change of a name or a meaning increases `names.VERSION`, which both send as the metric `assay.mapping.version`.


COUNTER, GAUGE, DURATION = "counter", "gauge", "histogram"
_PROMETHEUS_UNITS = {"s": "seconds"}  # units in braces, such as {call}, are not part of a name


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A metric.

    Attributes:
        name: in OTLP.
        unit: of UCUM; in braces what is counted.
        kind: counter, gauge, or histogram (sum and number of values, without buckets).
        text: description, in both formats.
        labels: names in Prometheus; in OTLP they have the prefix `assay.`.
    """

    name: str
    unit: str
    kind: str
    text: str
    labels: tuple[str, ...] = ()

    @property
    def prometheus(self) -> str:
        """Name in Prometheus, by the rules of OpenTelemetry: underscores, the unit, `_total` for counters."""
        unit = _PROMETHEUS_UNITS.get(self.unit)
        parts = [self.name.replace(".", "_"), *([unit] if unit else []), *(["total"] if self.kind == COUNTER else [])]
        return "_".join(parts)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A value of a metric; of a histogram the sum of `count` values."""

    value: float | int
    labels: Mapping[str, str]
    count: int = 1


def _counts(name: str, unit: str, kind: str, text: str, *labels: str) -> Measure:
    return Measure(name=name, unit=unit, kind=kind, text=text, labels=labels)


# key of the gateway's counts, or of an agent's -> metric
METRICS: dict[str, Measure] = {
    "calls": _counts("assay.gateway.calls", "{call}", COUNTER, "LM calls that were sent to a model."),
    "stored": _counts("assay.gateway.calls.stored", "{call}", COUNTER, "LM calls that are in the store."),
    "unrecorded": _counts("assay.gateway.calls.unrecorded", "{call}", COUNTER, "LM calls that are not in the store."),
    "in_flight": _counts("assay.gateway.calls.in_flight", "{call}", GAUGE, "LM calls that are not answered yet."),
    "rows_waiting": _counts("assay.gateway.rows_waiting", "{row}", GAUGE, "Rows that wait for the database."),
    "open": _counts("assay.gateway.rollouts.open", "{rollout}", GAUGE, "Rollouts that are open."),
    "rollouts": _counts(
        "assay.agent.rollouts", "{rollout}", COUNTER, "Rollouts by agent, version, arm and status.",
        "agent", "version", "arm", "status",
    ),
    "seconds": _counts(
        "assay.agent.rollout.duration", "s", DURATION, "Duration of rollouts.", "agent", "version", "arm"
    ),
    "fallbacks": _counts(
        "assay.agent.fallbacks", "{rollout}", COUNTER, "Rollouts of a version that the champion took over.",
        "agent", "version",
    ),
    "mapping": _counts("assay.mapping.version", "1", GAUGE, "Version of these names."),
}  # fmt: skip


def points_of(stats: Mapping[str, Any], agents: Mapping[str, Any]) -> Iterator[tuple[Measure, list[Point]]]:
    """The metrics that have values, in the order of `METRICS`.

    Args:
        stats: the counts of the gateway; other keys are not metrics.
        agents: deployed agents by name, see `assay.traces.gateway.routes.AgentRunner`.
    """
    points: dict[str, list[Point]] = {key: [Point(value=stats[key], labels={})] for key in METRICS if key in stats}
    points["mapping"] = [Point(value=VERSION, labels={})]
    for agent, runner in agents.items():
        counts = dict(runner.counts)
        for key, values in (("rollouts", counts), ("seconds", dict(runner.seconds)), ("fallbacks", runner.fallbacks)):
            for at, value in sorted(dict(values).items()):
                of_it = at if isinstance(at, tuple) else (at,)
                number = sum(count for each, count in counts.items() if each[:2] == of_it) if key == "seconds" else 1
                labels = dict(zip(METRICS[key].labels, (agent, *of_it), strict=True))
                points.setdefault(key, []).append(Point(value=value, labels=labels, count=number))
    return ((METRICS[key], points[key]) for key in METRICS if key in points)


# -- Metrics.


_CUMULATIVE = 2


def metrics_request(
    stats: Mapping[str, Any], agents: Mapping[str, Any], *, since: float, now: float, service: str = "assay"
) -> dict[str, Any]:
    """An export request in OTLP's JSON encoding.

    Args:
        stats: the counts of the gateway.
        agents: deployed agents by name, see `assay.traces.gateway.routes.AgentRunner`.
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
