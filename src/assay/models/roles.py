"""Who answers for a role (program, judge, reflection): model, address, and the environment variable that holds the key.

A key itself is never a setting, so that none is stored with a run, an artifact or a report.
"""

import ipaddress
import os
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from assay.errors import ConfigError
from assay.scrubbing import is_credential, know

__all__ = ["PROVIDER", "Endpoint", "check_address", "check_variables", "is_embedded", "is_local", "with_local_key"]

PROVIDER = "provider"  # in place of an address: the provider's own
_NO_KEY = "none"  # clients want one; servers on this machine or network mostly do not
_KEYS = frozenset(("key", "sig", "signature", "code"))  # of an address's query, also keys
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def is_embedded(model: str) -> bool:
    """Whether a model runs in this process: `embedded/NAME`, or a file as `embedded:FILE`."""
    return model.startswith(("embedded/", "embedded:"))


def is_local(address: str) -> bool:
    """Whether an address is on this machine or in a private network."""
    try:
        host = urlsplit(address if "://" in address else f"//{address}").hostname or ""
    except ValueError:
        return False
    try:
        found = ipaddress.ip_address(host)
        return found.is_loopback or found.is_private or found.is_unspecified
    except ValueError:
        return host.endswith((".local", ".localhost", ".internal")) or (host != "" and "." not in host)


def check_address(address: str | None, name: str = "api_base", instead: str = "") -> None:
    """Refuses an address with a user or password in it, which would be stored, shown and sent on with it.

    Args:
        name: of the argument that the message names; the command line says it as a flag.
        instead: where the key goes.
    Raises:
        ConfigError: there is one; the message does not say it.
    """
    if not address:
        return
    netloc = re.split(r"[/?#\\]", address.partition("://")[2] if "://" in address else address, maxsplit=1)[0]
    query = parse_qsl(address.partition("?")[2].partition("#")[0], keep_blank_values=True)
    asked = next((told for told, _ in query if is_credential(told) or told.lower() in _KEYS), None)
    if "@" in netloc or asked is not None:
        held = "user or password" if "@" in netloc else f"key (?{asked}=…)"
        known = instead or f"put the key into an environment variable, and name that with {name.removesuffix('api_base')}api_key_env"
        flag = "" if name.isupper() else f"--{name.replace('_', '-')}"
        raise ConfigError(f"{name} must hold no {held}, which would be stored and shown with it: {known}", flag=flag)


def check_variables(model: str) -> None:
    """Refuses a user, password or key in the environment variables from which litellm takes the address of a model's provider.

    Raises:
        ConfigError: there is one; the message does not say it.
    """
    provider = (model.partition("/")[0] if "/" in model else "openai").upper().replace("-", "_")
    for name in (f"{provider}_BASE_URL", f"{provider}_API_BASE"):
        check_address(os.environ.get(name), name, f"put the key into {provider}_API_KEY")


@dataclass(frozen=True)
class Endpoint:
    """Where a role's model is asked.

    Args:
        api_base: address of an OpenAI-compatible server; the provider's own where None.
        api_key_env: name of the environment variable with the key; the provider's usual one where None.
    """

    api_base: str | None = None
    api_key_env: str | None = None

    def __post_init__(self) -> None:
        check_address(self.api_base)

    def role(self, api_base: str | None, api_key_env: str | None) -> "Endpoint":
        """Another role's: this one's, but for what is given; `provider` for the provider's own address. A key goes with its address: another
        address does not get this one's."""
        if api_base is None:
            return Endpoint(self.api_base, api_key_env or self.api_key_env)
        return Endpoint(None if api_base == PROVIDER else api_base, api_key_env)

    def client(self, model: str) -> dict[str, Any]:
        """The settings for `get_lm`.

        Raises:
            ConfigError: the variable is not set, or the name cannot be that of a variable.
        """
        if is_embedded(model):
            return {}
        found: dict[str, Any] = {"api_base": self.api_base} if self.api_base and self.api_base != PROVIDER else {}
        if self.api_key_env is not None:
            if not _VARIABLE.fullmatch(self.api_key_env):
                raise ConfigError("api_key_env must be the name of an environment variable such as MY_KEY, not the key itself")
            if not (key := os.environ.get(self.api_key_env)):
                raise ConfigError(f"api_key_env names the environment variable {self.api_key_env}, which is not set: export {self.api_key_env}=…")
            found["api_key"] = key
            know(key)
        return found


def with_local_key(model: str, client: dict[str, Any]) -> dict[str, Any]:
    """A client's settings with a stand-in for the key where a local server is asked and no key is set."""
    address = str(client.get("api_base") or client.get("base_url") or "")
    variable = f"{model.partition('/')[0].upper()}_API_KEY"
    if address and is_local(address) and not client.get("api_key") and not os.environ.get(variable):
        return {**client, "api_key": _NO_KEY}
    return client
