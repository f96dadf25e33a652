"""Fakes and contract suites that users' own judges, stores and agents can be held to."""

from assay.testing.fakes import ScriptedEngine, scripted_lm

__all__ = ["ScriptedEngine", "scripted_lm"]
