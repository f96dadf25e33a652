"""Rollouts and metrics as OTLP: one versioned mapping (`names`), requests, and sending over HTTP."""

from assay.traces.otlp.spans import VERSION, trace_request

__all__ = ["VERSION", "trace_request"]
