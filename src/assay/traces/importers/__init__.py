"""Importers for traces recorded by other tools: OTLP files and exports of Langfuse and MLflow."""

from assay.traces.importers.imports import (
    KINDS,
    Imported,
    ImportReport,
    Skipped,
    import_traces,
    read_langfuse,
    read_mlflow,
    read_otlp,
)

__all__ = ["KINDS", "ImportReport", "Imported", "Skipped", "import_traces", "read_langfuse", "read_mlflow", "read_otlp"]
