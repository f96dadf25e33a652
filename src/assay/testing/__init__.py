"""Fakes for tests of your own judges, stores and agents. The contract suites are in `assay.testing.contracts`."""

from assay.testing.agents import SyntheticAgent
from assay.testing.fakes import ScriptedEngine, scripted_lm
from assay.testing.judges import AnswerKeyJudge, PairKeyJudge, broken_judges
from assay.testing.learner import InContextLearner, LearnerTask

__all__ = [
    "AnswerKeyJudge",
    "InContextLearner",
    "LearnerTask",
    "PairKeyJudge",
    "ScriptedEngine",
    "SyntheticAgent",
    "broken_judges",
    "scripted_lm",
]
