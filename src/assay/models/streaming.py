"""A complete answer as a stream of events, in pieces that DSPy's listeners can follow.

Does not reduce latency: an answer is counted, stored and cached as a whole before its first piece is sent.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from dspy import lm15

from assay.models.answers import streamable

_PIECE = re.compile(r"\s*\w+|\s*[^\w\s]|\s+")


def events_in_pieces(response: lm15.Response) -> Iterator[Any]:
    """Events of an answer, with its text word by word: DSPy detects the end of a field only across pieces."""
    for event in lm15.response_to_events(streamable(response)):
        pieces = (
            _PIECE.findall(event.delta.text)
            if isinstance(event, lm15.StreamDeltaEvent) and isinstance(event.delta, lm15.TextDelta)
            else []
        )
        if not pieces:
            yield event
        for at, piece in enumerate(pieces):
            logprobs = event.delta.logprobs if at == len(pieces) - 1 else ()
            yield dataclasses.replace(event, delta=dataclasses.replace(event.delta, text=piece, logprobs=logprobs))
