"""The store: SQLite by default, PostgreSQL by URL."""

from typing import TYPE_CHECKING

from assay.support.lazy import attach

if TYPE_CHECKING:
    from assay.traces.store.connection import check_url, url_without_password
    from assay.traces.store.location import store_url
    from assay.traces.store.store import Store
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "location": "store_url",
            "connection": "check_url url_without_password",
            "store": "Store",
        },
    )

__all__ = ["Store", "check_url", "store_url", "url_without_password"]
