"""A program compiled against a rubric with a judge and code checks; the embedded model is both agent and judge.

The judge's question is a message's mood. It is compiled against the raters of VADER's tweets (RATINGS as for
`judges.py`), and the same program is compiled against the rubric with the compiled judge and with the uncompiled one.
Both are reported on sealed tasks by their own rubric, and by a measure in code that no compile saw: the rule-based
lexicon of vaderSentiment (`pip install vaderSentiment`), whose ratings are of words, not of these tweets. A gain that
only pleases the judge is seen.
"""

import argparse
import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import dspy
from judges import SCALE, Lines, ratings, write_labels

import assay
from assay.rubrics import Criterion, JudgeSpec, Rubric

QUESTION = "What is the sentiment of the text?"
TOPICS = (
    """
rain,bread,trains,Monday,a library,snow,homework,the sea,a cat,breakfast,a bus stop,winter,tea,a garden,the city
a new job,school,music,a bicycle,the news,a phone,dinner,a walk,the moon,football,a friend,the market,a river,paint
a letter,sleep,a hotel,lunch,wind,a bridge,coffee,a film,carrots,apples,a birthday,the office,a dog,cooking,shoes
a mountain,an exam,the weekend,paper,a kitchen,stars,a museum,travel,summer,a lamp,the doctor,a queue,water,a song
the bakery,a boat,autumn,a neighbour,chess,laundry,a window,a map,spring,the gym,a clock,a farm,soup,the airport
a book,rice,a chair,a concert,traffic,cheese,a painting,the forest,a door,a horse,history,a game,the bank,a photo
fog,a teacher,the beach,a watch,lemons,a tunnel,the theatre,a storm,pens,a picnic,the harbour,a poem,clouds,a key
""".strip()
    .replace("\n", ",")
    .split(",")
)


@functools.cache
def analyzer() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


class Writer(dspy.Module):  # type: ignore[misc]
    """Writes a message. Nothing tells it in what mood."""

    def __init__(self) -> None:
        super().__init__()
        self.write = dspy.Predict(dspy.Signature("topic -> message", "Write one short sentence about the topic."))

    def forward(self, topic: str) -> Any:
        return self.write(topic=topic)


def on_topic(task: Any, prediction: dict[str, Any], rollout: Any) -> bool:
    """Whether the message contains the topic's last word."""
    return str(task.inputs["topic"]).split()[-1].lower()[:4] in str(prediction["message"]).lower()


def short(task: Any, prediction: dict[str, Any], rollout: Any) -> bool:
    return 3 <= len(str(prediction["message"]).split()) <= 30


def lexicon(task: Any, prediction: dict[str, Any], rollout: Any) -> float:
    """VADER's compound score, from -1 to 1, as a grade."""
    return (float(analyzer().polarity_scores(str(prediction["message"]))["compound"]) + 1) / 2


def positive(task: Any, prediction: dict[str, Any], rollout: Any) -> bool:
    """VADER's own convention: compound at least 0.05."""
    return lexicon(task, prediction, rollout) >= 0.525


parser = argparse.ArgumentParser()
parser.add_argument("ratings", type=Path)
parser.add_argument("--model", default="embedded/smollm2-135m")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--max-search-calls", type=int, default=200)
parser.add_argument("--threshold", type=float, default=0.65, help="score from which a run is a success to learn from")
arguments = parser.parse_args()

unseen = Rubric(
    "lexicon", [Criterion(name="lexicon", check=lexicon), Criterion(name="positive", weight=1e-6, check=positive)]
)
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    common: dict[str, Any] = {
        "model": arguments.model,
        "store": folder / ".assay" / "a.db",
        "progress": Lines(),
        "seed": arguments.seed,
    }
    labels = folder / "labels.jsonl"
    write_labels(labels, ratings(arguments.ratings, "tweets"), 200, arguments.seed)
    judged = assay.compile_judge(QUESTION, labels=str(labels), scale=SCALE, optimizer="calibrate", **common)
    (folder / "topics.jsonl").write_text("\n".join(json.dumps({"topic": topic}) for topic in TOPICS))
    figures: dict[str, Any] = {
        "judge": {key: judged.to_dict()["test"][key]["accuracy"] for key in ("baseline", "compiled")}
    }
    for kind, spec in (
        ("compiled", JudgeSpec(use=str(judged.artifact))),
        ("uncompiled", JudgeSpec(text=QUESTION, scale=tuple(SCALE))),
    ):
        criteria = [
            Criterion(name="mood", weight=3, judge=spec),
            Criterion(name="on_topic", check=on_topic),
            Criterion(name="short", check=short),
        ]
        settings: dict[str, Any] = {
            "data": str(folder / "topics.jsonl"),
            "sizes": {"train": 30, "val": 20, "gate": 20, "test": 30},
            **common,
        }
        report = assay.compile(
            Writer(),
            rubric=Rubric("message", criteria),
            max_search_calls=arguments.max_search_calls,
            out=folder / kind,
            threshold=arguments.threshold,
            **settings,
        )
        data = report.to_dict()
        entry = {
            "winner": data["winner"],
            "replaces": data["replaces"],
            "search_calls": data["search_calls"],
            "test": data["test"],
        }
        for side, program in (("baseline", Writer()), ("compiled", report.program)):
            measured = assay.evaluate(program, rubric=unseen, split="test", **settings).to_dict()["result"]
            entry[f"unseen_{side}"] = {**measured["criteria"], "interval": measured["interval"]}
        figures[kind] = entry
        print(f"{kind}: {entry}", file=sys.stderr, flush=True)
print(json.dumps(figures, default=str))
