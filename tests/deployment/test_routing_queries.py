"""What the assignment of a version asks the store: nothing until the refresh is due."""

from pathlib import Path
from typing import Any

import sqlalchemy as sa
from production import two_versions

from assay.deployment.plan import Metric, Plan, Step
from assay.deployment.routing import Router
from assay.traces import Store

PLAN = Plan(steps=(Step(weight=50, decides=True),), metrics=(Metric(success_gain=0.1),))


def test_a_call_takes_no_query_once_the_alias_is_resolved(own_folder: Path) -> None:
    now, queries = [0.0], list[str]()

    def listener(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        queries.append(statement)

    with Store() as store:
        two_versions(store, own_folder).start("support@2", PLAN)
        router = Router(store.engine, "support", refresh_s=1.0, clock=lambda: now[0])
        sa.event.listen(store.engine, "before_cursor_execute", listener)
        versions = {router.assign(f"u{at}", task_type="t").version.name for at in range(200)}
        assert versions == {"support@1", "support@2"}
        assert queries == []
        now[0] = 1.0
        router.assign("u0")
        refresh = len(queries)
        assert refresh > 0
        for at in range(200):
            router.assign(f"u{at}")
        assert len(queries) == refresh
