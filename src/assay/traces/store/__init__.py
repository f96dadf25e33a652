"""The store: SQLite by default, PostgreSQL by URL."""

from typing import TYPE_CHECKING

from assay.support.lazy import attach

if TYPE_CHECKING:
    from assay.traces.store.location import store_address
    from assay.traces.store.store import Store
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "location": "store_address",
            "store": "Store",
        },
    )

__all__ = ["Store", "store_address"]
