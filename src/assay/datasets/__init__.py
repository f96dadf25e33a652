"""Tasks from files, hubs and generators, and the four splits that every command shares."""

from typing import TYPE_CHECKING

from assay.support.lazy import attach

if TYPE_CHECKING:
    from assay.datasets.sources import iter_rows
    from assay.datasets.splits import SHARES, SPLITS, Splits, check_sizes, load_splits, load_tasks
    from assay.datasets.tasks import Task, make_task
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "sources": "iter_rows",
            "splits": "SHARES SPLITS Splits check_sizes load_splits load_tasks",
            "tasks": "Task make_task",
        },
    )

__all__ = ["SHARES", "SPLITS", "Splits", "Task", "check_sizes", "iter_rows", "load_splits", "load_tasks", "make_task"]
