"""Histories of agents that were traced elsewhere: OTLP files, exports of Langfuse and of MLflow."""

from assay.traces.importing.imports import KINDS, Imported, ImportReport, Skipped, import_traces, read_langfuse, read_mlflow, read_otlp

__all__ = ["KINDS", "ImportReport", "Imported", "Skipped", "import_traces", "read_langfuse", "read_mlflow", "read_otlp"]
