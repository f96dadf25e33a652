"""Access control of a gateway: keys, rollout tokens and accepted host names.

The gateway's key allows everything. A rollout's token allows only calls of that rollout: an agent that holds it cannot
set its own reward or change the model. If no key was set, calls need none. Does not store tokens: each is signed with
the key.
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
from multidict import CIMultiDict

from assay.errors import ConfigError
from assay.traces.gateway.replies import KEYS
from assay.traces.gateway.sessions import rollout_id_of
from assay.traces.messages.gemini import is_google

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_TOKEN = re.compile(r"rollout-([0-9a-f]{32})-([0-9a-f]{32})")
_NAMED = "rollout-"  # prefix of a rollout's name that is sent as a key, if calls need no key
_HOST = re.compile(r"(?:([A-Za-z0-9._-]+)|\[([0-9a-fA-F:.]+)\])(?::\d{1,5})?")


class Refused(Exception):
    """A request that its caller is not allowed to make; `status` is the HTTP status of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Caller:
    """Sender of a request.

    Args:
        has_key: the request carries the gateway's key.
        rollout: id of the rollout whose token it carries; None without a token.
    """

    has_key: bool
    rollout: str | None = None


class Access:
    """The keys, tokens and host names that a gateway accepts.

    Args:
        key: the gateway's key. None generates one (`key`) for everything but calls, which are then `open`: any process
            on this machine can make them.
        host: the address to listen on.
        names: further host names that requests may use, such as the name of a reverse proxy.
    Raises:
        ConfigError: a non-loopback host without a key; a key that is too short or has a dot, spaces or non-ASCII text.
    """

    def __init__(self, key: str | None, *, host: str, names: Iterable[str] = ()) -> None:
        if host not in LOOPBACK and not key:
            raise ConfigError(
                f"`host={host!r}` is reachable from other machines: set the key that callers send (--key, or ASSAY_KEY)"
            )
        if key is not None and (len(key) < 8 or "." in key or not key.isascii() or any(c.isspace() for c in key)):
            raise ConfigError("the key must have at least 8 characters, without a dot or spaces")
        self.open = key is None
        self.key = key or secrets.token_urlsafe(24)
        self.names = {"localhost", host.lower(), *(name.lower() for name in names)}
        if host not in LOOPBACK:
            self.names.add(socket.gethostname().lower())

    def token(self, rollout_id: str) -> str:
        """Token for calls of this rollout, sent as a key or in an address. Valid as long as the gateway's key."""
        return f"{_NAMED}{rollout_id}-{self._signature(rollout_id)}"

    def _signature(self, rollout_id: str) -> str:
        return hmac.new(self.key.encode(), f"rollout:{rollout_id}".encode(), sha256).hexdigest()[:32]

    def rollout_of_token(self, text: str) -> str | None:
        """The id of a token's rollout; None if the text is not a token.

        Raises:
            Refused: the token was not signed with this gateway's key.
        """
        if (match := _TOKEN.fullmatch(text)) is None:
            return None
        if not hmac.compare_digest(match[2], self._signature(match[1])):
            raise Refused(
                401,
                "this rollout's token is not of this gateway's key: open the rollout again, and give the gateway a "
                "lasting key (--key)",
            )
        return match[1]

    def check_host(self, header: str) -> None:
        """Checks the Host header against DNS rebinding: a page whose name resolves to this host sends that name.

        IP addresses are accepted, as they cannot be rebound.

        Raises:
            Refused: the name is not one of this gateway's.
        """
        match = _HOST.fullmatch(header)
        name = "" if match is None else (match[1] or match[2]).rstrip(".").lower()
        if name in self.names or name.endswith(".localhost") or _is_address(name):
            return
        raise Refused(
            403,
            f"this gateway does not answer to the host {header[:100]!r}; "
            "--allow-host adds a name that it is reached by",
        )

    def caller(self, request: web.Request) -> Caller:
        """The sender of a request.

        Raises:
            Refused: tokens of two rollouts, or a token that another key signed.
        """
        sent = _keys(request)
        has_key = any(hmac.compare_digest(text.encode("utf-8", "replace"), self.key.encode()) for text in sent)
        tokens = {
            rollout_id for text in (*sent, *_names(request)) if (rollout_id := self.rollout_of_token(text)) is not None
        }
        if len(tokens) > 1:
            raise Refused(403, "tokens of two rollouts came with one request")
        return Caller(has_key, next(iter(tokens), None))

    def may_call(self, caller: Caller) -> None:
        """Raises `Refused` if the caller may not call a model."""
        if not (self.open or caller.has_key or caller.rollout):
            raise Refused(
                401,
                "wrong or missing key: send the gateway's key, or a rollout's token, as a bearer token, x-api-key or "
                "x-goog-api-key",
            )

    def may_manage(self, caller: Caller) -> None:
        """Raises `Refused` if the caller may not reward, rate, open or close rollouts, set the model or read counts."""
        if not caller.has_key:
            why = "a rollout's token makes calls and nothing else" if caller.rollout else "wrong or missing key"
            raise Refused(
                403 if caller.rollout else 401,
                f"{why}: this needs the gateway's key, as a bearer token or x-api-key (--key, ASSAY_KEY, or printed at "
                "the gateway's start)",
            )

    def rollout_named(self, request: web.Request, caller: Caller) -> str | None:
        """The rollout that a call names by token, header, address or key; None if it names none.

        Raises:
            Refused: it carries a token and names another rollout.
        """
        names = [self.rollout_of_token(name) or name for name in _names(request)]
        if caller.rollout is not None:
            if not caller.has_key and any(rollout_id_of(name) != caller.rollout for name in names):
                raise Refused(403, "the token is of another rollout than the one that the request names")
            return caller.rollout
        if not names and self.open:
            names = [text.removeprefix(_NAMED) for text in _keys(request) if text.startswith(_NAMED)]
        return names[0] if names else None

    def rollout_managed(self, request: web.Request) -> str:
        """The rollout in an address: the id if the address holds a token, else the name."""
        name = request.match_info["rollout"]
        return self.rollout_of_token(name) or name

    def passed_on(self, headers: Mapping[str, str]) -> CIMultiDict[str]:
        """The headers to forward to an upstream: all but the ones with a key or token of this gateway."""
        return CIMultiDict(
            (k, v)
            for k, v in headers.items()
            if k.lower() not in KEYS or not self._is_ours(_key_in({k.lower(): v}, k.lower()))
        )

    def query_passed_on(self, request: web.Request) -> str:
        """The query string as it was sent, without keys or tokens of this gateway."""
        query = request.rel_url.raw_query_string
        google = is_google(request.path)

        def ours(name: str, value: str) -> bool:
            return (
                value == self.key
                or _TOKEN.fullmatch(value) is not None
                or (google and name == "key" and self._is_ours(value))
            )

        if not any(ours(name, value) for name, value in request.query.items()):
            return query
        parts = [part.partition("=") for part in query.split("&")]
        return "&".join("".join(part) for part in parts if not ours(part[0], unquote_plus(part[2])))

    def _is_ours(self, text: str) -> bool:
        return text.startswith((_NAMED, f"{self.key}.")) or hmac.compare_digest(
            text.encode("utf-8", "replace"), self.key.encode()
        )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _keys(request: web.Request) -> list[str]:
    """The keys in a request: in its headers, and in the query on paths of Google's APIs."""
    in_address = request.query.getall("key", ()) if is_google(request.path) else ()
    return [text for text in (*(_key_in(request.headers, name) for name in KEYS), *in_address) if text]


def _key_in(headers: Mapping[str, str], name: str) -> str:
    """The key in a header; for `Authorization` the bearer token. "" if there is none."""
    value = headers.get(name, "")
    if name == "authorization":
        return value[7:].strip() if value[:7].lower() == "bearer " else ""
    return value.strip()


def _names(request: web.Request) -> list[str]:
    """The rollouts named in the `x-assay-rollout` header and in the path `/r/ROLLOUT/...` of a call."""
    named = [request.headers.get("x-assay-rollout", "")]
    if request.path.startswith("/r/"):
        named.append(request.match_info.get("rollout") or request.path.split("/")[2])
    return [name for name in named if name]
