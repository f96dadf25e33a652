"""What every judge is: a DSPy program with a scale that says a verdict, how sure it is of it, and what it is worth."""

import asyncio
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import dspy

from assay.errors import AssayError, ConfigError
from assay.judges.calibration import Calibration
from assay.models import sibling
from assay.models.roles import Endpoint
from assay.rubrics import JudgeSpec, NoGrade
from assay.scrubbing import said

__all__ = ["Judge", "Reading", "attempt", "make_spec", "rebuilt"]

Reading = Mapping[str, Any]  # what was read from the model before any calibration: by default probabilities by label, and `tokens`


class Judge(dspy.Module):  # type: ignore[misc]
    """`judge(task_input=…, output=…)` gives `verdict`, `probabilities`, `confidence` and `value`.

    `probabilities` sum to one over the scale, and are None where nothing gives any; `confidence` is that of the verdict;
    `value` is the expected grade in [0, 1], None on a scale without grades. `raw` is what they were calibrated from.

    A judge of one's own needs `read`, which asks whatever it asks; everything else (rubrics, compile, card, audit) works
    with it then.

    Args:
        spec: the question and its scale, a `JudgeSpec`, its fields, or the question alone.
        shows: the names of what the judge sees, in order.
        model: the model that judges, by name; the model that is set in DSPy where None.
        calibration: fitted to people's labels by `assay judge compile`; None leaves probabilities as they are read.

    Raises, when called:
        NoGrade: no verdict on the scale was given.
    """

    def __init__(
        self,
        spec: JudgeSpec | Mapping[str, Any] | str,
        *,
        shows: Sequence[str] = ("task_input", "output"),
        model: str | None = None,
        calibration: Calibration | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.shows, self.model = make_spec(spec), tuple(shows), model
        self.endpoint: Endpoint | None = None  # of `model`; that of the model set in DSPy where None
        if not self.shows or not all(name.isidentifier() for name in self.shows):
            raise ConfigError(f"a judge needs names of what it sees; got shows={list(self.shows)!r}")
        self.calibration = calibration if isinstance(calibration, Calibration | None) else Calibration(**calibration)

    @property
    def config(self) -> dict[str, Any]:
        """The constructor's arguments as JSON: what an artifact builds the judge from."""
        return {
            "spec": {**asdict(self.spec), "scale": list(self.spec.scale)}, "shows": list(self.shows), "model": self.model,
            "calibration": asdict(self.calibration) if self.calibration else None,
        }  # fmt: skip

    @property
    def labels(self) -> tuple[str, ...]:
        return self.spec.scale

    @property
    def compares(self) -> bool:
        """Whether it judges pairs: two outputs, and a scale from the first over a tie to the second."""
        return {"output_a", "output_b"} <= set(self.shows)

    def read(self, given: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        """Asks about what is shown: a reading, by default probabilities by label, or a verdict without any.

        Raises:
            NoGrade: neither came.
        """
        raise NotImplementedError

    def judged(self, reading: Reading | None, verdict: str | None = None) -> dspy.Prediction:
        """What is said once the model has been read: calibrated probabilities, verdict, confidence and value."""
        if reading is None:
            if verdict not in self.labels:
                raise NoGrade(f"the judge said {verdict!r}, not one of {list(self.labels)}")
            value = self.spec.grade(str(verdict)) if self.spec.graded else None
            return dspy.Prediction(verdict=verdict, probabilities=None, raw=None, confidence=None, value=value)
        return self._said(reading, *self._calibrated(reading))

    def _calibrated(self, reading: Reading) -> tuple[dict[str, float], str]:
        given: list[Any] = [reading.get(label) for label in self.labels]
        if not all(isinstance(p, int | float) and math.isfinite(p) and p >= 0 for p in given) or not math.fsum(given) > 0:
            raise NoGrade(
                f"the judge gave {dict(zip(self.labels, given, strict=True))} for probabilities: they must be numbers of at least 0, not all 0"
            )
        total = math.fsum(given)
        sound = {**reading, **{label: p / total for label, p in zip(self.labels, given, strict=True)}}
        if self.calibration:
            return self.calibration.apply(sound, self.spec)
        return {label: sound[label] for label in self.labels}, max(self.labels, key=lambda label: sound[label])

    def _said(self, reading: Reading, final: Mapping[str, float], chosen: str) -> dspy.Prediction:
        value = math.fsum(p * self.spec.grade(label) for label, p in final.items()) if self.spec.graded else None
        value = None if value is None else min(1.0, max(0.0, value))
        orders = {"orders": tuple(reading["orders"])} if reading.get("orders") else {}
        return dspy.Prediction(verdict=chosen, probabilities=dict(final), raw=reading, confidence=final[chosen], value=value, **orders)

    def fit_rows(self, reading: Reading, shares: Mapping[str, float]) -> list[tuple[Reading, Mapping[str, float]]]:
        """What a calibration learns from one item: the reading, and the shares of people who gave each label."""
        return [(reading, shares)]

    def forward(self, **given: Any) -> dspy.Prediction:
        if missing := [name for name in self.shows if name not in given]:
            raise ConfigError(f"the judge sees {list(self.shows)}; {missing} is missing")
        if self.model is None:
            return self.judged(*self.read(given))
        with dspy.context(lm=sibling(dspy.settings.lm, self.model, self.endpoint)):
            return self.judged(*self.read(given))

    async def aforward(self, **given: Any) -> dspy.Prediction:
        return await asyncio.to_thread(self.forward, **given)


def rebuilt(kind: type[Judge], config: Mapping[str, Any]) -> Judge:
    """A judge of this class with the arguments in `config`. What the constructor does not take (many a judge of one's own says its
    question itself and takes nothing) must be one of the fields that every judge has, and is set afterwards.

    Raises:
        ConfigError: the class cannot be built so; the message says what its constructor lacks.
    """
    takes = inspect.signature(kind.__init__).parameters.values()  # the class's own signature is DSPy's metaclass's
    passed = dict(config) if any(p.kind is p.VAR_KEYWORD for p in takes) else {p.name: config[p.name] for p in takes if p.name in config}
    try:
        try:
            judge = kind(**passed)
        except TypeError:
            judge, passed = kind(), {}  # type: ignore[call-arg]  # it takes **options and says some of them itself
    except TypeError as error:
        name = kind.__qualname__
        raise ConfigError(
            f"{name} cannot be built from {sorted(config)}: {error}. Give its arguments defaults, or put them in {name}.config"
        ) from None
    calibration = config.get("calibration")
    judge.calibration = calibration if isinstance(calibration, Calibration | None) else Calibration(**calibration)
    judge.model = config.get("model", judge.model)
    differs = [
        name for name, now in judge.config.items()
        if name in config and name not in {"calibration", "model", *passed} and json.dumps(now, default=str) != json.dumps(config[name], default=str)
    ]  # fmt: skip
    if differs:
        raise ConfigError(f"{kind.__qualname__} takes no {', '.join(differs)}, so it cannot be built with other than its own")
    return judge


def attempt(judge: Judge, given: Mapping[str, Any]) -> tuple[dspy.Prediction | None, str]:
    """What a judge says of its part of what is given, or None and why it said nothing. What the user must mend is raised."""
    try:
        return judge(**{name: given[name] for name in judge.shows}), ""
    except AssayError:  # a missing package, a setting: no other judge makes up for it
        raise
    except Exception as error:
        return None, said(error)


def make_spec(spec: JudgeSpec | Mapping[str, Any] | str) -> JudgeSpec:
    if isinstance(spec, JudgeSpec):
        return spec
    fields: dict[str, Any] = {"text": spec} if isinstance(spec, str) else dict(spec)
    if "scale" in fields:
        fields["scale"] = tuple(fields["scale"])
    return JudgeSpec(**fields)
