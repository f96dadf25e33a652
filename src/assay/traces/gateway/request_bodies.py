"""Bodies of requests: read as JSON, and as they may be stored, without secrets."""

import json
import re
from typing import Any

import orjson
from aiohttp import web

from assay.errors import ConfigError
from assay.support.scrubbing import credentials_in, fields, is_credential, may_hold
from assay.traces.messages import gemini

__all__ = [
    "is_constrained",
    "json_body",
    "parsed_json",
    "parsed_or_none",
    "sent_secrets",
    "storable",
    "without_secrets",
]

_CONTAINERS = frozenset((dict, list))  # exact types suffice for parsed JSON; `isinstance` takes three times as long


_DEEPEST = 200  # nesting of a request that trainers and databases can read
_KEY_HEADER = re.compile(r"auth|key|token|secret|cookie|passw|credential|signature", re.I)


_KEY_ARGUMENTS = ("key", "sig", "signature", "code")


_SECRETS = ("api_key", "api_base", "base_url", "headers", "extra_headers")  # some clients send these in the body


def storable(body: dict[str, Any], secrets: list[str], *, checked: int = 0) -> dict[str, Any]:
    """A request's body without server addresses and keys.

    Args:
        secrets: the request's secrets. Those in the body's fields are added, as servers may echo them.
        checked: number of its first `messages` that are known to have no field that can hold a credential.
    """
    for part in (body, body.get("extra_body")):
        if isinstance(part, dict):
            fields({key: part[key] for key in _SECRETS if key in part}, removed=secrets)
    stored = {key: value for key, value in body.items() if key not in _SECRETS}
    if isinstance(extra := stored.get("extra_body"), dict):
        stored["extra_body"] = {key: value for key, value in extra.items() if key not in _SECRETS}
    if not checked or may_hold(stored["messages"], secrets):
        return without_secrets(stored, secrets)
    before, later = stored["messages"][:checked], stored["messages"][checked:]
    cleaned = without_secrets({**stored, "messages": later}, secrets)
    return {**cleaned, "messages": stored["messages"] if cleaned["messages"] is later else before + cleaned["messages"]}


def without_secrets(body: dict[str, Any], secrets: list[str]) -> dict[str, Any]:
    """A copy without the credentials in its fields, which are added to `secrets`."""
    cleaned: dict[str, Any] = fields(body, secrets, removed=secrets)
    return cleaned


def sent_secrets(request: web.Request) -> list[str]:
    """The keys in a request's headers and query."""
    secrets: list[str] = []
    for name, value in request.headers.items():
        if _KEY_HEADER.search(name):
            secrets += credentials_in(value)
            if "cookie" in name.lower():
                secrets += [part.partition("=")[2].strip() for part in value.split(";")]
    secrets += [value for name, value in request.query.items() if is_credential(name) or name.lower() in _KEY_ARGUMENTS]
    return [secret for secret in secrets if secret]


def parsed_json(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:  # lone surrogates and NaN, which Python's parser accepts
        return json.loads(raw.decode("utf-8", "surrogatepass"))


def parsed_or_none(raw: bytes) -> Any:
    """The value of JSON; None if it is not JSON."""
    try:
        return parsed_json(raw)
    except (ValueError, RecursionError):
        return None


def json_body(raw: bytes) -> dict[str, Any]:
    try:
        body = parsed_json(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ConfigError("the body must be a JSON object")
    if _depth(body) > _DEEPEST:
        raise ConfigError(f"the body is nested more than {_DEEPEST} deep")
    return body


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            part
            for item in level
            for part in (item.values() if type(item) is dict else item)
            if type(part) in _CONTAINERS
        ]
    return depth


def is_constrained(body: dict[str, Any]) -> bool:
    config = gemini.field(body, "generationConfig")
    if gemini.output_schema(body) or gemini.field(config, "responseMimeType") not in (None, "text/plain"):
        return True
    formats = [body.get("response_format"), body.get("output_format")]
    formats += [part.get("format") for name in ("text", "output_config") if isinstance(part := body.get(name), dict)]
    return "grammar" in body or any(
        isinstance(output_format, dict) and output_format.get("type") not in (None, "text") for output_format in formats
    )
