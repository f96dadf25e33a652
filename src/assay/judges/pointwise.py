"""A judge of one output: one question, a scale, and a reading of the model's verdict."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import dspy
from dspy.utils.exceptions import AdapterParseError

from assay.errors import ConfigError
from assay.judges.base import Judge, Reading
from assay.judges.calibration import Calibration
from assay.judges.reading import GUARD, READINGS, STYLES, VerdictAdapter, fence, reads_probabilities
from assay.rubrics import JudgeSpec, NoGrade

__all__ = ["PointwiseJudge"]

_HEAT = 0.7  # temperature of several samples of one verdict


class PointwiseJudge(Judge):
    """One question about what is shown, answered by a model.

    Args:
        shows: by default `task_input` and `output`; any fields of one's own.
        reading: `probabilities` (of the next token), `text`, or `auto`: probabilities where the engine gives them.
        style: whether the scale's `words` or `letters` stand for the verdict when probabilities are read.
        reasoning: whether the judge reasons in words before its verdict.
        samples: verdicts asked for each text reading; their shares are the probabilities (self-consistency).
    """

    def __init__(
        self,
        spec: JudgeSpec | Mapping[str, Any] | str,
        *,
        shows: Sequence[str] = ("task_input", "output"),
        reading: str = "auto",
        style: str = "words",
        reasoning: bool = False,
        samples: int = 1,
        model: str | None = None,
        calibration: Calibration | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(spec, shows=shows, model=model, calibration=calibration)
        self.reading, self.style, self.reasoning, self.samples = reading, style, reasoning, samples
        for name, value, known in (("reading", reading, READINGS), ("style", style, STYLES)):
            if value not in known:
                raise ConfigError(f"{name}={value!r} must be one of {', '.join(known)}")
        if samples < 1:
            raise ConfigError(f"samples={samples!r} must be at least 1")
        given: dict[str, Any] = {name: (str, dspy.InputField()) for name in self.shows}
        verdict: dict[str, Any] = {"verdict": (Literal[self.spec.scale], dspy.OutputField())}
        question = f"{self.spec.text} {self._meanings()}{GUARD}"
        if reasoning:
            self.think = dspy.Predict(dspy.Signature({**given, "reasoning": (str, dspy.OutputField(desc="two sentences"))}, question))
            given["reasoning"] = (str, dspy.InputField())
        self.decide = dspy.Predict(dspy.Signature({**given, **verdict}, question))

    @property
    def config(self) -> dict[str, Any]:
        return {**super().config, "reading": self.reading, "style": self.style, "reasoning": self.reasoning, "samples": self.samples}

    def _meanings(self) -> str:
        return "".join(f"{word!r} means: {meaning} " for word, meaning in self.spec.anchors.items())

    def read(self, given: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        shown = {name: fence(given[name]) for name in self.shows if given[name] not in (None, "")}
        if not shown:
            shown = {self.shows[-1]: fence("")}
        lm = dspy.settings.lm
        if lm is None:
            raise ConfigError("no language model is set: use dspy.configure(lm=assay.get_lm(NAME)), or give the judge a model")
        if self.reasoning:
            with dspy.context(adapter=dspy.JSONAdapter()):
                shown["reasoning"] = self.think(**shown).reasoning
        if reads_probabilities(lm, self.reading):
            with dspy.context(adapter=VerdictAdapter(self._keys())):
                found = self.decide(**shown)
            return {**found.probabilities, "tokens": found.tokens}, None
        votes = self._written(shown)
        if self.samples == 1:
            return None, next(iter(votes))
        return {label: votes[label] / self.samples for label in self.labels}, None

    def _keys(self) -> dict[str, str]:
        if self.style == "words":
            return {label: label for label in self.labels}
        return {label: chr(ord("A") + index) for index, label in enumerate(self.labels)}

    def _written(self, shown: Mapping[str, str]) -> Counter[str]:
        votes: Counter[str] = Counter()
        for sample in range(self.samples):
            changed = {"lm": dspy.settings.lm.copy(temperature=_HEAT, rollout_id=sample + 1)} if self.samples > 1 else {}
            votes[self._ask(shown, changed)] += 1
        return votes

    def _ask(self, shown: Mapping[str, str], changed: Mapping[str, Any]) -> str:
        try:
            with dspy.context(adapter=dspy.JSONAdapter(), **changed):
                verdict = self.decide(**shown).verdict
        except AdapterParseError as error:
            raise NoGrade(f"the judge answered {error.lm_response[:200]!r}, not one of {list(self.labels)}") from error
        if verdict not in self.labels:
            raise NoGrade(f"the judge answered {verdict!r}, not one of {list(self.labels)}")
        return str(verdict)
