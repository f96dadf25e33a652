"""The gateway: records agents that call a language model over HTTP."""

__all__ = ["MAX_BODY_MB"]

MAX_BODY_MB = 64
"""Default of the largest request body, in MiB, in every command with a gateway."""
