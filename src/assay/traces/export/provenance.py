"""Provenance of an export: counts of the models, tokenizers, programs, rubrics, consents, runs and splits."""

from collections import Counter

import orjson

from assay.models.registry import tokenizer_of
from assay.traces.export.selection import Episode

__all__ = ["Provenance"]

_MOST_RUNS = 200  # with more runs, only their number is reported


class Provenance:
    """Counts rollouts by origin."""

    def __init__(self) -> None:
        names = ("models", "tokenizers", "programs", "rubrics", "consent", "runs", "splits")
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in names}

    def see(self, episode: Episode, *, split: str) -> None:
        """Count a rollout."""
        rollout, counts = episode.rollout, self._counts
        models = {
            f"{turn.model}@{turn.weights[:12] or '?'}" + "".join(f"+{a[:12]}" for a in orjson.loads(turn.adapters_json))
            for turn in episode.turns
        }
        counts["models"].update(models)
        counts["tokenizers"].update({tokenizer_of(turn.weights) or "not known" for turn in episode.turns})
        counts["programs"][f"{rollout.program}@{rollout.program_version}"] += 1
        counts["rubrics"][rollout.rubric or "none"] += 1
        counts["consent"]["given" if rollout.consent else "not asked"] += 1
        counts["runs"][rollout.run_id or "none"] += 1
        counts["splits"][split or "none"] += 1

    def to_dict(self) -> dict[str, Counter[str]]:
        """Counts by kind and name. More than 200 runs are reported as one number under `runs`."""
        runs = self._counts["runs"]
        return {**self._counts, "runs": runs if len(runs) <= _MOST_RUNS else Counter({"runs": len(runs)})}
