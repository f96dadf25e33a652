"""Removes keys and passwords from everything that is written: store, response cache, logs, exports, JSON, messages.

Three rules. A *known* secret (the value of an environment variable for keys, a key passed to a model or gateway, the
key of a request) is removed everywhere, including the texts of models and agents. The value of a credential *field*
(`authorization`, `api_key`, `password`, …) is removed at any depth of a request. *Shapes* (`Bearer …`, `sk-…`, a
password in a URL) are removed from messages and settings, but never from what a model read or wrote: these texts stay
byte-exact. Does not find secrets that users mention in a text: `assay.traces.privacy` does.
"""

from assay.support.scrubbing.names import credentials_in, is_credential
from assay.support.scrubbing.shapes import MARK
from assay.support.scrubbing.streams import Filtered, scrub_logs, scrubbed, unscrubbed
from assay.support.scrubbing.texts import (
    add_secrets,
    all_secrets,
    error_text,
    is_maskable,
    mask_secrets,
    message,
    without,
)
from assay.support.scrubbing.values import fields, may_hold, results

__all__ = [
    "MARK",
    "Filtered",
    "add_secrets",
    "all_secrets",
    "credentials_in",
    "error_text",
    "fields",
    "is_credential",
    "is_maskable",
    "mask_secrets",
    "may_hold",
    "message",
    "results",
    "scrub_logs",
    "scrubbed",
    "unscrubbed",
    "without",
]
