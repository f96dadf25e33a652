"""Importers for traces recorded by other tools: OTLP files and exports of Langfuse and MLflow."""

from assay.traces.importers.files import Skipped
from assay.traces.importers.imports import KINDS, ImportReport, import_traces, read_langfuse, read_mlflow, read_otlp
from assay.traces.importers.rollouts import Imported

__all__ = ["KINDS", "ImportReport", "Imported", "Skipped", "import_traces", "read_langfuse", "read_mlflow", "read_otlp"]
