"""Transactions that write deployments, versions, flags and loops."""

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from assay.errors import StoreError

__all__ = ["writing"]


@contextmanager
def writing(engine: sa.Engine, what: str) -> Iterator[sa.Connection]:
    """A transaction. Names a store that cannot be written, such as a read-only one.

    Args:
        what: is written, for the message.
    Raises:
        StoreError: the database refused to write, or did not answer; nothing is written.
        sqlalchemy.exc.IntegrityError: another process has written first.
    """
    try:
        with engine.begin() as connection:
            yield connection
    except sa.exc.IntegrityError:
        raise
    except sa.exc.DBAPIError as error:
        raise StoreError(f"{what} cannot be written to the store: {error.orig}") from error
