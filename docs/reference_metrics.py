"""The page `reference/metrics.md`: names of the metrics of `assay serve`, in Prometheus and in OTLP."""

from reference_text import cell


def metrics_page() -> str:
    from assay.traces.otlp.exporter import METRICS
    from assay.traces.otlp.spans import VERSION

    rows = [
        f"| `{measure.name}` | `{measure.prometheus}` | {measure.kind} | `{measure.unit}` | "
        f"{cell(measure.text)} | {', '.join(f'`{label}`' for label in measure.labels)} |"
        for measure in METRICS.values()
    ]
    return "\n".join(
        [
            "# Metrics",
            "",
            f"Of `assay serve`, version {VERSION} of the names, the same for `GET /metrics` and `--otlp`. Names in "
            "Prometheus follow OpenTelemetry's rules. Labels have the prefix `assay.` in OTLP (`assay.agent`). A "
            "histogram has a sum and a number of values, without buckets. Counters begin at 0 with the process.",
            "",
            "| OTLP | Prometheus | type | unit | meaning | labels |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )
