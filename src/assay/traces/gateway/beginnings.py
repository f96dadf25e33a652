"""Cache of conversation prefixes that were processed before.

Each request contains the whole conversation, and all but its end was in the request before. Stores digests, not texts.
Does not find rollouts.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

__all__ = ["Beginning", "Beginnings"]

_INCREMENTAL_DIALECTS = ("chat", "messages")  # dialects in which a message can be read without the ones after it
_MOST = 200_000  # cached digests: at most 12 MB


class Beginning(NamedTuple):
    """The part of a request that was processed before.

    Args:
        key: digest of the whole request.
        known: number of its first messages that were processed before and have no field that can hold a credential.
        chain: the digests of these messages, as in `ClientRequest.chain`.
    """

    key: bytes
    known: int = 0
    chain: Sequence[bytes] = ()


class Beginnings:
    """The digests of recent requests, by which the request before a given one is found.

    Args:
        most: maximum number of cached digests; the oldest is dropped.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most, self.size = most, 0
        self._known: dict[bytes, Sequence[bytes]] = {}  # by request digest, oldest first

    def of(self, dialect: str, body: Mapping[str, Any]) -> Beginning | None:
        """Looks up a request. The messages before its last answer are the messages of the request before.

        Returns:
            None if its messages can only be read as a whole.
        """
        messages = body.get("messages")
        if dialect not in _INCREMENTAL_DIALECTS or not isinstance(messages, list):
            return None
        answers = (
            at
            for at in range(len(messages) - 1, 0, -1)
            if isinstance(messages[at], dict) and messages[at].get("role") == "assistant"
        )
        before = next(answers, 0)
        try:
            digest = hashlib.blake2b(orjson.dumps([dialect, body.get("system")]), digest_size=16)
            if before:
                digest.update(orjson.dumps(messages[:before])[1:-1])
            chain = self._known.get(digest.digest(), ()) if before else ()
            digest.update((b"," if before else b"") + orjson.dumps(messages[before:])[1:-1])
        except TypeError:  # lone surrogates, numbers beyond 64 bits
            return None
        return Beginning(digest.digest(), before if chain else 0, chain)

    def keep(self, beginning: Beginning, chain: Sequence[bytes]) -> None:
        """Caches the chain of a request. None of its fields may be able to hold a credential."""
        self._drop(beginning.key)
        self._known[beginning.key] = chain
        self.size += len(chain)
        while self.size > self._most:
            self._drop(next(iter(self._known)))

    def _drop(self, key: bytes) -> None:
        self.size -= len(self._known.pop(key, ()))
