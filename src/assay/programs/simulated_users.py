"""Simulated users of conversations: `RuleBasedUser` without a model, and `SimulatedUser` with one.

A simulated user is a program of its own, called as `user(profile=…, messages=…)`. Its prompts are not optimised with
the agent's, its calls are recorded in rollouts of their own, and it is audited with a fidelity card, like a judge.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import dspy

from assay.errors import DataError, EnvironmentFailed
from assay.programs.adapters import make_adapter
from assay.support.names import nearest

ENDINGS = ("", "done", "gave_up")
MESSAGE_CHARS = 2000  # of a user's message; the rest is cut off
GOODBYE, PERSON, GIVES_UP = (
    "Yes, that is right. Thank you, goodbye.",
    "Can I talk to a real person, please?",
    "Never mind, forget it. I give up.",
)
LOST, UNKNOWN, BEFORE = (
    "Sorry, I do not understand what you need from me.",
    "I do not know that.",
    "You have that from last time.",
)
_PATIENCE = 3  # replies in a row that bring nothing, after which the user asks for a person
_KEYS = ("value", "says", "asked_by", "first", "corrects", "delays", "told_before")  # of a fact
_CLOSES = re.compile(r"\b(confirmed|booked|reserved|all set|completed|goodbye|bye|have a (nice|good|great))\b", re.I)


@runtime_checkable
class UserProgram(Protocol):
    """A program that writes the messages of the user of a conversation."""

    def __call__(self, *, profile: Mapping[str, Any], messages: Sequence[Mapping[str, str]]) -> Any:
        """Returns the user's next message.

        Args:
            profile: `goal` (text) and `facts` (name -> value, or an object with `value`), the task's input `user`.
            messages: the conversation so far, each with `role` (`user` or `agent`) and `content`. Empty at the start.
        Returns:
            An object with `message` (text) and `ended`: "" to continue, `done` if the goal is reached, `gave_up` if the
            user leaves. With an ending the message is the last one.
        """


def user_failure(user: Any, what: str) -> EnvironmentFailed:
    """The error for a simulated user that failed: it is a part of the environment, and the run is unscored."""
    return EnvironmentFailed(f"the simulated user {type(user).__name__} {what}")


@dataclass(frozen=True)
class UserProfile:
    """Goal and facts of a simulated user.

    Attributes:
        facts: name -> `value`; optionally `says` (how it is stated), `asked_by` (words that ask for it), `first` (a
            wrong value, or an object with it and its `says`, stated first) with `corrects` (the later correction),
            `delays` (the answer to the first request), `told_before` (true: stated in another conversation, not again).
    """

    goal: str
    facts: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, profile: Any) -> "UserProfile":
        """Reads a task's input `user`.

        Raises:
            DataError: it has no goal, facts that are not a mapping, or a fact without a value or with a misspelled key.
        """
        goal = profile.get("goal") if isinstance(profile, Mapping) else None
        facts = profile.get("facts", {}) if isinstance(profile, Mapping) else None
        if isinstance(profile, Mapping) and "facts" not in profile and (near := nearest("facts", map(str, profile))):
            raise DataError(f"user has the key {near!r}. Did you mean 'facts'?")
        if not isinstance(goal, str) or not goal.strip() or not isinstance(facts, Mapping):
            raise DataError(
                f"user={str(profile)[:200]!r} must have a 'goal' (text) and 'facts' (name -> value), for example "
                '{"goal": "I want to book a table.", "facts": {"day": "Friday"}}'
            )
        return cls(goal, {str(name): _fact(name, value) for name, value in facts.items()})


def _fact(name: Any, value: Any) -> dict[str, Any]:
    """A fact with its defaults.

    Raises:
        DataError: it is an object with other keys and no `value`, or with a key that is probably a misspelled one.
    """
    fact = dict(value) if isinstance(value, Mapping) else {"value": value}
    for key in fact.keys() - set(_KEYS):
        if (near := nearest(str(key), _KEYS)) is not None and near not in fact:
            raise DataError(f"the fact {name!r} of the user has the key {key!r}. Did you mean {near!r}?")
    if not fact.keys() & set(_KEYS):  # an object that a user's own program understands
        fact = {"value": value}
    if "value" not in fact:
        raise DataError(f"the fact {name!r} of the user is {str(value)[:200]!r}, without a 'value'")
    words = str(name).replace("_", " ").casefold()
    asked_by = fact.get("asked_by") or [words]
    if "first" in fact:
        first = fact["first"] if isinstance(fact["first"], Mapping) else {"value": fact["first"]}
        fact["first"] = {**first, "says": _statement(words, first)}
    return {
        **fact,
        "value": str(fact["value"]),
        "says": _statement(words, fact),
        "asked_by": [str(word).casefold() for word in ([asked_by] if isinstance(asked_by, str) else asked_by)],
    }


def _statement(words: str, fact: Mapping[str, Any]) -> str:
    return str(fact.get("says") or f"The {words} is {fact.get('value')}.")


def stated_values(text: str, names: Sequence[str]) -> dict[str, str]:
    """Values that a text states as `name: value`, separated by commas or semicolons or by lines."""
    values = {}
    for name in names:
        label = re.escape(name.replace("_", " "))
        match = re.search(rf"(?im)\b{label}\s*:\s*([^,;\n]+)", text) or re.search(
            rf"(?im)\b{re.escape(name)}\s*:\s*([^,;\n]+)", text
        )
        if match:
            values[name] = match[1].strip().rstrip(".")
    return values


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are equal but for case, spaces and punctuation at the ends."""
    return plain_value(a).casefold() == plain_value(b).casefold()


def plain_value(value: Any) -> str:
    """A value without spaces and punctuation at its ends, and with single spaces."""
    return " ".join(str(value).split()).strip(" .,;:!?\"'`")


def asked_fact(reply: str, facts: Mapping[str, Mapping[str, Any]], stated: Sequence[str] = ()) -> str | None:
    """The fact that a reply asks for: the one with the most of its words in the last question; None if there is none.

    Of equals, one that was not stated yet, then the one that is mentioned first.
    """
    parts = re.split(r"(?<=[.!?])\s+", reply.casefold())
    questions = [part for part in parts if "?" in part]
    text = questions[-1] if questions else reply.casefold()
    best: tuple[int, bool, int] | None = None
    chosen = None
    for name, fact in facts.items():
        words = {name.replace("_", " ").casefold(), *fact["asked_by"]}
        places = [match.start() for word in words if (match := re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text))]
        if places and (best is None or (len(places), name not in stated, -min(places)) > best):
            best, chosen = (len(places), name not in stated, -min(places)), name
    return chosen


@dataclass
class _State:
    """What the rule-based user has stated and was asked so far. It follows from the replies alone."""

    profile: UserProfile
    stated: list[str] = field(default_factory=list)
    delayed: set[str] = field(default_factory=set)
    corrected: set[str] = field(default_factory=set)
    useless: int = 0  # replies in a row

    def answer(self, reply: str) -> tuple[str, str]:
        facts = self.profile.facts
        stated = stated_values(reply, list(facts))
        wrong = next((name for name, value in stated.items() if not same_value(value, facts[name]["value"])), None)
        if wrong is not None:
            self.corrected.add(wrong)
            text = BEFORE if facts[wrong].get("told_before") else facts[wrong]["says"]
            return self._useless(f"No, the {wrong.replace('_', ' ')} is wrong. {text}")
        if _CLOSES.search(reply) and "?" not in reply:
            return GOODBYE, "done"
        name = asked_fact(reply, facts, self.stated)
        if name is None:
            return self._useless(LOST)
        changed = next(
            (n for n in self.stated if n != name and "corrects" in facts[n] and n not in self.corrected), None
        )
        if changed is not None:
            self.corrected.add(changed)
            return str(facts[changed]["corrects"]), ""
        return self._tell(name)

    def _tell(self, name: str) -> tuple[str, str]:
        fact = self.profile.facts[name]
        if fact.get("told_before"):
            return self._useless(BEFORE)
        if name in self.stated:
            return self._useless(f"I already told you. {self._words(name)}")
        if "delays" in fact and name not in self.delayed:
            self.delayed.add(name)
            return str(fact["delays"]), ""
        self.stated.append(name)
        self.useless = 0
        return self._words(name), ""

    def _words(self, name: str) -> str:
        fact = self.profile.facts[name]
        return str(fact["first"]["says"] if "first" in fact and name not in self.corrected else fact["says"])

    def _useless(self, text: str) -> tuple[str, str]:
        self.useless += 1
        if self.useless > _PATIENCE:
            return GIVES_UP, "gave_up"
        return (PERSON if self.useless == _PATIENCE else text), ""


class RuleBasedUser(dspy.Module):  # type: ignore[misc]
    """A user that follows rules and calls no model. The same replies get the same answers.

    It states its goal, tells a fact when a reply asks for it by one of its words, corrects values that a reply states
    wrongly as `name: value`, asks for a person after three replies in a row that bring nothing, gives up after a
    fourth, and ends when a reply without a question confirms.
    """

    def forward(self, profile: Mapping[str, Any], messages: Sequence[Mapping[str, str]]) -> dspy.Prediction:
        state = _State(UserProfile.of(profile))
        message, ended = state.profile.goal, ""
        for reply in (entry["content"] for entry in messages if entry["role"] == "agent"):
            message, ended = state.answer(reply)
        return dspy.Prediction(message=message, ended=ended)


class SimulatedUser(dspy.Module):  # type: ignore[misc]
    """A user by a language model: one call chooses what to say, a second one words it if the profile has no words.

    The first message is the goal as it stands. Facts are chosen by name, so that a small model can do it.

    Args:
        model: its model by name; None for that of the agent. In training the agent's model changes, so name one.
        writes: word every message by the model, also where the profile has words for it.
        prompt_format: of its own prompts.
    """

    def __init__(self, model: str | None = None, *, writes: bool = False, prompt_format: str = "json") -> None:
        super().__init__()
        self.model, self.writes, self.prompt_format = model, writes, prompt_format
        known = {
            "goal": (str, dspy.InputField(desc="what you want")),
            "facts": (str, dspy.InputField(desc="what you know")),
            "message": (str, dspy.InputField(desc="what the agent says")),
        }
        say = {"say": (str, dspy.OutputField(desc="the fact that is asked for, or another word of the list"))}
        self.choose = dspy.Predict(
            dspy.Signature(
                {**known, "history": (dspy.History, dspy.InputField()), **say},
                "You are a customer in a conversation with an agent. Choose what to say next: the fact that the agent "
                "asks for; unknown if you do not know it; done if the agent has finished; gave_up if it is useless.",
            )
        )
        reply = dspy.OutputField(desc="one sentence", max_length=200)
        self.word = dspy.Predict(
            dspy.Signature(
                {"message": known["message"], "fact": (str, dspy.InputField()), "reply": (str, reply)},
                "You are a customer. Answer the agent with the fact and nothing else.",
            )
        )

    def forward(self, profile: Mapping[str, Any], messages: Sequence[Mapping[str, str]]) -> dspy.Prediction:
        known = UserProfile.of(profile)
        if not messages:
            return dspy.Prediction(message=known.goal, ended="")
        from assay.models import sibling

        lm = dspy.settings.lm if self.model is None else sibling(dspy.settings.lm, self.model)
        with dspy.context(lm=lm, adapter=make_adapter(self.prompt_format)):
            return self._next(known, messages)

    def _next(self, known: UserProfile, messages: Sequence[Mapping[str, str]]) -> dspy.Prediction:
        reply = str(messages[-1]["content"])
        choices = Literal[(*known.facts, "unknown", "done", "gave_up")]  # type: ignore[valid-type]
        facts = "; ".join(f"{name}: {fact['value']}" for name, fact in known.facts.items())
        signature = self.choose.signature.with_updated_fields("say", type_=choices)
        chosen = self.choose(
            signature=signature, goal=known.goal, facts=facts, message=reply, history=_history(messages[:-1])
        ).say
        if chosen not in known.facts:
            text, ended = {"unknown": (UNKNOWN, ""), "done": (GOODBYE, "done")}.get(chosen, (GIVES_UP, "gave_up"))
            return dspy.Prediction(message=text, ended=ended)
        fact = known.facts[chosen]
        if fact.get("told_before"):
            return dspy.Prediction(message=BEFORE, ended="")
        if not self.writes:
            return dspy.Prediction(message=str(fact["says"]), ended="")
        words = self.word(message=reply, fact=f"{chosen}: {fact['value']}")
        return dspy.Prediction(message=str(words.reply), ended="")


def _history(messages: Sequence[Mapping[str, str]]) -> dspy.History:
    """Pairs of an agent's message and what the user said to it; the goal, which answers nothing, is left out."""
    pairs = [
        {"message": messages[at]["content"], "say": messages[at + 1]["content"]}
        for at in range(1, len(messages) - 1)
        if messages[at]["role"] == "agent" and messages[at + 1]["role"] == "user"
    ]
    return dspy.History(messages=pairs)
