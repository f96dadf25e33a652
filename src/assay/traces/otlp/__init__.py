"""Rollouts and metrics as OTLP: one versioned mapping (`names`), requests, and sending over HTTP."""

from assay.traces.otlp.names import VERSION
from assay.traces.otlp.spans import trace_request

__all__ = ["VERSION", "trace_request"]
