"""Who may use the page: a token that is used once, a cookie, a key, host names, and a CSRF token on every change.

The printed address has the token. The first request with it gets a cookie and the token is void. Without a token, a
key opens the page: in a form, or as a bearer token for scripts. Keys and host names are checked as the gateway does.
"""

import hmac
import secrets
from collections.abc import Iterable
from hashlib import sha256
from urllib.parse import urlsplit

from aiohttp import web

from assay.errors import ConfigError
from assay.traces.gateway.access import LOOPBACK, Access, Refused

__all__ = ["CSRF_FIELD", "CSRF_HEADER", "PageAccess", "Refused"]

CSRF_FIELD, CSRF_HEADER = "csrf", "X-CSRF-Token"


class PageAccess:
    """Access control of the page: a token that opens it once, a key, and the host names that it answers to.

    Args:
        key: opens the page wherever it is sent; None allows only the token.
        host: the address to listen on.
        names: further host names that requests may use.
    Raises:
        ConfigError: a non-loopback host without a key, or a malformed key.
    """

    def __init__(self, key: str | None, *, host: str, names: Iterable[str] = ()) -> None:
        if host not in LOOPBACK and not key:
            raise ConfigError(
                f"`host={host!r}` is reachable from other machines: set a `key` that opens the page (ASSAY_KEY)"
            )
        self._gate = Access(key, host=host, names=names)
        self.has_key = key is not None
        self.token = secrets.token_urlsafe(24)
        self._token_is_used = False
        self._session = secrets.token_urlsafe(32)
        # Cookies do not differ by port: two pages on one host would overwrite each other's.
        self.cookie = f"assay_page_{secrets.token_hex(4)}"

    @property
    def csrf(self) -> str:
        """The token that forms of this server carry."""
        return hmac.new(self._session.encode(), b"csrf", sha256).hexdigest()

    def check_host(self, request: web.Request) -> None:
        """Raises `Refused` if the Host header is not a name of this server (DNS rebinding)."""
        header = request.headers.get("Host", "")
        try:
            self._gate.check_host(header)
        except Refused:
            raise Refused(
                403,
                f"this page is not served under the host {header[:100]!r}; assay view --allow-host NAME adds one",
            ) from None

    def redeem(self, token: str) -> bool:
        """Whether `token` is that of the printed address. It is accepted once."""
        if self._token_is_used or not _equal(token, self.token):
            return False
        self._token_is_used = True
        return True

    def key_opens(self, key: str) -> bool:
        """Whether the text is the key of this server."""
        return self.has_key and _equal(key, self._gate.key)

    def check_session(self, request: web.Request) -> None:
        """Raises `Refused` if the request has neither the cookie nor the key."""
        if not (_equal(request.cookies.get(self.cookie, ""), self._session) or self._sends_key(request)):
            raise Refused(401, "open the address that assay view printed; it can be opened once")

    def check_change(self, request: web.Request, sent: str) -> None:
        """Raises `Refused` unless a request that changes something comes from a page of this server.

        Args:
            sent: the CSRF token in its form or header.
        """
        self.check_origin(request)
        if not (self._sends_key(request) or _equal(sent, self.csrf)):
            raise Refused(403, "the form is out of date: reload the page and try again")

    def check_origin(self, request: web.Request) -> None:
        """Raises `Refused` if a browser says that the request comes from another site."""
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc.lower() != request.headers.get("Host", "").lower():
            raise Refused(403, f"a page of {origin[:100]!r} may not change anything here")

    def admit(self, response: web.StreamResponse) -> None:
        """Sets the cookie of the session."""
        response.set_cookie(self.cookie, self._session, httponly=True, samesite="Strict", path="/")

    def _sends_key(self, request: web.Request) -> bool:
        return self.has_key and self._gate.caller(request).has_key


def _equal(sent: str, expected: str) -> bool:
    return hmac.compare_digest(sent.encode("utf-8", "replace"), expected.encode())
