"""What holds for the LM calls of a block of code: which sample they are, which field is read, who collects prices. Imports no model."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = [
    "alternatives_of",
    "current_field",
    "current_prices",
    "current_sample",
    "refusals_end_at_once",
    "sample_scope",
    "spending",
    "waits_for_servers",
]

current_sample: ContextVar[int | None] = ContextVar("assay_sample", default=None)
current_field: ContextVar[str | None] = ContextVar("assay_field", default=None)
current_prices: ContextVar[list[float] | None] = ContextVar("assay_prices", default=None)
waits_for_servers: ContextVar[bool] = ContextVar("assay_waits", default=True)


@contextmanager
def sample_scope(sample: int | None) -> Iterator[None]:
    """Calls inside are the `sample`-th rollout of their task: the response cache keeps them apart from the others."""
    token = current_sample.set(sample)
    try:
        yield
    finally:
        current_sample.reset(token)


@contextmanager
def spending() -> Iterator[list[float]]:
    """Collects the price in dollars of every call that is made inside in this thread or task, failed calls included."""
    prices: list[float] = []
    token = current_prices.set(prices)
    try:
        yield prices
    finally:
        current_prices.reset(token)


@contextmanager
def alternatives_of(field: str) -> Iterator[None]:
    """Of calls inside that ask for alternatives of tokens, those of this output field's value are read, and no others are kept."""
    token = current_field.set(field)
    try:
        yield
    finally:
        current_field.reset(token)


@contextmanager
def refusals_end_at_once() -> Iterator[None]:
    """Calls inside are not tried again where nothing listens at the address: whoever checks a server need not wait for it."""
    token = waits_for_servers.set(False)
    try:
        yield
    finally:
        waits_for_servers.reset(token)
