"""Names of fields, headers, arguments and variables for credentials, and secrets in their values. Reads no texts."""

import base64
import binascii
import re
from functools import lru_cache
from typing import Any

from assay.support.scrubbing.shapes import SECRET_SHAPE

# Endings of names, letters only. `token` alone may also be a piece of text (in log-probabilities), `key` that of a map.
_STRONG = re.compile(
    r"(?:authorization|authorizationtoken|apikey|apikeystring|apitoken|accesstoken|refreshtoken|authtoken|bearertoken"
    r"|sessiontoken|oauthtoken|clientsecret|jwttoken|^jwt"
    r"|securitytoken|identitytoken|adtoken|sastoken|secretkey|secretaccesskey|accesskey|accesskeyid|privatekey"
    r"|subscriptionkey)$"
)
# credentials only outside of the texts of models and agents
_WEAK = re.compile(
    r"(?:^token|^auth|^bearer|^pwd|cookie|secret|password|passwd|passphrase|passcode|^pw|^credentials?)$"
)
VARIABLE = re.compile(
    r"(?:^|_)(?:API_?)?(?:KEYS?|TOKENS?|SECRETS?|PASS(?:WORD|WD|PHRASE)?|CREDENTIALS?|AUTH)(?:_(?:ID|\d+))?$"
    r"|(?:APIKEY|PASSWORD|SECRET|TOKEN)$",
    re.I,
)
_HEADERS = frozenset(("headers", "extraheaders", "defaultheaders", "httpheaders", "requestheaders", "customheaders"))
_URLS = frozenset(("url", "uri", "imageurl", "fileuri", "fileurl", "serverurl"))  # fields of addresses, letters only
_TEXTS = frozenset((  # fields that contain texts of models or agents
    "messages", "message", "input", "inputs", "instructions", "system", "prompt", "suffix", "content",
    "contents", "parts", "choices", "output", "text", "result", "reasoning", "refusal", "candidates",
    "description", "answer", "delta",
))  # fmt: skip
ERRORS = frozenset(("error", "errors", "failed_generation"))
NOTES = ERRORS | {
    "reason", "reasons", "why_failed", "notes", "note", "warning", "warnings", "failures", "unrecorded_reason",
    "undecided", "detail",
}  # fmt: skip
# Numbers and pieces of texts; and entities of a task, by which an export removes personal data.
_UNCHANGED = frozenset(("logprobs", "top_logprobs", "completion_probabilities", "token_ids", "embedding", "entities"))


def is_credential(name: str, value: Any = None, *, texts: bool = False) -> bool:
    """Whether a field, header or argument of this name holds a credential.

    Args:
        value: value of the field.
        texts: the field is in the texts of a model or agent, where `token` and `password` may be words of the subject:
            the value must then also look like a credential.
    """
    kind = kind_of(name)
    if kind == "strong" and texts:
        return isinstance(value, str) and SECRET_SHAPE.fullmatch(value) is not None
    return kind == "strong" or (kind == "weak" and not texts)


@lru_cache(maxsize=4096)
def kind_of(name: str) -> str:
    """Kind of a field by its name.

    Returns:
        `strong`: always a credential; `weak`: a credential outside of texts; `headers`; `texts`; `errors`: error
        messages; `json`: JSON or text; `url`: an address; `unchanged`: never masked; empty: none of these.
    """
    plain = "".join(c for c in name.lower() if c.isalnum())
    if name in _UNCHANGED:
        return "unchanged"
    if _STRONG.search(plain) is not None:
        return "strong"
    if _WEAK.search(plain) is not None or (name.isupper() and VARIABLE.search(name) is not None):
        return "weak"
    if name == "arguments" or plain in _URLS:
        return "json" if name == "arguments" else "url"
    return "headers" if plain in _HEADERS else "texts" if name in _TEXTS else "errors" if name in NOTES else ""


def credentials_in(value: str) -> list[str]:
    """Secrets in a credential's value: the value, or the part after `Bearer`; after `Basic` also what it decodes to."""
    value = value.strip()
    scheme, _, rest = value.partition(" ")
    secrets = [value]
    if rest and scheme.lower() in ("bearer", "basic", "token", "apikey"):
        secrets = [rest.strip()]
        if scheme.lower() == "basic":
            try:
                login = base64.b64decode(rest, validate=True).decode()
                secrets += [login, login.partition(":")[2]]
            except (binascii.Error, ValueError):
                pass
    return [text for text in secrets if text]
