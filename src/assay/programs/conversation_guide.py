"""Guided conversations: what the labels of a task say that `converse` should have done, as demonstrations.

Used for training tasks only, by the search for demonstrations. Calls no model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.programs.simulated_users import UserProfile, plain_value

__all__ = ["ConversationGuide"]


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
        """Field and value of a message; None if the labels do not tell."""
        text = plain_value(message).casefold()
        for name in (asked, *self.facts):
            fact = self.facts.get(name, {})
            if "delays" in fact and plain_value(fact["delays"]).casefold() in text:
                return "none", "none"
            first = fact.get("first")
            if isinstance(first, Mapping) and plain_value(first["says"]).casefold() in text:
                return name, str(first["value"])
            corrects = fact.get("corrects")
            if corrects is not None and plain_value(corrects).casefold() == text:
                return name, self.expected.get(name, str(fact["value"]))
            if fact and plain_value(fact["says"]).casefold() in text:
                return name, self.expected.get(name, str(fact["value"]))
        return None

    def chosen(self, missing: Sequence[str], asked: str) -> str:
        """The next field to ask for: not the one that was just asked for, if there is another one."""
        return next((name for name in missing if name != asked), missing[0])

    def asked(self, description: str) -> str:
        """A question for a field."""
        return f"What is the {description}?"
