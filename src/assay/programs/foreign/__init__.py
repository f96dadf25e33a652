"""Agents that were written with anything: run on a task with a base URL, and used as programs of a training."""
