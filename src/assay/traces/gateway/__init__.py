"""The gateway: records agents that call a language model over HTTP."""
