"""Train, val, gate and test splits, assigned by a hash of the store's salt and the task's inputs.

The split of a task is the same in every command, for every seed and in every file. Memory is constant: each split keeps
only the tasks with the smallest hashes, spread evenly over task types.
"""

import functools
import hashlib
import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

from assay.datasets.columns import Columns
from assay.datasets.curriculum import PREFIX, Curriculum, load_curriculum, stage_of
from assay.datasets.fields import Fields
from assay.datasets.memory import PREFIX as MEMORY
from assay.datasets.sources import iter_rows
from assay.datasets.staged import check_stages, staged_tasks
from assay.datasets.tasks import SPLITS, EmptyInputs, Task, make_task
from assay.errors import ConfigError, DataError, SealedSplit
from assay.support.keywords import takes
from assay.support.numbers import counted
from assay.support.values import json_value

__all__ = ["SHARES", "SPLITS", "Splits", "check_sizes", "load_splits", "load_tasks", "renamed"]

SHARES: Mapping[str, int] = {"train": 40, "val": 20, "gate": 20, "test": 20}  # per cent
LIMITS: Mapping[str, int] = {"train": 1000, "val": 300, "gate": 300, "test": 300}  # tasks kept per split
Inputs = Fields | Collection[str] | None  # of a program: with types, their names, or unknown
_NAMED = 20  # rows that an error lists, at most


def check_sizes(sizes: Any) -> None:
    """Check a mapping from split name to number of tasks.

    Raises:
        ConfigError: not a mapping, an unknown split, or a size that is not an integer >= 1.
    """
    if not isinstance(sizes, Mapping):
        raise ConfigError(
            f"sizes={sizes!r} must map splits to numbers of tasks, such as sizes={{'val': 20}}; "
            f"the splits are {', '.join(SPLITS)}"
        )
    if unknown := sorted(map(str, set(sizes) - set(SPLITS))):
        raise ConfigError(f"sizes names {unknown}; the splits are {', '.join(SPLITS)}")
    if wrong := {
        name: size
        for name, size in sizes.items()
        if isinstance(size, bool) or not isinstance(size, Integral) or size < 1
    }:
        raise ConfigError(f"sizes {wrong} must be integers >= 1")


@dataclass
class Splits:
    """The four splits. `test` is sealed until `unseal` is called, once, by the final report."""

    train: list[Task]
    val: list[Task]
    gate: list[Task]
    _test: list[Task] = field(repr=False)
    salt: str = ""
    rows: int = 0
    # rows with the inputs of an earlier row, by the names of the expected outputs that differ
    differing: Counter[frozenset[str]] = field(default_factory=Counter)
    outputs: frozenset[str] = frozenset()  # the program's output fields, as far as they are known
    columns: Columns = field(default_factory=Columns)
    on_open: Callable[[], None] | None = field(default=None, repr=False)  # called before the test split is opened
    curriculum: Curriculum | None = None
    _unsealed: bool = False

    @property
    def conflicts(self) -> int:
        """Number of rows with the inputs of an earlier row and another expected output; the first row is kept.

        If the data has any of the program's output fields, only differences in those fields count. A column such as a
        row number then makes no conflict.
        """
        relevant = {name for tasks in self.parts().values() for task in tasks for name in task.expected} & self.outputs
        return sum(count for names, count in self.differing.items() if (names & relevant if relevant else names))

    @property
    def duplicates(self) -> int:
        """Number of rows with the inputs of an earlier row and the same expected output."""
        return self.differing.total() - self.conflicts

    def left_out(self) -> str:
        """Text with the number of dropped duplicates and contradictions; empty if none was dropped."""
        counts = {"duplicates": self.duplicates, "contradictions": self.conflicts}
        text = " and ".join(counted(count, name) for name, count in counts.items())
        return f"{text} left out" if self.differing else ""

    @property
    def test(self) -> list[Task]:
        """The test tasks.

        Raises:
            SealedSplit: before `unseal`.
        """
        if not self._unsealed:
            raise SealedSplit(
                "the test split is sealed: it is scored once, at the end, and never used for selection. "
                "Call unseal() for the final report"
            )
        return self._test

    def of_stage(self, name: str, split: str) -> list[Task]:
        """The tasks of a stage of the curriculum in train or val."""
        if split not in ("train", "val"):
            raise SealedSplit(f"a curriculum takes tasks of train and val, not of {split}")
        return [task for task in getattr(self, split) if stage_of(task.metadata) == name]

    def unseal(self) -> list[Task]:
        """Open the test split for the final report and return its tasks. Further calls do not count as openings."""
        if not self._unsealed and self.on_open is not None:
            self.on_open()
        self._unsealed = True
        return self._test

    def sizes(self) -> dict[str, int]:
        return {"train": len(self.train), "val": len(self.val), "gate": len(self.gate), "test": len(self._test)}

    def parts(self) -> dict[str, list[Task]]:
        """Tasks by split, including the sealed ones: for identifying tasks, not for running them."""
        return {"train": self.train, "val": self.val, "gate": self.gate, "test": self._test}

    def manifest(self) -> dict[str, Any]:
        """Record for an artifact's manifest: sizes and the content hash of every task, by split."""
        hashes = {name: [task.content_hash[:16] for task in tasks] for name, tasks in self.parts().items()}
        digest = hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
        return {"salt": self.salt, "rows": self.rows, "duplicates": self.duplicates, "sha256": digest, "tasks": hashes}


def split_of(content_hash: str, salt: str, shares: Mapping[str, int] = SHARES) -> tuple[str, int]:
    """Split of a task, and its rank: an integer in [0, 2^64) by which a split keeps its tasks, smallest first."""
    digest = hashlib.sha256(f"{salt}\0{content_hash}".encode()).digest()
    position = int.from_bytes(digest[:8], "big") % 10_000 / 100
    for name in SPLITS:
        if position < shares[name]:
            return name, int.from_bytes(digest[8:16], "big")
        position -= shares[name]
    return SPLITS[-1], int.from_bytes(digest[8:16], "big")


def _tasks(spec: str, inputs: Inputs, rename: Mapping[str, str] | None) -> Iterator[Task]:
    if spec.startswith(PREFIX):
        yield from _staged(load_curriculum(spec.removeprefix(PREFIX)), None, inputs, rename)
        return
    rows, folder = iter_rows(spec), _folder_of(spec)
    if spec.endswith(".parquet"):  # one form for all files: its dates, decimals and bytes as JSON has them
        rows = ((where, json_value(row)) for where, row in rows)

    def task_of(where: str, row: Mapping[str, Any]) -> Task:
        return make_task(renamed(row, rename, where) if rename else row, where=where, inputs=inputs, folder=folder)

    for where, row in rows:
        try:
            task = task_of(where, row)
        except EmptyInputs as error:
            raise _empty_inputs(error, (functools.partial(task_of, *more) for more in rows)) from None
        yield task


def _folder_of(spec: str) -> Path | None:
    """The folder of relative paths in a dataset's rows: that of the file, the working directory for rows of this
    process; None for rows from elsewhere, which must not name local files."""
    if spec.startswith(MEMORY):
        return Path.cwd()
    return Path(spec).parent if Path(spec).is_file() else None


def _staged(
    curriculum: Curriculum, data: str | None, inputs: Inputs, rename: Mapping[str, str] | None
) -> Iterator[Task]:
    return staged_tasks(curriculum, data, functools.partial(_tasks, inputs=inputs, rename=rename))


def _empty_inputs(first: EmptyInputs, remaining: Iterator[Callable[[], Task]]) -> DataError:
    """Error that lists further rows without an input, up to `_NAMED`, so that they can be fixed together."""
    places = [first.where]
    try:
        for make in remaining:
            try:
                make()
            except EmptyInputs as error:
                places.append(error.where)
            if len(places) > _NAMED:
                break
    except DataError:
        pass  # another fault ends the search; it is reported once these rows are fixed
    if len(places) == 1:
        return first
    rows = ", ".join(places[:_NAMED]) + (" and more" if len(places) > _NAMED else "")
    return DataError(f"{rows}: every input is empty. Fill in an input, or remove these rows")


def renamed(row: Mapping[str, Any], rename: Mapping[str, str], where: str) -> dict[str, Any]:
    """The row with its columns renamed.

    Args:
        rename: old column name -> new column name.
    Raises:
        DataError: a column to rename does not exist, or two columns get the same name.
    """
    if missing := sorted(rename.keys() - row.keys()):
        raise DataError(f"{where}: there is no column {missing[0]!r} to rename; the row has {sorted(map(str, row))}")
    names = [rename.get(key, key) for key in row]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{where}: renaming gives two columns the name {repeated[0]!r}")
    return dict(zip(names, row.values(), strict=True))


@takes()
def load_tasks(
    spec: str,
    *,
    inputs: Collection[str] | None = None,
    rename: Mapping[str, str] | None = None,
    limit: int | None = None,
) -> list[Task]:
    """All tasks of a dataset in order, duplicates included; at most `limit`.

    Args:
        spec: a path, or a spec such as `arithmetic:size=80`.
        inputs: names of the input columns; by default those that the data names.
        rename: column -> its new name.
    Raises:
        ConfigError: an argument of the wrong type.
        DataError: the dataset is empty, or a row cannot be read.
    """
    if inputs is not None and (isinstance(inputs, str) or not isinstance(inputs, Collection)):
        raise ConfigError(f"inputs={inputs!r} must be a list of the names of input columns, or None")
    if rename is not None and not isinstance(rename, Mapping):
        raise ConfigError(f"rename={rename!r} must be a mapping from a column's name to its new name, or None")
    tasks: list[Task] = []
    for task in _tasks(spec, inputs, rename):
        if limit is not None and len(tasks) >= limit:
            break
        tasks.append(task)
    if not tasks:
        raise DataError(f"{spec} has no tasks")
    return tasks


class _Sample:
    """Up to `limit` tasks of one split with the smallest ranks, balanced over task types."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.heaps: dict[str, list[tuple[int, int, Task]]] = defaultdict(list)
        self.ranks: dict[int, Task] = {}

    def offer(self, rank: int, order: int, task: Task) -> Task | None:
        """Add the task, or return the task with the same inputs that is already in the sample."""
        if rank in self.ranks:
            return self.ranks[rank]
        heap = self.heaps[task.task_type]
        if len(heap) >= self.limit and rank > -heap[0][0]:
            return None
        heapq.heappush(heap, (-rank, order, task))
        self.ranks[rank] = task
        if len(heap) > self.limit:
            del self.ranks[-heapq.heappop(heap)[0]]
        return None

    def tasks(self) -> list[Task]:
        queues = [sorted(heap, key=lambda entry: -entry[0]) for _, heap in sorted(self.heaps.items())]
        chosen: list[tuple[int, int, Task]] = []
        for depth in range(max(map(len, queues), default=0)):
            chosen += [queue[depth] for queue in queues if depth < len(queue)]
        return [task for _, _, task in sorted(chosen[: self.limit], key=lambda entry: -entry[0])]


def load_splits(
    spec: str,
    *,
    inputs: Inputs = None,
    rename: Mapping[str, str] | None = None,
    salt: str = "assay",
    limits: Mapping[str, int] | None = None,
    need: Sequence[str] = SPLITS,
    curriculum: Curriculum | None = None,
) -> Splits:
    """The splits of a dataset, deduplicated across splits, in constant memory.

    Args:
        spec: path or spec; with a curriculum that of the stages that name no data.
        curriculum: takes the tasks of its stages. Each stage must have tasks in train and val, as far as these are in
            `need`.
        limits: split name -> number of tasks to keep at most; other splits keep the defaults of `LIMITS`.
        need: splits that must not be empty.
    Raises:
        DataError: no tasks, a row that cannot be read, a split name in the file that does not exist, two tasks with
            one id, or an empty split in `need`.
    """
    limits = {**LIMITS, **(limits or {})}
    if curriculum is None:
        return collect_splits(_tasks(spec, inputs, rename), spec=spec, salt=salt, limits=limits, need=need)
    tasks = _staged(curriculum, spec, inputs, rename)
    splits = collect_splits(tasks, spec=curriculum.source, salt=salt, limits=limits, need=need)
    check_stages(curriculum, splits.parts(), [name for name in ("train", "val") if name in need])
    splits.curriculum = curriculum
    return splits


def collect_splits(
    tasks: Iterable[Task], *, spec: str, salt: str, limits: Mapping[str, int], need: Sequence[str] = SPLITS
) -> Splits:
    """`load_splits` for an iterable of tasks."""
    samples = {name: _Sample(limits[name]) for name in SPLITS}
    rows, differing = 0, Counter[frozenset[str]]()
    named_splits: dict[
        int, str
    ] = {}  # only for files that name splits, which can name two for one task; 100 bytes per task
    columns = Columns()
    for rows, task in enumerate(tasks, 1):
        columns.add(task)
        name, rank = split_of(task.content_hash, salt)
        if task.split is not None:
            name = task.split
            if named_splits.setdefault(rank, name) != name:  # the first one stands, even if its sample dropped the task
                differing[frozenset()] += 1
                continue
        twin = next((s.ranks[rank] for s in samples.values() if rank in s.ranks), None)
        if twin is None:
            twin = samples[name].offer(rank, rows, task)
        if twin is not None:
            names = twin.expected.keys() | task.expected.keys()
            differing[frozenset(name for name in names if twin.expected.get(name) != task.expected.get(name))] += 1
    if rows == 0:
        raise DataError(f"{spec} has no tasks")
    chosen = {name: sample.tasks() for name, sample in samples.items()}
    ids = Counter(task.id for members in chosen.values() for task in members)
    if repeated := [task_id for task_id, count in ids.items() if count > 1]:
        entries = (entry for sample in samples.values() for heap in sample.heaps.values() for entry in heap)
        rows_of = sorted(order for _, order, task in entries if task.id == repeated[0])
        raise DataError(
            f"{spec}: {len(rows_of)} different tasks have the id {repeated[0]!r}, first in rows {rows_of[:5]}. "
            "Ids must be unique"
        )
    if empty := [name for name in need if not chosen[name]]:
        raise DataError(
            f"{spec}: no task fell into {', '.join(empty)} ({rows - differing.total()} distinct tasks in all; "
            f"shares are {', '.join(f'{name} {share} %' for name, share in SHARES.items())}). "
            "Add tasks (size=… of generated ones), or name the split of each task in a column 'split'."
        )
    return Splits(
        chosen["train"],
        chosen["val"],
        chosen["gate"],
        chosen["test"],
        salt=salt,
        rows=rows,
        differing=differing,
        columns=columns,
    )
