"""Language models by name: `embedded/smollm2-135m` in process, all others through DSPy's engines and litellm.

Independent of traces and rubrics: a caller that needs the calls passes observers (`Call` -> None).
"""

from typing import TYPE_CHECKING

from assay.support.lazy import attach

if TYPE_CHECKING:
    from assay.models.cache import ResponseCache
    from assay.models.calls import Call
    from assay.models.lm import LanguageModel, count_tokens, get_lm, sibling, supports, with_recording
    from assay.models.meter import Caps, Meter, Usage
    from assay.models.registry import EMBEDDED, EmbeddedModel, find_model, pull_model
    from assay.models.scope import sample_scope, spending
    from assay.models.thinking import Thinking
    from assay.support.sections import LINES
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "cache": "ResponseCache",
            "calls": "Call",
            "embedded": "LINES",
            "lm": "LanguageModel count_tokens get_lm sibling supports with_recording",
            "meter": "Caps Meter Usage",
            "registry": "EMBEDDED EmbeddedModel find_model pull_model",
            "scope": "sample_scope spending",
            "thinking": "Thinking",
        },
    )

__all__ = [
    "EMBEDDED",
    "LINES",
    "Call",
    "Caps",
    "EmbeddedModel",
    "LanguageModel",
    "Meter",
    "ResponseCache",
    "Thinking",
    "Usage",
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
