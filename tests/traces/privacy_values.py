"""Anonymizers of the privacy tests, and personal values that they find."""

from typing import Any

from assay.traces.privacy.anonymizer import Anonymizer
from assay.traces.privacy.names import KnownValue

KEY = b"0123456789abcdef"


def make(**settings: Any) -> Anonymizer:
    return Anonymizer(KEY, engine="patterns", **settings)


def matched(text: str, *known: KnownValue) -> list[tuple[str, str]]:
    return [(span.type, text[span.start : span.end]) for span in make().find(text, known)]


A, D, H = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ0123", "012345678901", "0123456789abcdef0123456789abcdef"
