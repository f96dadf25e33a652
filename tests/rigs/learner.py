"""A scripted model that learns from its prompt by an explicit rule, for tests and benchmarks of prompt optimizers.

It classifies texts and attends to the demonstrations in its prompt like a softmax attention head: kernel regression is
a common model of in-context learning (Garg et al. 2022, arXiv 2208.01066; Han et al. 2023, arXiv 2305.12766). The score
of a label is

    clarity(format) * ( knowledge(text, label) * (1 + obedience * quality(instruction))
                        + strength * g * vote(label) - copying * g * [no demonstration has the label] )

- `knowledge`: standard normal noise per text and label, plus `skill` for the true label: the accuracy of the model
  without demonstrations.
- `vote`: share of attention on the demonstrations with that label. The attention on a demonstration is
  `exp(sharpness * cosine)`, the cosine being that of the word counts of both texts, times a factor that grows to
  `1 + recency` towards the end of the prompt.
- `g = n / (n + half)` for `n` demonstrations: more demonstrations have a diminishing effect.
- `copying`: models seldom answer with a label that is not in the prompt's demonstrations.
- `quality`: number of helpful minus harmful sentences in the instruction, divided by 3, clipped to [-1, 1].
- The answer is the label with the highest score plus `temperature` times Gumbel noise, which is seeded with the call's
  seed and messages. A share `slips[format]` of the answers is malformed.

`clarity` and `slips` of the prompt formats are drawn with the learner's seed, so that no format is best for all seeds;
`xml` has those of `chat`.
To a request without the output field `label` it responds with an instruction: up to four sentences, each helpful with
probability 0.55, or 0.65 if the prompt contains at least two known texts.
"""

import hashlib
import json
import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import dspy

from assay.datasets import Task
from assay.errors import ConfigError
from assay.support.names import one_of
from assay.support.sections import output_names, prompt_fields
from assay.support.values import json_text

HELPFUL = (
    "Decide by what the writer wants.", "Weigh every word of the text.", "Compare the text with the examples.",
    "Pick the most specific label.", "Read the whole text before deciding.", "Prefer the main topic over details.",
)  # fmt: skip
HARMFUL = (
    "Answer as fast as you can.", "Be creative.", "Choose the first label that comes to mind.",
    "Ignore unusual words.", "Explain yourself at length.", "Assume the text is ironic.",
)  # fmt: skip
FORMATS = ("chat", "json", "lean")


@dataclass(frozen=True, kw_only=True)
class LearnerTask:
    """Parameters of a task and of the learner on it; names as in the module's docstring."""

    labels: int
    words: int = 8  # words per text
    vocabulary_share: float = 0.5  # share of a text's words from the vocabulary of its label or the neighbouring one
    shared: float = 0.5  # half of this share of those words comes from the neighbouring label
    skill: float = 1.5
    strength: float = 4.0
    sharpness: float = 6.0
    half: float = 4.0
    copying: float = 1.0
    recency: float = 0.3
    obedience: float = 0.5


TASKS: Mapping[str, LearnerTask] = {
    # many labels that differ by their words: similar demonstrations help most
    "intents": LearnerTask(labels=12, skill=1.6, strength=6.0, sharpness=7.0),
    # few labels and much knowledge: little to gain
    "topics": LearnerTask(labels=5, skill=2.0, strength=2.0, sharpness=3.0, obedience=0.3),
    # words decide little: the instruction and the coverage of the labels count
    "rules": LearnerTask(
        labels=6, vocabulary_share=0.1, skill=1.2, strength=1.0, sharpness=1.0, copying=2.5, obedience=1.2, recency=0.6
    ),
}


class InContextLearner:
    """Script of the model: `scripted_lm(InContextLearner("intents", seed=1))`.

    Args:
        task: one of `TASKS`, or a `LearnerTask`.
        seed: draws texts, knowledge and the clarity of the formats.
    """

    def __init__(self, task: str | LearnerTask = "intents", *, seed: int = 0) -> None:
        if isinstance(task, str) and task not in TASKS:
            raise ConfigError(f"task={task!r} {one_of(task, TASKS, other='a LearnerTask')}")
        self.task = TASKS[task] if isinstance(task, str) else task
        self.seed, self.labels = seed, [f"label_{number:02d}" for number in range(self.task.labels)]
        rng = random.Random(f"formats {seed}")
        clarity, slips = [1.0, 0.85, 0.7], [0.0, 0.02, 0.05]
        self.clarity = dict(zip(FORMATS, rng.sample(clarity, 3), strict=True))
        self.slips = dict(zip(FORMATS, rng.sample(slips, 3), strict=True))
        self.clarity["xml"], self.slips["xml"] = self.clarity["chat"], self.slips["chat"]
        self.labels_of_texts: dict[str, str] = {}

    def tasks(self, count: int, *, seed: int = 0) -> list[Task]:
        """`count` different tasks, `text -> label`. The learner classifies only texts that this method returned."""
        rng = random.Random(f"tasks {self.seed} {seed}")
        vocabulary = [[f"w{label}x{word}" for word in range(10)] for label in range(self.task.labels)]
        common = [f"common{word}" for word in range(60)]
        tasks: dict[str, Task] = {}
        while len(tasks) < count:
            label = rng.randrange(self.task.labels)
            neighbour = (label ^ 1) % self.task.labels
            words = []
            for _ in range(self.task.words):
                if rng.random() >= self.task.vocabulary_share:
                    words.append(rng.choice(common))
                else:
                    words.append(rng.choice(vocabulary[neighbour if rng.random() < self.task.shared / 2 else label]))
            text = " ".join(words)
            self.labels_of_texts.setdefault(text, self.labels[label])
            tasks[text] = Task(
                id=str(len(tasks)), inputs={"text": text}, expected={"label": self.labels_of_texts[text]}
            )
        return list(tasks.values())

    def program(self) -> dspy.Module:
        """An uncompiled program for the tasks."""
        choice = Literal[tuple(self.labels)]  # type: ignore[valid-type]
        fields = {"text": (str, dspy.InputField()), "label": (choice, dspy.OutputField())}
        return dspy.Predict(dspy.Signature(fields, "Give the text its label."))

    def __call__(self, request: Any) -> str:
        system = str(request.system or "")
        marked = "chat" if "[[ ## " in system or "<text>" not in system else "xml"
        style = "lean" if "Reply with: " in system else "json" if "JSON object" in system else marked
        output_fields = list(output_names(system))
        turns = [(message.role, message.text or "") for message in request.messages]
        rng = random.Random(_digest(request.config.seed, system, *(text for _, text in turns)))
        text = prompt_fields(turns[-1][1]).get("text", "")
        if output_fields != ["label"] or text not in self.labels_of_texts:
            return self._proposal(system + "\n".join(text for _, text in turns), output_fields, style, rng)
        demonstrations = _demonstrations(turns[:-1], set(self.labels))
        if rng.random() < self.slips[style]:
            return "I am not sure."
        temperature = 0.7 if request.config.temperature is None else request.config.temperature
        scores = self.scores(text, demonstrations, system, style)
        label = max(scores, key=lambda name: scores[name] + temperature * _gumbel(rng))
        return _formatted({"label": label}, style)

    def scores(
        self, text: str, demonstrations: Sequence[tuple[str, str]], instruction: str, style: str
    ) -> dict[str, float]:
        """Score of each label, by the rule in the module's docstring.

        Args:
            demonstrations: text and label of each, in the order of the prompt.
            style: prompt format.
        """
        rule, count = self.task, len(demonstrations)
        instruction_factor = 1 + rule.obedience * quality(instruction)
        weights = [
            math.exp(rule.sharpness * _cosine(text, other)) * (1 + rule.recency * (position + 1) / count)
            for position, (other, _) in enumerate(demonstrations)
        ]
        total, votes = float(sum(weights)) or 1.0, dict.fromkeys(self.labels, 0.0)
        covered = {label for _, label in demonstrations}
        for weight, (_, label) in zip(weights, demonstrations, strict=True):
            votes[label] += weight / total
        g = count / (count + rule.half)
        scores = {}
        for label in self.labels:
            noise = random.Random(_digest(self.seed, text, label)).gauss(0, 1)
            knowledge = noise + rule.skill * (label == self.labels_of_texts.get(text))
            in_context = rule.strength * votes[label] - rule.copying * (count > 0 and label not in covered)
            scores[label] = self.clarity[style] * (knowledge * instruction_factor + g * in_context)
        return scores

    def _proposal(self, prompt: str, output_fields: Sequence[str], style: str, rng: random.Random) -> str:
        """An instruction, in each of the output fields."""
        helpful = 0.65 if sum(text in prompt for text in self.labels_of_texts) >= 2 else 0.55
        sentences = [rng.choice(HELPFUL if rng.random() < helpful else HARMFUL) for _ in range(rng.randint(1, 4))]
        text = " ".join(dict.fromkeys(["Give the text its label.", *sentences]))
        if not output_fields:  # a prompt without a signature, as of reflective optimizers
            return f"```\n{text}\n```"
        values: dict[str, Any] = {name: {"self": text} if name == "module_advice" else text for name in output_fields}
        return _formatted(values, style)


def quality(instruction: str) -> float:
    """Number of helpful minus harmful sentences, divided by 3, clipped to [-1, 1]; higher is better."""
    helpful, harmful = (sum(sentence in instruction for sentence in sentences) for sentences in (HELPFUL, HARMFUL))
    return max(-1.0, min(1.0, (helpful - harmful) / 3))


def _digest(*parts: Any) -> int:
    return int.from_bytes(hashlib.sha256(json_text(parts).encode()).digest()[:8], "big")


def _gumbel(rng: random.Random) -> float:
    return -math.log(-math.log(rng.uniform(1e-12, 1 - 1e-12)))


def _cosine(a: str, b: str) -> float:
    counts_a, counts_b = Counter(a.split()), Counter(b.split())
    norm = math.sqrt(sum(v * v for v in counts_a.values()) * sum(v * v for v in counts_b.values()))
    return sum(value * counts_b[word] for word, value in counts_a.items()) / norm if norm else 0.0


def _demonstrations(turns: Sequence[tuple[str, str]], labels: set[str]) -> list[tuple[str, str]]:
    """Text and label of each demonstration in the turns before the last one."""
    demonstrations = []
    for (role, prompt), (_, response) in zip(turns[::2], turns[1::2], strict=False):
        label = next((name for name in re.findall(r"label_\d+", response) if name in labels), None)
        if role == "user" and label is not None:
            demonstrations.append((prompt_fields(prompt).get("text", ""), label))
    return demonstrations


def _formatted(values: Mapping[str, Any], style: str) -> str:
    if style == "json":
        return json.dumps(dict(values))
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    if style == "lean":
        return "\n".join(f"{name}: {text}" for name, text in texts.items())
    if style == "xml":
        return "\n".join(f"<{name}>\n{text}\n</{name}>" for name, text in texts.items())
    return "".join(f"[[ ## {name} ## ]]\n{text}\n\n" for name, text in texts.items()) + "[[ ## completed ## ]]"
