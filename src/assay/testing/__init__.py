"""Fakes and contract suites for users' own judges, stores and agents."""

from assay.testing.agents import SyntheticAgent
from assay.testing.fakes import ScriptedEngine, scripted_lm
from assay.testing.judges import AnswerKeyJudge, PairKeyJudge, broken_judges
from assay.testing.learner import InContextLearner, LearnerTask

__all__ = ["AnswerKeyJudge", "InContextLearner", "LearnerTask", "PairKeyJudge", "ScriptedEngine", "SyntheticAgent", "broken_judges", "scripted_lm"]
