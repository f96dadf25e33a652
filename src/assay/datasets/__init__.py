"""Tasks from files, hubs and generators, and the four splits that every command agrees on."""

from assay.datasets.sources import iter_rows
from assay.datasets.splits import SHARES, SPLITS, Splits, load_splits, load_tasks
from assay.datasets.tasks import Task, make_task

__all__ = ["SHARES", "SPLITS", "Splits", "Task", "iter_rows", "load_splits", "load_tasks", "make_task"]
