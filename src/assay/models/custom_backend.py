"""An engine of the user as a backend of the recording."""

from collections.abc import Mapping
from typing import Any

from dspy import lm15

from assay.models.thinking import Thinking, ThinkingError, reasoning_request


class CustomBackend:
    """Backend for a user's own DSPy engine."""

    weights = ""
    adapters: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = {}
    concurrency = 4

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.weights = getattr(engine, "weights", "")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("supports_"):
            return bool(getattr(self.engine, name, False))
        if name == "supported_params":
            return frozenset(getattr(self.engine, name, ()) or ())
        raise AttributeError(name)

    @property
    def thinks(self) -> bool:
        return bool(self.supports_reasoning)

    def with_thinking(self, request: lm15.Request, thinking: Thinking) -> lm15.Request:
        if not self.thinks:
            raise ThinkingError(
                thinking.value,
                f": the engine of {request.model} does not declare supports_reasoning, and would ignore a budget",
            )
        return reasoning_request(request, thinking)

    def complete(self, request: lm15.Request) -> tuple[lm15.Response, float | None]:
        return self.engine.complete(request), getattr(self.engine, "price_usd", None)

    def count_tokens(self, text: str) -> int:
        counter = getattr(self.engine, "count_tokens", None)
        return int(counter(text)) if counter else rough_tokens(text)


def rough_tokens(text: str) -> int:
    return (len(text) + 3) // 4
