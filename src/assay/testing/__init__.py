"""Fakes for tests of your own judges, stores and agents. The contract suites are in `assay.testing.contracts`."""

from assay.testing.agents import SyntheticAgent
from assay.testing.fakes import ScriptedEngine, scripted_lm
from assay.testing.judges import AnswerKeyJudge, PairKeyJudge, broken_judges

__all__ = [
    "AnswerKeyJudge",
    "PairKeyJudge",
    "ScriptedEngine",
    "SyntheticAgent",
    "broken_judges",
    "scripted_lm",
]
