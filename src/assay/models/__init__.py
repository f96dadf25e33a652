"""Language models by name: `embedded/smollm2-135m` in process, anything else through DSPy's engines and litellm.

Knows nothing of traces or rubrics: whoever wants to see the calls passes observers (`Call` -> None).
"""

from assay.models.cache import ResponseCache
from assay.models.calls import Call, call_to_dict
from assay.models.embedded import LINES
from assay.models.lm import LanguageModel, count_tokens, get_lm, sample_scope, sibling, spending, supports, with_recording
from assay.models.meter import Caps, Meter, Usage
from assay.models.registry import EMBEDDED, EmbeddedModel, find_model, pull_model

__all__ = [
    "EMBEDDED",
    "LINES",
    "Call",
    "Caps",
    "EmbeddedModel",
    "LanguageModel",
    "Meter",
    "ResponseCache",
    "Usage",
    "call_to_dict",
    "count_tokens",
    "find_model",
    "get_lm",
    "pull_model",
    "sample_scope",
    "sibling",
    "spending",
    "supports",
    "with_recording",
]
