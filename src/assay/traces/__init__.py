"""Rollouts and transitions: recorder, store, gateway, importers, anonymization and exports."""

from typing import TYPE_CHECKING

from assay.support.lazy import attach

if TYPE_CHECKING:
    from assay.traces.places import acting_as, current_rollout
    from assay.traces.recorder import Recorder
    from assay.traces.records import Rollout, ToolCall, Transition, Verdict
    from assay.traces.store.location import store_address
    from assay.traces.store.store import Store
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "places": "acting_as current_rollout",
            "recorder": "Recorder",
            "records": "Rollout ToolCall Transition Verdict",
            "store.location": "store_address",
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
    "store_address",
]
