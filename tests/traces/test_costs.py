"""Every count of calls and dollars follows one rule: cached answers cost nothing, failed calls have no price."""

from itertools import product
from pathlib import Path

import pytest

from assay.traces import Rollout, Store, Transition
from assay.traces.store.listing import usage_of_phases
from assay.traces.store.paging import calls_from

KINDS = {
    "priced": {"cost_usd": 0.25},
    "unpriced": {"cost_usd": None},
    "failed": {"cost_usd": None, "error": "refused"},
    "failed and paid": {"cost_usd": 0.5, "error": "refused"},
    "cached": {"cost_usd": 0.125, "cached": True},
    "cached, unpriced": {"cost_usd": None, "cached": True},
}


@pytest.mark.parametrize("kinds", [*product(KINDS, repeat=2), tuple(KINDS)], ids=" and ".join)
def test_all_counts_of_a_run_agree_on_calls_and_cost(kinds: tuple[str, ...], tmp_path: Path) -> None:
    calls = [
        Transition(
            t=t, model="m", request={}, response={}, output="", prompt_tokens=1, completion_tokens=1, **KINDS[kind]
        )  # type: ignore[arg-type]
        for t, kind in enumerate(kinds)
    ]
    rollout = Rollout(run_id="r", task_id="t", status="done", model="m", phase="search", transitions=calls)
    with Store(tmp_path / "s.db") as store:
        store.put_rollout(rollout)
        for call in calls:
            store.put_transition(rollout.id, call)
        store.flush()
        (usage,) = usage_of_phases(store, "r")
        spent, counts, paged = store.spent("r")["search"], store.stats(run_id="r"), calls_from(store, rollout.id)
    known = None if rollout.unpriced else rollout.cost_usd
    costs = [usage.cost_usd, None if spent.unpriced else spent.cost_usd, counts["cost_usd"], paged.cost_usd]
    assert costs == [known] * 4
    assert usage.calls == spent.calls == counts["transitions"] - counts["cached"]
