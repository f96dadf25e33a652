"""Models of the roles program, judge and reflection: the default names, address, and the variable with the key.

The key itself is never a setting, so that no key is stored with a run, an artifact or a report.
"""

import ipaddress
import os
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from assay.errors import ConfigError
from assay.support.scrubbing import add_secrets, is_credential

DEFAULT_MODEL = "embedded/smollm2-135m"
DEFAULT_WEIGHTS = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the original weights of it, as transformers loads them


PROVIDER = "provider"  # value for `api_base` that selects the provider's own address
_NO_KEY = "none"  # clients require a key; servers on this machine or in a private network mostly do not
_KEYS = frozenset(("key", "sig", "signature", "code"))  # query parameters that are credentials too
_ADDRESS = re.compile(r"(?:[a-z][a-z0-9+.-]*)?://.*|\bhttps?:.*", re.IGNORECASE | re.DOTALL)
_LOOPBACK = re.compile(r"(?:\w+://)?(?P<host>[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::\d+)?(?:[/?#]|\Z)")
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
        ip = ipaddress.ip_address(host)
        return ip.is_loopback or ip.is_private or ip.is_unspecified
    except ValueError:
        return host.endswith((".local", ".localhost", ".internal")) or (host != "" and "." not in host)


def address_in(model: Any) -> str | None:
    """The address of a server in a model's name; some providers' clients send prompts there. None without one."""
    found = _ADDRESS.search(model) if isinstance(model, str) else None
    return None if found is None else found[0]


def is_loopback(address: str) -> bool:
    """Whether an address is certainly on this machine. One that clients may read in several ways is not."""
    match = _LOOPBACK.match(address)
    host = address if match is None else match["host"].strip("[]").lower()  # without a match it may be `::1`
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(address: str | None, name: str = "api_base", instead: str = "") -> None:
    """Refuse an address that contains a user, password or key, because it is stored, shown and sent; and one without
    `http://` or `https://`.

    Args:
        name: argument that the message names; the command line shows it as a flag.
        instead: advice on where to put the key.
    Raises:
        ConfigError: the address contains one, which the message does not repeat, or it has no scheme.
    """
    if not address or not isinstance(address, str):  # another type is an error of the settings
        return
    netloc = re.split(r"[/?#\\]", address.partition("://")[2] if "://" in address else address, maxsplit=1)[0]
    query = parse_qsl(address.partition("?")[2].partition("#")[0], keep_blank_values=True)
    names = (parameter for parameter, _ in query)
    credential = next((part for part in names if is_credential(part) or part.lower() in _KEYS), None)
    if "@" in netloc or credential is not None:
        secret = "user or password" if "@" in netloc else f"key (?{credential}=…)"
        variable = f"{name.removesuffix('api_base')}api_key_env"
        advice = instead or f"put the key into an environment variable, and name it with `{variable}`"
        raise ConfigError(f"`{name}` must hold no {secret}, which would be stored and shown with it: {advice}")
    if "://" not in address and address != PROVIDER and name.endswith("api_base"):
        scheme = "http" if is_local(address) else "https"
        raise ConfigError(f"`{name}={address!r}` is not a URL: write {scheme}://{address}")


def check_variables(model: str) -> None:
    """Refuse credentials in the environment variables from which litellm takes a provider's address.

    Raises:
        ConfigError: a variable contains one; the message does not repeat it.
    """
    for name in address_variables(model):
        check_address(os.environ.get(name), name, f"put the key into {key_variables(model)[0]}")


def address_variables(model: str) -> list[str]:
    """Environment variables from which clients take the address of a model's provider."""
    return [f"{_prefix(model)}_BASE_URL", f"{_prefix(model)}_API_BASE"]


def key_variables(model: str) -> list[str]:
    """Environment variables from which clients take the key of a model's provider."""
    return [f"{_prefix(model)}_API_KEY", *(["GOOGLE_API_KEY"] if model.startswith("gemini/") else [])]


def _prefix(model: str) -> str:
    provider = model.partition("/")[0] if "/" in model else "openai"
    return provider.upper().replace("-", "_")


@dataclass(frozen=True)
class Endpoint:
    """Address and key of a role's model.

    Args:
        api_base: address of an OpenAI-compatible server; None: the provider's own.
        api_key_env: name of the environment variable with the key; None: the provider's usual one.
    """

    api_base: str | None = None
    api_key_env: str | None = None

    def __post_init__(self) -> None:
        check_address(self.api_base)

    def role(self, api_base: str | None, api_key_env: str | None) -> "Endpoint":
        """Endpoint of another role: this one with the given changes; `provider` selects the provider's own address.

        A key belongs to its address: another address does not get this key.
        """
        if api_base is None:
            return Endpoint(self.api_base, api_key_env or self.api_key_env)
        return Endpoint(None if api_base == PROVIDER else api_base, api_key_env)

    def client(self, model: str, setting: str = "api_key_env") -> dict[str, Any]:
        """Client settings for `get_lm`.

        Args:
            setting: name of the setting that holds `api_key_env`, for messages.
        Raises:
            ConfigError: the variable is not set, or its name is not a valid variable name.
        """
        if is_embedded(model):
            return {}
        settings: dict[str, Any] = {"api_base": self.api_base} if self.api_base and self.api_base != PROVIDER else {}
        if self.api_key_env is not None:
            if not _VARIABLE.fullmatch(self.api_key_env):
                raise ConfigError(
                    f"{setting} must be the name of an environment variable, such as MY_KEY, not the key itself"
                )
            if not (key := os.environ.get(self.api_key_env)):
                raise ConfigError(
                    f"{setting} names the environment variable {self.api_key_env}, which is not set: "
                    f"export {self.api_key_env}=…"
                )
            settings["api_key"] = key
            add_secrets(key)
        return settings


def with_local_key(model: str, client: dict[str, Any]) -> dict[str, Any]:
    """Client settings with a placeholder key, for a local server without one."""
    address = str(client.get("api_base") or client.get("base_url") or "")
    variable = key_variables(model)[0]
    if address and is_local(address) and not client.get("api_key") and not os.environ.get(variable):
        return {**client, "api_key": _NO_KEY}
    return client
