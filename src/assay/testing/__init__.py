"""Fakes for tests of your own judges, stores and agents. The contract suites are in `assay.testing.contracts`."""

from assay.testing.fakes import AnswerKeyJudge, PairKeyJudge, ScriptedEngine, SyntheticAgent, broken_judges, scripted_lm

__all__ = [
    "AnswerKeyJudge",
    "PairKeyJudge",
    "ScriptedEngine",
    "SyntheticAgent",
    "broken_judges",
    "scripted_lm",
]
