"""`Refine` compared with voting: the same predictor, dates into ISO 8601.

The verifier sees the text and the draft, no expected answer: it looks for the draft's day, month and year in the text,
and says what the text has instead. Without it, the predictor spends its tokens on up to `SAMPLES` answers, of which the
most frequent one is returned (Adaptive-Consistency). Both sides have the same demonstrations and temperature; a single
answer is measured too.
"""

import calendar
import datetime
import random
import re
from collections.abc import Mapping
from typing import Any

import dspy

import assay
from assay.programs import Agent, Refine, ThinkingPolicy
from assay.rubrics import Criterion, Rubric
from assay.rubrics.criteria import Grade
from claims.storing import Lines, Measured, Setting

SHOWN, TEST, SAMPLES, ROUNDS = 6, 40, 3, 2
FORMS = (
    "{d} {month} {y}",
    "{month} {d}, {y}",
    "{month} {d}{th} {y}",
    "{day}, {d:02} {mon} {y}",
    "the {d}{th} of {month} {y}",
)
LEADS = ("", "Signed on {}.", "The meeting is on {}.", "{}, late in the evening", "Delivered: {}")


class Once(Agent):
    """One answer, or with a policy the most frequent of several."""

    def __init__(self, predictor: dspy.Predict, **options: Any) -> None:
        super().__init__(prompt_format="lean", **options)
        self.predictor = predictor

    def solve(self, **inputs: Any) -> dspy.Prediction:
        return dspy.Prediction(date=self.predictor(**inputs).date)


def written_back(task: Any, prediction: Mapping[str, Any], rollout: Any) -> Grade:
    """The share of day, month and year of the draft that are in the text."""
    text, draft = str(task.inputs["text"]), str(prediction["date"])
    try:
        date = datetime.date.fromisoformat(draft)
    except ValueError:
        return Grade(value=0.0, reason=f"{draft} is no date of the form YYYY-MM-DD")
    numbers = [int(digits) for digits in re.findall(r"\d+", text)]
    words = [word for word in re.findall(r"[A-Za-z]+", text) if word[:3].title() in calendar.month_abbr[1:]]
    wrong = []
    if date.strftime("%b").lower() not in text.lower():
        wrong.append(f"the month {date:%B} is not in the text, which has {', '.join(words)}")
    if missing := [number for number in (date.day, date.year) if number not in numbers]:
        wrong.append(f"{missing[0]} is not in the text, which has {' and '.join(map(str, numbers))}")
    return Grade(value=1 - len(wrong) / 2, reason="; ".join(wrong) or "day, month and year are in the text")


def exact(task: Any, prediction: Mapping[str, Any], rollout: Any) -> float:
    return float(str(prediction["date"]).strip() == task.expected["date"])


def rows(seed: int, count: int) -> list[dict[str, Any]]:
    rng, found = random.Random(f"dates {seed}"), dict[str, str]()
    while len(found) < count:
        date = datetime.date(1970, 1, 1) + datetime.timedelta(days=rng.randrange(20_000))
        ending = "th" if 11 <= date.day <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(date.day % 10, "th")
        parts = {
            "d": date.day,
            "y": date.year,
            "th": ending,
            "month": f"{date:%B}",
            "mon": f"{date:%b}",
            "day": f"{date:%a}",
        }
        text = rng.choice(FORMS).format(**parts)
        found[(rng.choice(LEADS) or "{}").format(text)] = date.isoformat()
    return [{"text": text, "date": date} for text, date in found.items()]


def sides(shown: list[dict[str, Any]], rng: random.Random) -> dict[str, Agent]:
    """The programs that are compared. Demonstrations of a revision are wrong drafts of the shown dates."""
    predictor = dspy.Predict(dspy.Signature("text -> date", "Give the date in the text as YYYY-MM-DD."))
    predictor.demos = list(shown)
    refine = Refine(Once(predictor), written_back, signature=predictor.signature)
    refine.prompt_format = "lean"
    refine.set_parameters({"reasoning_depth": 6 + 2 * (ROUNDS - 1)})
    refine.revise.demos = [demonstration(row, part) for row, part in zip(shown, (0, 1, 2, 0, 1, 2), strict=False)]
    return {
        "once": Once(predictor),
        "before": Once(predictor, policy=ThinkingPolicy(samples=SAMPLES)),
        "after": refine,
    }


def demonstration(row: Mapping[str, Any], part: int) -> dict[str, Any]:
    """A revision of a draft with a wrong year, month or day, with what the verifier says of it."""
    date = datetime.date.fromisoformat(row["date"])
    wrong = (
        date.replace(year=date.year + 7, day=min(date.day, 28)),
        date.replace(month=date.month % 12 + 1, day=min(date.day, 28)),
        date.replace(day=date.day % 28 + 1),
    )[part]
    reason = written_back(assay.Task(id="", inputs=row), {"date": wrong.isoformat()}, None).reason
    return {**row, "draft": f"date: {wrong.isoformat()}", "feedback": reason}


def measure(setting: Setting) -> Measured:
    data = rows(setting.seed, SHOWN + TEST)
    shown, asked = data[:SHOWN], [{**row, "split": "test"} for row in data[SHOWN:]]
    programs, found = sides(shown, random.Random(setting.seed)), {}
    for side, program in programs.items():
        found[side] = assay.evaluate(
            program,
            rubric=Rubric("dates", [Criterion(name="exact", check=exact)]),
            data=asked,
            split="test",
            model=setting.model,
            seed=setting.seed,
            store=setting.scratch / "refinement.db",
            threads=1,
            progress=Lines(),
        ).evaluation
    values: dict[str, Any] = {
        "score": {side: evaluation.scores for side, evaluation in found.items()},
        "tokens": {side: dict(evaluation.tokens) for side, evaluation in found.items()},
        "calls": {side: dict(evaluation.calls) for side, evaluation in found.items()},
    }
    return Measured(values=values, facts={"rounds": ROUNDS, "samples": SAMPLES, "shown": SHOWN})
