"""Rollouts and transitions: recorder, store, gateway, importers, anonymization and exports."""

from typing import TYPE_CHECKING

from assay.support.lazy import attach

if TYPE_CHECKING:
    from assay.traces.places import acting_as, current_rollout
    from assay.traces.recorder import Recorder
    from assay.traces.records import Rollout, ToolCall, Transition, Verdict
    from assay.traces.store.connection import url_without_password
    from assay.traces.store.location import store_url
    from assay.traces.store.store import Store
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "places": "acting_as current_rollout",
            "recorder": "Recorder",
            "records": "Rollout ToolCall Transition Verdict",
            "store.location": "store_url",
            "store.connection": "url_without_password",
            "store.store": "Store",
        },
    )

__all__ = [
    "Recorder",
    "Rollout",
    "Store",
    "ToolCall",
    "Transition",
    "Verdict",
    "acting_as",
    "current_rollout",
    "store_url",
    "url_without_password",
]
