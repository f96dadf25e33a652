"""A scripted model that learns from its prompt by an open rule: for tests and benchmarks of prompt optimizers, without a model.

It sorts texts into labels and attends to the demonstrations of its prompt as a softmax attention head does: kernel regression is the
usual picture of in-context learning (Garg et al. 2022, arXiv 2208.01066; Han et al. 2023, arXiv 2305.12766). The score of a label is

    clarity(format) * ( knowledge(text, label) * (1 + obedience * quality(instruction))
                        + strength * g * vote(label) - copying * g * [label is not shown] )

- `knowledge`: normal noise of the text and label, plus `skill` for the true label: what the model can do without demonstrations.
- `vote`: the share of attention on the demonstrations of that label. The attention on a demonstration is `exp(sharpness * cosine)`
  of the words of both texts, growing by up to `recency` towards the end of the prompt.
- `g = n / (n + half)` for `n` demonstrations: more of them help, less and less.
- `copying`: models seldom answer with a label that the prompt has not shown.
- `quality`: helpful sentences of the instruction minus harmful ones, by three, in [-1, 1].
- The answer is the label with the highest score plus `temperature` times Gumbel noise, drawn from the call's seed and messages. A
  share `slips[format]` of the answers is malformed.

Which format is the clearest is drawn from the learner's seed, so that no format is favoured over seeds. Asked for anything but a
label, it writes an instruction: a few sentences, helpful with probability 0.55, or 0.65 where the prompt shows it examples.
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

__all__ = ["TASKS", "InContextLearner", "LearnerTask"]

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
    """A kind of task and how well the learner takes to it; the names are those of the rule in the module's docstring."""

    labels: int
    words: int = 8  # of a text
    own: float = 0.5  # share of a text's words that come from its label's vocabulary
    shared: float = 0.5  # share of that vocabulary which a neighbouring label has too
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
    # few labels that the model knows: little to gain
    "topics": LearnerTask(labels=5, skill=2.0, strength=2.0, sharpness=3.0, obedience=0.3),
    # what decides is not in the words: the instruction and the coverage of labels count
    "rules": LearnerTask(labels=6, own=0.1, skill=1.2, strength=1.0, sharpness=1.0, copying=2.5, obedience=1.2, recency=0.6),
}


class InContextLearner:
    """The script of a model: `scripted_lm(InContextLearner("intents", seed=1))`.

    Args:
        task: one of `TASKS`, or a `LearnerTask`.
        seed: draws texts, knowledge and the clarity of the formats.
    """

    def __init__(self, task: str | LearnerTask = "intents", *, seed: int = 0) -> None:
        if isinstance(task, str) and task not in TASKS:
            raise ConfigError(f"task={task!r} must be one of {', '.join(TASKS)}, or a LearnerTask")
        self.task = TASKS[task] if isinstance(task, str) else task
        self.seed, self.labels = seed, [f"label_{number:02d}" for number in range(self.task.labels)]
        rng = random.Random(f"formats {seed}")
        clarity, slips = [1.0, 0.85, 0.7], [0.0, 0.02, 0.05]
        self.clarity = dict(zip(FORMATS, rng.sample(clarity, 3), strict=True))
        self.slips = dict(zip(FORMATS, rng.sample(slips, 3), strict=True))
        self._truth: dict[str, str] = {}

    def tasks(self, count: int, *, seed: int = 0) -> list[Task]:
        """`count` different tasks, `text -> label`. The learner only knows texts that were made here."""
        rng = random.Random(f"tasks {self.seed} {seed}")
        vocabulary = [[f"w{label}x{word}" for word in range(10)] for label in range(self.task.labels)]
        common = [f"common{word}" for word in range(60)]
        made: dict[str, Task] = {}
        while len(made) < count:
            label = rng.randrange(self.task.labels)
            neighbour = (label ^ 1) % self.task.labels
            words = []
            for _ in range(self.task.words):
                if rng.random() >= self.task.own:
                    words.append(rng.choice(common))
                else:
                    words.append(rng.choice(vocabulary[neighbour if rng.random() < self.task.shared / 2 else label]))
            text = " ".join(words)
            self._truth.setdefault(text, self.labels[label])
            made[text] = Task(id=str(len(made)), inputs={"text": text}, expected={"label": self._truth[text]})
        return list(made.values())

    def program(self) -> dspy.Module:
        """The plain program that is to be compiled."""
        choice = Literal[tuple(self.labels)]  # type: ignore[valid-type]
        fields = {"text": (str, dspy.InputField()), "label": (choice, dspy.OutputField())}
        return dspy.Predict(dspy.Signature(fields, "Give the text its label."))

    def __call__(self, request: Any) -> str:
        system = str(request.system or "")
        style = "lean" if "Reply with: " in system else "json" if "JSON object" in system else "chat"
        wanted = _wanted(system, style)
        turns = [(message.role, message.text or "") for message in request.messages]
        rng = random.Random(_digest(request.config.seed, system, *(text for _, text in turns)))
        text = _field(turns[-1][1], "text")
        if wanted != ["label"] or text not in self._truth:
            return self._proposal(system + "\n".join(text for _, text in turns), wanted, style, rng)
        shown = _demonstrations(turns[:-1], set(self.labels))
        if rng.random() < self.slips[style]:
            return "I am not sure."
        temperature = 0.7 if request.config.temperature is None else request.config.temperature
        scores = self.scores(text, shown, system, style)
        label = max(scores, key=lambda name: scores[name] + temperature * _gumbel(rng))
        return _written({"label": label}, style)

    def scores(self, text: str, shown: Sequence[tuple[str, str]], instruction: str, style: str) -> dict[str, float]:
        """The score of each label, by the rule in the module's docstring. `shown`: text and label of each demonstration."""
        rule, count = self.task, len(shown)
        obeyed = 1 + rule.obedience * quality(instruction)
        weights = [
            math.exp(rule.sharpness * _cosine(text, other)) * (1 + rule.recency * (place + 1) / count) for place, (other, _) in enumerate(shown)
        ]
        total, votes = float(sum(weights)) or 1.0, dict.fromkeys(self.labels, 0.0)
        covered = {label for _, label in shown}
        for weight, (_, label) in zip(weights, shown, strict=True):
            votes[label] += weight / total
        strength = count / (count + rule.half)
        found = {}
        for label in self.labels:
            known = random.Random(_digest(self.seed, text, label)).gauss(0, 1) + rule.skill * (label == self._truth.get(text))
            learned = rule.strength * votes[label] - rule.copying * (count > 0 and label not in covered)
            found[label] = self.clarity[style] * (known * obeyed + strength * learned)
        return found

    def _proposal(self, prompt: str, wanted: Sequence[str], style: str, rng: random.Random) -> str:
        helpful = 0.65 if sum(text in prompt for text in self._truth) >= 2 else 0.55
        sentences = [rng.choice(HELPFUL if rng.random() < helpful else HARMFUL) for _ in range(rng.randint(1, 4))]
        text = " ".join(dict.fromkeys(["Give the text its label.", *sentences]))
        if not wanted:  # a bare prompt, as reflecting optimizers write it
            return f"```\n{text}\n```"
        values: dict[str, Any] = {name: {"self": text} if name == "module_advice" else text for name in wanted}
        return _written(values, style)


def quality(instruction: str) -> float:
    """Helpful sentences minus harmful ones, by three, in [-1, 1]."""
    difference = sum(sentence in instruction for sentence in HELPFUL) - sum(sentence in instruction for sentence in HARMFUL)
    return max(-1.0, min(1.0, difference / 3))


def _digest(*parts: Any) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(parts, default=str).encode()).digest()[:8], "big")


def _gumbel(rng: random.Random) -> float:
    return -math.log(-math.log(rng.uniform(1e-12, 1 - 1e-12)))


def _cosine(a: str, b: str) -> float:
    one, other = Counter(a.split()), Counter(b.split())
    length = math.sqrt(sum(v * v for v in one.values()) * sum(v * v for v in other.values()))
    return sum(value * other[word] for word, value in one.items()) / length if length else 0.0


def _wanted(system: str, style: str) -> list[str]:
    """The output fields that a prompt asks for; none in a bare prompt."""
    if style == "lean":
        return re.findall(r"(\w+): …", system.rpartition("Reply with: ")[2])
    described = system.partition("Your output fields are:")[2].partition("All interactions")[0]
    return re.findall(r"^\d+\. `(\w+)`", described, re.MULTILINE)


def _field(message: str, name: str) -> str:
    """An input of a user's message, in any of the formats."""
    found = re.search(rf"^(?:\[\[ ## {name} ## \]\]\n|{name}: )(.*)$", message, re.MULTILINE)
    return found[1].strip() if found else ""


def _demonstrations(turns: Sequence[tuple[str, str]], labels: set[str]) -> list[tuple[str, str]]:
    shown = []
    for (role, asked), (_, answered) in zip(turns[::2], turns[1::2], strict=False):
        label = next((name for name in re.findall(r"label_\d+", answered) if name in labels), None)
        if role == "user" and label is not None:
            shown.append((_field(asked, "text"), label))
    return shown


def _written(values: Mapping[str, Any], style: str) -> str:
    if style == "json":
        return json.dumps(dict(values))
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    if style == "lean":
        return "\n".join(f"{name}: {text}" for name, text in texts.items())
    return "".join(f"[[ ## {name} ## ]]\n{text}\n\n" for name, text in texts.items()) + "[[ ## completed ## ]]"
