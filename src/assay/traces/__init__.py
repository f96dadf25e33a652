"""What happened: rollouts and transitions, the store that keeps them, the recorder that fills it."""

from assay.traces.recorder import Recorder, current_rollout
from assay.traces.records import Rollout, ToolCall, Transition, Verdict
from assay.traces.store import Store, shown_url, store_url

__all__ = ["Recorder", "Rollout", "Store", "ToolCall", "Transition", "Verdict", "current_rollout", "shown_url", "store_url"]
