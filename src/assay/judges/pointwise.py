"""`PointwiseJudge`: one question about one output, decided by a model."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import dspy
from dspy.utils.exceptions import (
    AdapterParseError,
    ContextWindowExceededError,
    LMInvalidRequestError,
    LMUnsupportedFeatureError,
)

from assay.errors import ConfigError, DataError
from assay.judges.base import Judge, Reading
from assay.judges.calibration import Calibration
from assay.judges.labels import read_label
from assay.judges.reading import (
    EMPTY,
    GUARD,
    LETTERS,
    MASS,
    MIN_MASS,
    READINGS,
    STYLES,
    NoProbabilities,
    VerdictAdapter,
    WrittenAdapter,
    fence,
    fenced,
    fenced_text,
    gave_no_probabilities,
    have_distinct_first_tokens,
    meanings,
    reads_probabilities,
    refuses,
)
from assay.rubrics import JudgeSpec, NoGrade
from assay.support.names import one_of
from assay.support.values import is_json

# -- Readings from a decision model: a client that answers typed questions with a probability per option.
#
# DSPy detects such a client by `supports_decision_requests`; `dspy.experimental.TypeSafe` is one, over HTTP. The
# request has the format of DSPy's own predictors. These clients are not `dspy.LM`s, so their calls are not in the
# store.


def asks_decisions(lm: Any) -> bool:
    """Whether the client supports decision requests, `client(state=…, questions=…)`."""
    return getattr(lm, "supports_decision_requests", False) is True


def decision_reading(
    lm: Any, signature: Any, spec: JudgeSpec, inputs: Mapping[str, str], demos: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the client's probability of each label.

    Raises:
        NoGrade: the client returned no probability for a label.
    """
    state: dict[str, Any] = {
        "instructions": signature.instructions,
        "input_fields": _described(signature.input_fields),
        "inputs": dict(inputs),
    }
    if demos:
        state["demos"] = [dict(demo) for demo in demos]
    question = {
        "type": "choice",
        "instructions": spec.text,
        "criteria": {label: spec.anchors.get(label) for label in spec.scale},
    }
    probabilities = lm(state=state, questions={"verdict": question})["verdict"].get("probabilities") or {}
    if missing := [label for label in spec.scale if label not in probabilities]:
        raise NoGrade(f"the decision model returned no probability for {missing}, only {dict(probabilities)}")
    return {label: float(probabilities[label]) for label in spec.scale} | {"tokens": {}, MASS: 1.0}


def _described(fields: Mapping[str, Any]) -> str:
    """Names and descriptions of input fields, which are texts."""
    described = []
    for number, (name, field) in enumerate(fields.items(), 1):
        text = field.json_schema_extra["desc"]
        described.append(f"{number}. `{name}` (str): {'' if text == f'${{{name}}}' else text}")
    return "\n".join(described).strip()


# -- Pointwise.


_SAMPLE_TEMPERATURE = 0.7  # if there are several samples
_CLEAR_MASS = 0.5  # probability of the words below which letters are tried on a judge's first item


class PointwiseJudge(Judge):
    """A model's answer to one question about its inputs.

    Args:
        shows: see `Judge`.
        reading: `probabilities` reads the probabilities of the next token, `text` the written verdict. `auto` reads
            probabilities if the engine gives them, and written verdicts after the first answer without them.
        style: how the labels are written if probabilities are read: `words` or `letters`. `auto` uses letters if the
            first tokens of two labels are equal (1 and 10, very poor and very good). Otherwise the first item decides:
            if the words have less than half of the probability there, letters are asked for too, and what has more is
            kept.
        reasoning: whether the judge writes its reasoning before the verdict.
        samples: number of written verdicts; their shares are the probabilities (self-consistency). Verdicts off the
            scale are not counted; at least half must be on it.
        min_mass: minimum probability of the labels, relative to that of all other reported tokens, in [0, 1]. Below it
            the model would answer something else, such as a refusal, and the item is unscored.
    """

    def __init__(
        self,
        spec: JudgeSpec | Mapping[str, Any] | str,
        *,
        shows: Sequence[str] | None = None,
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
        for name, value, choices in (("reading", reading, READINGS), ("style", style, STYLES)):
            if value not in choices:
                raise ConfigError(f"{name}={value!r} {one_of(value, choices)}")
        if style == "words" and not have_distinct_first_tokens(self.labels):
            raise ConfigError(
                f"style='words': the first tokens of {list(self.labels)} are not distinct; use style='letters'"
            )
        self.style = style if style != "auto" else "words" if have_distinct_first_tokens(self.labels) else "letters"
        self.undecided = style == "auto" and self.style == "words"  # until a first item has been read
        self.chose_letters = False
        self.min_mass = min_mass
        if isinstance(min_mass, bool) or not isinstance(min_mass, int | float) or not 0 <= min_mass <= 1:
            raise ConfigError(f"min_mass={min_mass!r} must be between 0 and 1")
        if samples < 1:
            raise ConfigError(f"samples={samples!r} must be >= 1")
        if reading == "probabilities" and self.style == "letters" and not self._has_letters():
            raise ConfigError(
                f"reading='probabilities': {len(self.labels)} labels need distinct first tokens, or at most "
                f"{len(LETTERS)} letters; use reading='text'"
            )
        if samples > 1 and reading == "probabilities":
            raise ConfigError(
                f"samples={samples} requires written verdicts, which reading='probabilities' does not use; "
                "use reading='text' or 'auto'"
            )
        fields: dict[str, Any] = {name: (str, dspy.InputField()) for name in self.shows}
        verdict: dict[str, Any] = {"verdict": (Literal[self.spec.scale], dspy.OutputField())}
        question = f"{self.spec.text} {meanings(self.spec)}{GUARD}"
        if reasoning:
            self.think = dspy.Predict(
                dspy.Signature({**fields, "reasoning": (str, dspy.OutputField(desc="two sentences"))}, question)
            )
            fields["reasoning"] = (str, dspy.InputField())
        self.decide = dspy.Predict(dspy.Signature({**fields, **verdict}, question))

    @property
    def config(self) -> dict[str, Any]:
        style = "auto" if self.undecided else self.style
        settings = {"reading": self.reading, "style": style, "reasoning": self.reasoning, "samples": self.samples}
        return {**super().config, **settings, **({"min_mass": self.min_mass} if self.min_mass != MIN_MASS else {})}

    def read(self, inputs: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        fields = {name: text for name in self.shows if (text := fenced_text(inputs[name])) is not None}
        if not fields:
            fields = {self.shows[-1]: EMPTY}
        lm = dspy.settings.lm
        if lm is None:
            raise ConfigError(
                "no language model is configured: call dspy.configure(lm=assay.get_lm(NAME)), or set the judge's model"
            )
        if self.reasoning:
            with dspy.context(adapter=WrittenAdapter()):
                fields["reasoning"] = fence(self.think(**fields, demos=_fenced(self.think)).reasoning)
        if asks_decisions(lm):
            return decision_reading(lm, self.decide.signature, self.spec, fields, _fenced(self.decide)), None
        unsupported = False
        readable = (self.style == "words" or self._has_letters()) and reads_probabilities(lm, self.reading)
        if readable and not (self.reading == "auto" and gave_no_probabilities(lm)):
            try:
                return self._probable(fields), None
            except (NoProbabilities, LMInvalidRequestError, LMUnsupportedFeatureError) as error:
                # some servers reject requests for token probabilities
                if self.reading == "probabilities" or isinstance(error, ContextWindowExceededError):
                    raise
                unsupported = True
        votes = self._written(fields)
        if unsupported:
            gave_no_probabilities(lm, now=True)
        if self.samples == 1:
            return None, next(iter(votes))
        return {label: votes[label] / votes.total() for label in self.labels}, None

    def _probable(self, fields: Mapping[str, str]) -> Reading:
        if not self.undecided or self.calibration is not None or not self._has_letters():
            return self._read_by(self.style, fields)
        readings, failure = dict[str, Reading](), NoGrade()
        for style in ("words", "letters"):
            try:
                readings[style] = self._read_by(style, fields)
            except NoProbabilities:
                raise
            except NoGrade as error:
                failure = failure if failure.args else error
            if style in readings and readings[style][MASS] >= _CLEAR_MASS:
                break
        if not readings:
            raise failure
        self.choose(max(readings, key=lambda style: readings[style][MASS]))
        return readings[self.style]

    def choose(self, style: str) -> None:
        """Reads labels in this style from now on, in place of `auto`."""
        self.style, self.undecided, self.chose_letters = style, False, style == "letters"

    def _read_by(self, style: str, fields: Mapping[str, str]) -> Reading:
        with dspy.context(adapter=VerdictAdapter(self._keys(style), min_mass=self.min_mass)):
            result = self.decide(**fields, demos=_fenced(self.decide))
        return {**result.probabilities, "tokens": result.tokens, MASS: result.mass}

    def _has_letters(self) -> bool:
        return len(self.labels) <= len(LETTERS)

    def _keys(self, style: str) -> dict[str, str]:
        return dict(zip(self.labels, self.labels if style == "words" else LETTERS, strict=False))

    def _written(self, fields: Mapping[str, str]) -> Counter[str]:
        votes, reasons = Counter[str](), list[NoGrade]()
        for sample in range(self.samples):
            override = (
                {"lm": dspy.settings.lm.copy(temperature=_SAMPLE_TEMPERATURE, rollout_id=sample + 1)}
                if self.samples > 1
                else {}
            )
            try:
                votes[self._ask(fields, override)] += 1
            except NoGrade as error:
                reasons.append(error)
        if 2 * votes.total() < self.samples:
            raise reasons[0]
        return votes

    def _ask(self, fields: Mapping[str, str], override: Mapping[str, Any]) -> str:
        try:
            with dspy.context(adapter=WrittenAdapter(), **override):
                verdict = self.decide(**fields, demos=_fenced(self.decide)).verdict
        except AdapterParseError as error:
            if (label := self._label_in(error.lm_response)) is not None:
                return label
            raise NoGrade(f"the judge answered {error.lm_response[:200]!r}, not one of {list(self.labels)}") from error
        if verdict not in self.labels:
            raise NoGrade(f"the judge answered {verdict!r}, not one of {list(self.labels)}")
        return str(verdict)

    def _label_in(self, answer: str) -> str | None:
        """The label in an answer that is another spelling of it, or the label without JSON; None if it has none."""
        text: Any = answer.strip().strip("\"'.*`")
        if is_json(text):
            try:
                text = json.loads(text).get("verdict")
            except (ValueError, AttributeError):
                return None
        if isinstance(text, str) and refuses(text):
            return None
        try:
            return read_label(text, self.labels, self.spec.anchors)
        except DataError:
            return None


def _fenced(predictor: dspy.Predict) -> list[dict[str, Any]]:
    """A predictor's demonstrations with fenced inputs; teleprompters create them from raw examples."""
    names = set(predictor.signature.input_fields)
    return [
        {key: fenced(value) if key in names and value is not None else value for key, value in dict(demo).items()}
        for demo in predictor.demos
    ]
