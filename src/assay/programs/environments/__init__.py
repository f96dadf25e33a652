"""Environments that agents act in: the interface, the agent that acts, an adapter for gymnasium, and those shipped."""
