"""Settings of `assay view`. The key is not a setting: settings may be written down, and a key must not be."""

from collections.abc import Sequence
from dataclasses import dataclass

from assay.support.settings import Settings, setting


@dataclass(frozen=True, kw_only=True)
class ViewSettings(Settings):
    """Settings of the local page."""

    host: str = setting("127.0.0.1", "Address to bind; non-loopback addresses require --key.")
    port: int = setting(8322, "Port to bind; 0 selects a free port.", ge=0, le=65535)
    allow_host: Sequence[str] = setting(
        (), "Additional host name under which the page may be opened; repeatable.", metavar="NAME", many=True
    )
