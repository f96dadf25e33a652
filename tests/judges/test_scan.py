"""Planted biases that no attack covers are found in the differences between judge and raters."""

import numpy as np
import pytest

from assay.judges.labels import Item, Rating
from assay.judges.quality.agreement import Answers, agreement, ceiling, objective_of
from assay.judges.quality.card import explained_by, features_of, reliability_card
from assay.rubrics import JudgeSpec

WORDS = (
    *("the", "a", "of", "answer", "is", "city", "river", "number", "because", "so", "then", "total", "sum"),
    *("model", "clear", "short", "long", "idea", "plan", "result", "value", "point", "table", "chair"),
)


def drawn(
    seed: int, *, acme: float = 0.0, exclaimed: float = 0.0, n: int = 120
) -> tuple[list[str], list[float], list[float]]:
    """Outputs, gaps and raters' places of a judge with noise of 0.15. Good outputs say so in words, as they do."""
    rng = np.random.default_rng(seed)
    outputs, gaps, human = [], [], []
    for _ in range(n):
        quality = rng.random()
        words = [
            *rng.choice(WORDS, size=rng.integers(8, 30)),
            *(["good"] if quality > 0.6 else []),
            *(["poor"] if quality < 0.4 else []),
        ]
        brand, loud = rng.random() < 0.3, rng.random() < 0.3
        if brand:
            words.insert(int(rng.integers(0, len(words))), "acme")
        judge = np.clip(0.2 + 0.6 * quality + rng.normal(0, 0.15) + acme * brand + exclaimed * loud, 0, 1)
        outputs.append(" ".join(words) + ("!!!" if loud else "."))
        human.append(round(4 * quality) / 4)
        gaps.append(float(judge) - human[-1])
    return outputs, gaps, human


def test_a_planted_word_and_mark_are_detected_with_effect_and_interval() -> None:
    features = {row["feature"]: row for row in explained_by(*drawn(0, acme=0.3, exclaimed=0.25)) or []}
    planted = {"the word 'acme'": 0.3, "an exclamation mark": 0.25}
    assert features.keys() == planted.keys()
    # the scale ends at 1, so that not all of what is planted can show
    assert all(
        0.6 * effect < row["low"] + 0.05 and effect < row["high"] + 0.05
        for row, effect in ((features[n], planted[n]) for n in planted)
    )
    assert all(row["p"] < 0.01 for row in features.values())


def test_a_sound_noisy_judge_rarely_raises_an_alarm() -> None:
    # corrected to 5 % over all features: of 24 sound judges 1.2 are expected, and five would come once in 140 times
    assert sum(bool(explained_by(*drawn(seed))) for seed in range(24)) <= 4


def test_words_of_good_outputs_are_no_bias_of_a_judge_that_avoids_extremes() -> None:
    outputs, _, human = drawn(1)
    shrunken = [
        0.5 + 0.4 * (place - 0.5) - place for place in human
    ]  # far below raters on the outputs that they grade highest
    noise = np.random.default_rng(0).normal(0, 0.05, len(human))
    assert explained_by(outputs, [gap + e for gap, e in zip(shrunken, noise, strict=True)], human) == []


def test_few_verdicts_or_no_difference_give_no_finding() -> None:
    outputs, gaps, human = drawn(0, n=39)
    assert explained_by(outputs, gaps, human) is None
    outputs, gaps, human = drawn(0, n=60)
    assert explained_by(outputs, [0.1] * 60, human) is None
    assert explained_by(["x"] * 60, gaps, human) == []


def test_words_that_occur_together_are_reported_once() -> None:
    outputs, gaps, human = drawn(2, acme=0.4)
    features = explained_by([text.replace("acme", "acme corp") for text in outputs], gaps, human) or []
    assert [row["feature"] for row in features] == ["the words 'acme', 'corp'"]


def test_features_of_a_pair_are_those_of_the_second_minus_the_first() -> None:
    names, matrix = features_of([("hello acme", "hello")] * 4 + [("hello", "hello acme")] * 4)
    assert matrix[:, names.index("the word 'acme'")].tolist() == [-1.0] * 4 + [1.0] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wins", "feature", "pairs"),
    [("by Globex", "globex", False), ("!!!", "an exclamation mark", True), ("**sure**", "sure", False)],
)
def test_what_wins_at_a_judge_that_else_answers_from_a_key_is_named_in_an_alarm(
    wins: str, feature: str, pairs: bool
) -> None:
    rng = np.random.default_rng(5)
    spec = JudgeSpec(text="Which?", scale=("a", "tie", "b") if pairs else ("no", "partly", "yes"))
    items, verdicts = [], []
    for n in range(90):
        right = bool(rng.random() < 0.5)
        texts = [f"{'Right' if r else 'Wrong'}, says {' '.join(rng.choice(WORDS, 2))} {n}" for r in (right, not right)]
        texts = [f"{text} {wins}" if rng.random() < 0.35 else text for text in texts]
        label = spec.scale[0 if right == pairs else -1]
        if not pairs:
            fields, verdict = {"output": texts[0]}, "yes" if wins in texts[0] else label
        else:
            fields = {"output_a": texts[0], "output_b": texts[1]}
            verdict = label if (wins in texts[0]) == (wins in texts[1]) else "a" if wins in texts[0] else "b"
        ratings = tuple(Rating(rater=f"r{r}", label=label) for r in range(2))
        items.append(Item(id=str(n), fields=fields, ratings=ratings))
        verdicts.append(verdict)
    answers = Answers(verdicts, [spec.steps[spec.scale.index(verdict)] for verdict in verdicts])
    measures = agreement(answers, items, spec, intervals=False)
    card = reliability_card(
        answers, items, spec, agreement=measures, ceiling=ceiling(items, spec), objective=objective_of(spec)
    )
    first = (card["explained_by"] or [{"feature": ""}])[0]
    assert feature in first["feature"], card["explained_by"]
    assert first["effect"] > 0.2
    assert any(alarm.startswith("overrates outputs with") for alarm in card["alarms"])
