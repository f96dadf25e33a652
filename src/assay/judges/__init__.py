"""Who decides where code cannot. So far one kind: a plain judge, one LM call a criterion."""

from assay.judges.plain import PlainJudge, resolver

__all__ = ["PlainJudge", "resolver"]
