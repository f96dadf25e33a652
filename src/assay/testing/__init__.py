"""Fakes and contract suites that users' own judges, stores and agents can be held to."""

from assay.testing.agents import SyntheticAgent
from assay.testing.fakes import ScriptedEngine, scripted_lm
from assay.testing.judges import AnswerKeyJudge, PairKeyJudge, broken_judges

__all__ = ["AnswerKeyJudge", "PairKeyJudge", "ScriptedEngine", "SyntheticAgent", "broken_judges", "scripted_lm"]
