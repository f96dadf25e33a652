"""Who may do what at a gateway, and the names that it answers to.

The gateway's key may do everything. A rollout's token makes calls of that rollout and nothing else: an agent that holds it can neither reward
itself nor change the model. Where no key was given, calls need none. Does not keep tokens: each is signed with the key.
"""

import hmac
import ipaddress
import re
import secrets
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from urllib.parse import unquote_plus

from aiohttp import web

from assay.errors import ConfigError
from assay.traces.gemini import is_google
from assay.traces.headers import KEYS
from assay.traces.live import rollout_id_of

__all__ = ["LOOPBACK", "Access", "Caller", "Refused"]

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_TOKEN = re.compile(r"rollout-([0-9a-f]{32})-([0-9a-f]{32})")
_NAMED = "rollout-"  # before a rollout's name in a key, where calls need no key
_HOST = re.compile(r"(?:([A-Za-z0-9._-]+)|\[([0-9a-fA-F:.]+)\])(?::\d{1,5})?")


class Refused(Exception):
    """A request that its caller may not make; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Caller:
    """Who sent a request: whether with the gateway's key, and the rollout that its token is for."""

    has_key: bool
    rollout: str | None = None


class Access:
    """Args:
    key: the gateway's; None makes one (`key`) for everything but calls, which are then `open` to all on this machine.
    host: the address it listens on.
    names: further names that it is reached by, such as that of a proxy in front of it.
    """

    def __init__(self, key: str | None, *, host: str, names: Iterable[str] = ()) -> None:
        if host not in LOOPBACK and not key:
            raise ConfigError(f"host={host!r} is open to others: set a key that callers must send (--key, or ASSAY_KEY)")
        if key is not None and (len(key) < 8 or "." in key or not key.isascii() or any(c.isspace() for c in key)):
            raise ConfigError("the key must have at least 8 characters, without a dot or spaces")
        self.open = key is None
        self.key = key or secrets.token_urlsafe(24)
        self.names = {"localhost", host.lower(), *(name.lower() for name in names)}
        if host not in LOOPBACK:
            self.names.add(socket.gethostname().lower())

    def token(self, rollout_id: str) -> str:
        """What may make calls of this rollout: in place of a key, or of the rollout's name in an address. Good for as long as the key is."""
        return f"{_NAMED}{rollout_id}-{self._signature(rollout_id)}"

    def _signature(self, rollout_id: str) -> str:
        return hmac.new(self.key.encode(), f"rollout:{rollout_id}".encode(), sha256).hexdigest()[:32]

    def rollout_of_token(self, text: str) -> str | None:
        """The rollout of a token; None where the text is none.

        Raises:
            Refused: it looks like a token and was not made with this key.
        """
        if (found := _TOKEN.fullmatch(text)) is None:
            return None
        if not hmac.compare_digest(found[2], self._signature(found[1])):
            raise Refused(
                401, "this rollout's token is not of this gateway's key: open the rollout again, and give the gateway a lasting key (--key)"
            )
        return found[1]

    def check_host(self, header: str) -> None:
        """A page whose name was made to point here (DNS rebinding) sends that name. An address cannot be made to point elsewhere.

        Raises:
            Refused: the name is none of this gateway's.
        """
        found = _HOST.fullmatch(header)
        name = "" if found is None else (found[1] or found[2]).rstrip(".").lower()
        if name in self.names or name.endswith(".localhost") or _is_address(name):
            return
        raise Refused(403, f"this gateway does not answer to the host {header[:100]!r}; --allow-host adds a name that it is reached by")

    def caller(self, request: web.Request) -> Caller:
        """Raises `Refused` where tokens of two rollouts come together, or one that is not of this gateway."""
        sent = _keys(request)
        has_key = any(hmac.compare_digest(text.encode("utf-8", "replace"), self.key.encode()) for text in sent)
        tokens = {found for text in (*sent, *_names(request)) if (found := self.rollout_of_token(text)) is not None}
        if len(tokens) > 1:
            raise Refused(403, "tokens of two rollouts came with one request")
        return Caller(has_key, next(iter(tokens), None))

    def may_call(self, caller: Caller) -> None:
        """Raises `Refused` where the caller may not ask a model."""
        if not (self.open or caller.has_key or caller.rollout):
            raise Refused(401, "wrong or missing key: send the gateway's key, or a rollout's token, as a bearer token, x-api-key or x-goog-api-key")

    def may_manage(self, caller: Caller) -> None:
        """Raises `Refused` where the caller may not reward, rate, open or close rollouts, change the model or read the counts."""
        if not caller.has_key:
            why = "a rollout's token makes calls and nothing else" if caller.rollout else "wrong or missing key"
            raise Refused(
                403 if caller.rollout else 401,
                f"{why}: this needs the gateway's key, as a bearer token or x-api-key (--key, ASSAY_KEY, or printed at the gateway's start)",
            )

    def rollout_named(self, request: web.Request, caller: Caller) -> str | None:
        """The name of the rollout that a call belongs to, where it says one. A token says it by itself, and no other may be named beside it."""
        names = [self.rollout_of_token(name) or name for name in _names(request)]
        if caller.rollout is not None:
            if not caller.has_key and any(rollout_id_of(name) != caller.rollout for name in names):
                raise Refused(403, "the token is of another rollout than the one that the request names")
            return caller.rollout
        if not names and self.open:
            names = [text.removeprefix(_NAMED) for text in _keys(request) if text.startswith(_NAMED)]
        return names[0] if names else None

    def rollout_managed(self, request: web.Request) -> str:
        """The rollout that an address names: its id where that is a token, else the name as it was given."""
        name = request.match_info["rollout"]
        return self.rollout_of_token(name) or name

    def passed_on(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers that may go to an upstream: not a key or token of this gateway, which are nobody else's business."""
        return {k: v for k, v in headers.items() if k.lower() not in KEYS or not self._is_ours(_key_in({k.lower(): v}, k.lower()))}

    def query_passed_on(self, request: web.Request) -> str:
        """What the address had after the question mark, as it came, without a key or token of this gateway."""
        query = request.rel_url.raw_query_string
        google = is_google(request.path)

        def ours(name: str, value: str) -> bool:
            return value == self.key or _TOKEN.fullmatch(value) is not None or (google and name == "key" and self._is_ours(value))

        if not any(ours(name, value) for name, value in request.query.items()):
            return query
        parts = [part.partition("=") for part in query.split("&")]
        return "&".join("".join(part) for part in parts if not ours(part[0], unquote_plus(part[2])))

    def _is_ours(self, text: str) -> bool:
        return text.startswith((_NAMED, f"{self.key}.")) or hmac.compare_digest(text.encode("utf-8", "replace"), self.key.encode())


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _keys(request: web.Request) -> list[str]:
    """The keys that came with a request: in its headers, and in the address where Google's APIs take one."""
    in_address = request.query.getall("key", ()) if is_google(request.path) else ()
    return [text for text in (*(_key_in(request.headers, name) for name in KEYS), *in_address) if text]


def _key_in(headers: Mapping[str, str], name: str) -> str:
    """The key in a header; of `Authorization` a bearer's."""
    value = headers.get(name, "")
    if name == "authorization":
        return value[7:].strip() if value[:7].lower() == "bearer " else ""
    return value.strip()


def _names(request: web.Request) -> list[str]:
    """The rollout that the header or the address of a call names."""
    named = [request.headers.get("x-assay-rollout", "")]
    if request.path.startswith("/r/"):
        named.append(request.match_info.get("rollout") or request.path.split("/")[2])
    return [name for name in named if name]
