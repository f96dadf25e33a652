"""What happened: rollouts and transitions, the store that keeps them, the recorder that fills it."""

from typing import TYPE_CHECKING

from assay.lazy import attach

if TYPE_CHECKING:
    from assay.traces.location import store_url
    from assay.traces.places import current_rollout
    from assay.traces.recorder import Recorder
    from assay.traces.records import Rollout, ToolCall, Transition, Verdict
    from assay.traces.store import Store, shown_url
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "location": "store_url",
            "places": "current_rollout",
            "recorder": "Recorder",
            "records": "Rollout ToolCall Transition Verdict",
            "store": "Store shown_url",
        },
    )

__all__ = ["Recorder", "Rollout", "Store", "ToolCall", "Transition", "Verdict", "current_rollout", "shown_url", "store_url"]
