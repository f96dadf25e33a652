"""The scripted in-context learner keeps to its rule."""

from typing import Any

import dspy
import pytest

from assay.errors import ConfigError
from assay.programs import make_adapter
from assay.testing import scripted_lm
from rigs.learner import HARMFUL, HELPFUL, InContextLearner, LearnerTask, quality


def margin(
    learner: InContextLearner,
    demonstrations: list[tuple[str, str]],
    instruction: str = "",
    style: str = "chat",
    count: int = 150,
) -> float:
    """Mean score of the true label above the best other one."""
    total = 0.0
    for task in learner.tasks(count, seed=5):
        scores = learner.scores(task.inputs["text"], demonstrations, instruction, style)
        true = scores.pop(task.expected["label"])
        total += true - max(scores.values())
    return total / count


def pairs(learner: InContextLearner, count: int) -> list[tuple[str, str]]:
    return [(task.inputs["text"], task.expected["label"]) for task in learner.tasks(count, seed=1)]


def test_more_demonstrations_that_cover_the_labels_help() -> None:
    learner = InContextLearner("intents", seed=1)
    demonstrations = pairs(learner, 48)
    assert (
        margin(learner, demonstrations)
        > margin(learner, demonstrations[:12])
        > margin(learner, [pair for pair in demonstrations if pair[1] == demonstrations[0][1]])
    )


def test_similar_demonstrations_help_more_than_others() -> None:
    learner = InContextLearner("intents", seed=1)
    task = learner.tasks(1, seed=5)[0]
    text, label = task.inputs["text"], task.expected["label"]
    other = next(
        text
        for text, other_label in pairs(learner, 80)
        if other_label == label and not set(text.split()) & set(task.inputs["text"].split())
    )
    others = [pair for pair in pairs(learner, 12) if pair[1] != label][:4]
    near = learner.scores(text, [*others, (text + " more", label)], "", "chat")
    far = learner.scores(text, [*others, (other, label)], "", "chat")
    assert near[label] > far[label]


def test_a_helpful_instruction_helps_and_a_harmful_one_harms() -> None:
    learner = InContextLearner(LearnerTask(labels=4, skill=2.0, obedience=1.0), seed=0)
    assert quality(" ".join(HELPFUL[:3])) == 1.0
    assert quality(" ".join(HARMFUL[:3])) == -1.0
    assert margin(learner, [], HELPFUL[0]) > margin(learner, []) > margin(learner, [], HARMFUL[0])


def test_the_learners_best_format_follows_from_the_seed() -> None:
    best = {
        max(learner.clarity, key=learner.clarity.__getitem__)
        for learner in (InContextLearner(seed=seed) for seed in range(12))
    }
    assert best == {"chat", "json", "lean"}


@pytest.mark.parametrize("prompt_format", ["chat", "json", "lean", "xml"])
def test_the_scripted_learner_reads_and_writes_every_prompt_format(prompt_format: str) -> None:
    learner = InContextLearner("topics", seed=2)
    learner.slips = dict.fromkeys(learner.slips, 0.0)
    tasks = learner.tasks(20)
    demonstrations = [(task.inputs["text"], task.expected["label"]) for task in tasks[:3]]
    program = learner.program()
    program.demos = [dspy.Example(**task.inputs, **task.expected) for task in tasks[:3]]
    with dspy.context(lm=scripted_lm(learner).copy(temperature=0.0), adapter=make_adapter(prompt_format)):
        labels = [program(**dict(task.inputs)).label for task in tasks[3:]]
    scores = [learner.scores(task.inputs["text"], demonstrations, "", prompt_format) for task in tasks[3:]]
    assert labels == [
        max(label_scores, key=label_scores.__getitem__) for label_scores in scores
    ]  # it saw all three demonstrations, and nothing else


def test_the_same_call_gets_the_same_answer_and_temperature_adds_noise() -> None:
    def answers(temperature: float) -> list[str]:
        learner = InContextLearner("rules", seed=4)
        tasks = learner.tasks(60)
        with dspy.context(lm=scripted_lm(learner).copy(temperature=temperature), adapter=make_adapter("json")):
            return [getattr(program_of(learner)(**dict(task.inputs)), "label", "") for task in tasks]

    def program_of(learner: InContextLearner) -> Any:
        learner.slips = dict.fromkeys(learner.slips, 0.0)
        return learner.program()

    assert answers(0.1) == answers(0.1)
    assert answers(0.1) != answers(1.5)


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ConfigError, match="intents, topics, rules"):
        InContextLearner("nothing")
