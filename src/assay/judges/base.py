"""`Judge`, the base class of judges: a DSPy program that returns a verdict on a scale with confidence and grade."""

import asyncio
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar

import dspy

from assay.errors import AssayError, ConfigError
from assay.judges.calibration import Calibration
from assay.models import Thinking, sibling
from assay.models.roles import Endpoint
from assay.rubrics import JudgeSpec, NoGrade
from assay.rubrics.criteria import ORIGINS, SHOWS, is_shown_name
from assay.support.scrubbing import error_text
from assay.support.values import json_text

# the model's output before calibration: by default probabilities by label, and `tokens`
Reading = Mapping[str, Any]


class Judge(dspy.Module):  # type: ignore[misc]
    """`judge(task_input=…, output=…)` returns `verdict`, `probabilities`, `confidence`, `value` and `raw`.

    `probabilities` sum to one over the scale; None if the model gives none. `confidence` is the probability of the
    verdict. `value` is the expected grade in [0, 1]; None on a scale without grades. `raw` is the reading before
    calibration.

    A subclass implements `read`. Rubrics, compile, card and audit then work with it.

    Args:
        spec: the question and its scale: a `JudgeSpec`, a mapping of its fields, or the question as text.
        shows: names of the inputs that the judge sees, in order; by default those of the spec, otherwise `task_input`
            and `output`. In a rubric they are filled by `assay.judges.questions.shown_values`.
        model: name of the judge's model; None uses the model configured in DSPy.
        calibration: fitted to human labels by `assay judge compile`; None leaves the probabilities unchanged.
    Raises:
        NoGrade: when called, if the model's answer has no verdict on the scale.
    """

    default_shows: ClassVar[tuple[str, ...]] = SHOWS

    def __init__(
        self,
        spec: JudgeSpec | Mapping[str, Any] | str,
        *,
        shows: Sequence[str] | None = None,
        model: str | None = None,
        calibration: Calibration | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        given = make_spec(spec)
        self.shows = tuple(given.shows or self.default_shows) if shows is None else tuple(shows)
        self.spec, self.model = replace(given, shows=()), model
        self.endpoint: Endpoint | None = None  # of `model`; None uses that of the model configured in DSPy
        self.thinking: Thinking | None = None  # budget of `model`
        self.loaded_from = ""  # folder of the artifact, if it is a compiled judge
        if not self.shows or not all(map(is_shown_name, self.shows)):
            raise ConfigError(
                f"shows={list(self.shows)!r} must be a non-empty list of field names: NAME, or ORIGIN.NAME with the "
                f"origin {', '.join(ORIGINS)}"
            )
        self.calibration = calibration if isinstance(calibration, Calibration | None) else Calibration(**calibration)

    @property
    def config(self) -> dict[str, Any]:
        """The constructor's arguments, JSON-serializable. An artifact rebuilds the judge from them."""
        return {
            "spec": self.spec.to_dict(),
            "shows": list(self.shows),
            "model": self.model,
            "calibration": asdict(self.calibration) if self.calibration else None,
        }

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the scale, worst first."""
        return self.spec.scale

    @property
    def compares(self) -> bool:
        """Whether the judge compares pairs: its scale is the first output, a tie, the second output."""
        return {"output_a", "output_b"} <= set(self.shows)

    def read(self, inputs: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        """Queries the model. Returns a reading (by default probabilities by label), or None and a verdict.

        Raises:
            NoGrade: the model gave neither.
        """
        raise NotImplementedError

    def judged(self, reading: Reading | None, verdict: str | None = None) -> dspy.Prediction:
        """Converts the result of `read` to a prediction: calibrated probabilities, verdict, confidence and value."""
        if reading is None:
            if verdict not in self.labels:
                raise NoGrade(f"the judge returned {verdict!r}, not one of {list(self.labels)}")
            value = self.spec.grade(str(verdict)) if self.spec.graded else None
            return dspy.Prediction(verdict=verdict, probabilities=None, raw=None, confidence=None, value=value)
        return self._prediction(reading, *self._calibrated(reading))

    def _calibrated(self, reading: Reading) -> tuple[dict[str, float], str]:
        raw: list[Any] = [reading.get(label) for label in self.labels]
        if not all(isinstance(p, int | float) and math.isfinite(p) and p >= 0 for p in raw) or not math.fsum(raw) > 0:
            raise NoGrade(
                f"the judge returned the probabilities {dict(zip(self.labels, raw, strict=True))}: "
                "they must be numbers >= 0, at least one of them above 0"
            )
        total = math.fsum(raw)
        normalized = {**reading, **{label: p / total for label, p in zip(self.labels, raw, strict=True)}}
        if self.calibration:
            return self.calibration.apply(normalized, self.spec)
        probabilities = {label: normalized[label] for label in self.labels}
        return probabilities, max(self.labels, key=lambda label: probabilities[label])

    def _prediction(self, reading: Reading, probabilities: Mapping[str, float], verdict: str) -> dspy.Prediction:
        value = None
        if self.spec.graded:
            expected = math.fsum(p * self.spec.grade(label) for label, p in probabilities.items())
            value = min(1.0, max(0.0, expected))
        orders = {"orders": tuple(reading["orders"])} if reading.get("orders") else {}
        return dspy.Prediction(
            verdict=verdict,
            probabilities=dict(probabilities),
            raw=reading,
            confidence=probabilities[verdict],
            value=value,
            **orders,
        )

    def fit_rows(self, reading: Reading, shares: Mapping[str, float]) -> list[tuple[Reading, Mapping[str, float]]]:
        """Rows from which a calibration is fitted for one item: readings with the raters' share of each label."""
        return [(reading, shares)]

    def forward(self, **inputs: Any) -> dspy.Prediction:
        if missing := [name for name in self.shows if name not in inputs]:
            raise ConfigError(f"the judge sees {list(self.shows)}; {missing} is missing")
        if self.model is None:
            return self.judged(*self.read(inputs))
        lm = sibling(dspy.settings.lm, self.model, self.endpoint)
        with dspy.context(lm=lm if self.thinking is None else lm.copy(thinking=self.thinking)):
            return self.judged(*self.read(inputs))

    async def aforward(self, **inputs: Any) -> dspy.Prediction:
        return await asyncio.to_thread(self.forward, **inputs)


def rebuilt(kind: type[Judge], config: Mapping[str, Any]) -> Judge:
    """Creates a judge of a class from its `config`.

    A custom judge's constructor may lack some of the entries, for example because the class fixes its question. Of
    these, `calibration` and `model` are set afterwards; the others must equal the judge's own.

    Raises:
        ConfigError: the class cannot be created from the config.
    """
    parameters = inspect.signature(kind.__init__).parameters.values()  # inspect on the class shows DSPy's metaclass
    passed = (
        dict(config)
        if any(p.kind is p.VAR_KEYWORD for p in parameters)
        else {p.name: config[p.name] for p in parameters if p.name in config}
    )
    try:
        try:
            judge = kind(**passed)
        except TypeError:
            judge, passed = kind(), {}  # type: ignore[call-arg]  # it has **options and sets some of them itself
    except TypeError as error:
        name = kind.__qualname__
        raise ConfigError(
            f"{name} cannot be built from {sorted(config)}: {error}. "
            f"Give its arguments defaults, or put them in {name}.config"
        ) from None
    calibration = config.get("calibration")
    judge.calibration = calibration if isinstance(calibration, Calibration | None) else Calibration(**calibration)
    judge.model = config.get("model", judge.model)
    if getattr(judge, "undecided", False) and config.get("style", "auto") != "auto":
        judge.choose(config["style"])  # a pointwise judge, after its first item
    differs = [
        name
        for name, now in judge.config.items()
        if name in config
        and name not in {"calibration", "model", *passed}
        and json_text(now) != json_text(config[name])
    ]
    if differs:
        raise ConfigError(
            f"{kind.__qualname__} has no argument {', '.join(differs)}, so it cannot be built with a value other than "
            "its own"
        )
    return judge


def attempt(judge: Judge, inputs: Mapping[str, Any]) -> tuple[dspy.Prediction | None, str]:
    """Calls a judge with its part of the inputs. Returns its prediction, or None and the reason of the failure.

    Raises:
        AssayError: an error that the user must fix, such as a missing package or a wrong setting.
    """
    try:
        return judge(**{name: inputs[name] for name in judge.shows}), ""
    except AssayError:
        raise
    except Exception as error:
        return None, error_text(error)


def make_spec(spec: JudgeSpec | Mapping[str, Any] | str) -> JudgeSpec:
    """Converts a question or a mapping of fields to a `JudgeSpec`."""
    if isinstance(spec, JudgeSpec):
        return spec
    fields: dict[str, Any] = {"text": spec} if isinstance(spec, str) else dict(spec)
    fields |= {name: tuple(fields[name]) for name in ("scale", "shows") if name in fields}
    return JudgeSpec(**fields)
