"""A judge of one output: one question, a scale, and a reading of the model's verdict."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import dspy
from dspy.utils.exceptions import AdapterParseError, ContextWindowExceededError, LMInvalidRequestError, LMUnsupportedFeatureError

from assay.errors import ConfigError
from assay.judges.base import Judge, Reading
from assay.judges.calibration import Calibration
from assay.judges.decision import asks_decisions, decision_reading
from assay.judges.reading import (
    EMPTY,
    GUARD,
    MASS,
    MIN_MASS,
    READINGS,
    STYLES,
    NoProbabilities,
    VerdictAdapter,
    fence,
    fenced,
    gave_no_probabilities,
    meanings,
    reads_probabilities,
    shown_as,
    tell_apart,
)  # fmt: skip
from assay.rubrics import JudgeSpec, NoGrade

__all__ = ["PointwiseJudge"]

_HEAT = 0.7  # temperature of several samples of one verdict


class PointwiseJudge(Judge):
    """One question about what is shown, answered by a model.

    Args:
        shows: by default `task_input` and `output`; any fields of one's own.
        reading: `probabilities` (of the next token), `text`, or `auto`: probabilities where the engine gives them, and the written
            verdict from the first answer on that has none.
        style: whether the scale's `words` or `letters` stand for the verdict when probabilities are read; `auto`: letters where the
            first token of a word cannot tell it from another (1 and 10, very poor and very good).
        reasoning: whether the judge reasons in words before its verdict.
        samples: verdicts asked for each text reading; their shares are the probabilities (self-consistency). Those that are off
            the scale do not count; under half of them, nothing is said.
        min_mass: least probability on the scale, as a share of what all other tokens have together, in [0, 1]. Below it the model
            was about to say something else, such as a refusal, and there is no verdict.
    """

    def __init__(
        self,
        spec: JudgeSpec | Mapping[str, Any] | str,
        *,
        shows: Sequence[str] = ("task_input", "output"),
        reading: str = "auto",
        style: str = "auto",
        reasoning: bool = False,
        samples: int = 1,
        min_mass: float = MIN_MASS,
        model: str | None = None,
        calibration: Calibration | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(spec, shows=shows, model=model, calibration=calibration)
        self.reading, self.reasoning, self.samples = reading, reasoning, samples
        for name, value, known in (("reading", reading, READINGS), ("style", style, STYLES)):
            if value not in known:
                raise ConfigError(f"{name}={value!r} must be one of {', '.join(known)}")
        if style == "words" and not tell_apart(self.labels):
            raise ConfigError(f"style='words': the first token cannot tell {list(self.labels)} apart; use style='letters'")
        self.style = style if style != "auto" else "words" if tell_apart(self.labels) else "letters"
        self.min_mass = min_mass
        if isinstance(min_mass, bool) or not isinstance(min_mass, int | float) or not 0 <= min_mass <= 1:
            raise ConfigError(f"min_mass={min_mass!r} must be between 0 and 1")
        if samples < 1:
            raise ConfigError(f"samples={samples!r} must be at least 1")
        if samples > 1 and reading == "probabilities":
            raise ConfigError(f"samples={samples} are of written verdicts, and reading='probabilities' asks for none; use reading='text' or 'auto'")
        given: dict[str, Any] = {name: (str, dspy.InputField()) for name in self.shows}
        verdict: dict[str, Any] = {"verdict": (Literal[self.spec.scale], dspy.OutputField())}
        question = f"{self.spec.text} {meanings(self.spec)}{GUARD}"
        if reasoning:
            self.think = dspy.Predict(dspy.Signature({**given, "reasoning": (str, dspy.OutputField(desc="two sentences"))}, question))
            given["reasoning"] = (str, dspy.InputField())
        self.decide = dspy.Predict(dspy.Signature({**given, **verdict}, question))

    @property
    def config(self) -> dict[str, Any]:
        own = {"reading": self.reading, "style": self.style, "reasoning": self.reasoning, "samples": self.samples}
        return {**super().config, **own, **({"min_mass": self.min_mass} if self.min_mass != MIN_MASS else {})}

    def read(self, given: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        shown = {name: text for name in self.shows if (text := shown_as(given[name])) is not None}
        if not shown:
            shown = {self.shows[-1]: EMPTY}
        lm = dspy.settings.lm
        if lm is None:
            raise ConfigError("no language model is set: use dspy.configure(lm=assay.get_lm(NAME)), or give the judge a model")
        if self.reasoning:
            with dspy.context(adapter=dspy.JSONAdapter()):
                shown["reasoning"] = fence(self.think(**shown, demos=_fenced(self.think)).reasoning)
        if asks_decisions(lm):
            return decision_reading(lm, self.decide.signature, self.spec, shown, _fenced(self.decide)), None
        refused = False
        if reads_probabilities(lm, self.reading) and not (self.reading == "auto" and gave_no_probabilities(lm)):
            try:
                return self._probable(shown), None
            except (NoProbabilities, LMInvalidRequestError, LMUnsupportedFeatureError) as error:  # a server may refuse to be asked for them
                if self.reading == "probabilities" or isinstance(error, ContextWindowExceededError):
                    raise
                refused = True
        votes = self._written(shown)
        if refused:
            gave_no_probabilities(lm, now=True)
        if self.samples == 1:
            return None, next(iter(votes))
        return {label: votes[label] / votes.total() for label in self.labels}, None

    def _probable(self, shown: Mapping[str, str]) -> Reading:
        with dspy.context(adapter=VerdictAdapter(self._keys(), min_mass=self.min_mass)):
            found = self.decide(**shown, demos=_fenced(self.decide))
        return {**found.probabilities, "tokens": found.tokens, MASS: found.mass}

    def _keys(self) -> dict[str, str]:
        if self.style == "words":
            return {label: label for label in self.labels}
        return {label: chr(ord("A") + index) for index, label in enumerate(self.labels)}

    def _written(self, shown: Mapping[str, str]) -> Counter[str]:
        votes, reasons = Counter[str](), list[NoGrade]()
        for sample in range(self.samples):
            changed = {"lm": dspy.settings.lm.copy(temperature=_HEAT, rollout_id=sample + 1)} if self.samples > 1 else {}
            try:
                votes[self._ask(shown, changed)] += 1
            except NoGrade as error:
                reasons.append(error)
        if 2 * votes.total() < self.samples:
            raise reasons[0]
        return votes

    def _ask(self, shown: Mapping[str, str], changed: Mapping[str, Any]) -> str:
        try:
            with dspy.context(adapter=dspy.JSONAdapter(), **changed):
                verdict = self.decide(**shown, demos=_fenced(self.decide)).verdict
        except AdapterParseError as error:
            bare = {label.casefold(): label for label in self.labels}.get(error.lm_response.strip().strip("\"'.*`").casefold())
            if bare is not None:  # the word alone, without the JSON around it
                return bare
            raise NoGrade(f"the judge answered {error.lm_response[:200]!r}, not one of {list(self.labels)}") from error
        if verdict not in self.labels:
            raise NoGrade(f"the judge answered {verdict!r}, not one of {list(self.labels)}")
        return str(verdict)


def _fenced(predictor: dspy.Predict) -> list[dict[str, Any]]:
    """A predictor's demonstrations, what they show fenced like what is judged: teleprompters make them of raw examples."""
    names = set(predictor.signature.input_fields)
    return [{key: fenced(value) if key in names and value is not None else value for key, value in dict(demo).items()} for demo in predictor.demos]
