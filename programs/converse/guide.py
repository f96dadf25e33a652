"""Guided conversations: what the labels of a task say that `converse` should have done, as demonstrations.

Used for training tasks only, by the search for demonstrations. Calls no model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.programs.simulated_users import UserProfile, plain_value


@dataclass(frozen=True)
class ConversationGuide:
    """The right decisions in a conversation whose outcome and user are known.

    Attributes:
        expected: field -> value.
        facts: of the user's profile.
    """

    expected: Mapping[str, str]
    facts: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, expected: Mapping[str, Any], profile: Any) -> "ConversationGuide | None":
        """None if the task has no expected outcome."""
        outcome = expected.get("outcome")
        if not isinstance(outcome, Mapping):
            return None
        return cls({str(name): str(value) for name, value in outcome.items()}, UserProfile.of(profile).facts)

    def noted(self, asked: str, message: str) -> tuple[str, str] | None:
        """Field and value of a message; None if the labels do not tell.

        The longest statement counts: a correction can contain the short one that it corrects.
        """
        text = plain_value(message).casefold()
        matches = [
            (len(words), name == asked, (name, value) if value else ("none", "none"))
            for name in self.facts
            for words, value in self._statements(name)
            if words in text
        ]
        return max(matches, key=lambda entry: entry[:2])[2] if matches else None

    def _statements(self, name: str) -> Iterator[tuple[str, str]]:
        """What the user can say about a fact, and the value to note, "" for none."""
        fact = self.facts[name]
        value = self.expected.get(name, str(fact["value"]))
        first = fact.get("first")
        for words, meant in (
            (fact.get("delays"), ""),
            (first["says"] if isinstance(first, Mapping) else None, str(first["value"]) if first else ""),
            (fact.get("corrects"), value),
            (fact["says"], value),
        ):
            if words is not None:
                yield plain_value(words).casefold(), meant

    def chosen(self, missing: Sequence[str], asked: str) -> str:
        """The next field to ask for: not the one that was just asked for, if there is another one."""
        return next((name for name in missing if name != asked), missing[0])

    def asked(self, description: str) -> str:
        """A question for a field."""
        return f"What is the {description}?"
