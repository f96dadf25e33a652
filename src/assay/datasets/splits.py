"""Train, val, gate and test splits, assigned by a hash of the store's salt and the task's key.

A task keeps the split that the store first gave it, so it is the same in every command, for every seed and in every
file. Rows of one task are in one split. Memory is constant: each split keeps only the rows with the smallest hashes,
spread evenly over task types.
"""

import functools
import hashlib
import heapq
import itertools
import json
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from assay.datasets.curriculum import PREFIX, Curriculum, check_stages, load_curriculum, stage_of, staged_tasks
from assay.datasets.fields import Fields
from assay.datasets.memory import PREFIX as MEMORY
from assay.datasets.rows import ComparedRow, RowFindings, compare_rows
from assay.datasets.sources import iter_rows
from assay.datasets.tasks import OTHER_COLUMNS, OWNERS, SPLITS, UNKNOWN, USUAL_OUTPUTS, EmptyInputs, Task, make_task
from assay.errors import ConfigError, DataError, SealedSplit
from assay.support.numbers import counted
from assay.support.options import takes
from assay.support.values import json_value

__all__ = [
    "SHARES", "SPLITS", "Splits", "check_sizes", "load_splits", "load_tasks", "renamed", "split_of", "splits_of_few",
]  # fmt: skip

SHARES: Mapping[str, int] = {"train": 40, "val": 20, "gate": 20, "test": 20}  # per cent
LIMITS: Mapping[str, int] = {"train": 1000, "val": 300, "gate": 300, "test": 300}  # rows kept per split
FEW = 40  # fewer tasks are assigned by rank: by hash alone a split could stay empty
_FIRST_ROWS = 10_000  # at most that many rows are read to see whether the tasks are few
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


# -- Which columns of a dataset are inputs of the program, which are expected outputs, and which are neither.


@dataclass
class Columns:
    """Names of the columns of a dataset, in the order in which they came."""

    inputs: dict[str, None] = field(default_factory=dict)
    expected: dict[str, None] = field(default_factory=dict)
    metadata: dict[str, None] = field(default_factory=dict)

    def add(self, task: Task) -> None:
        self.inputs |= dict.fromkeys(task.inputs)
        self.expected |= dict.fromkeys(task.expected)
        self.metadata |= dict.fromkeys(name for name in task.metadata if name not in (OTHER_COLUMNS, UNKNOWN))


def column_lines(columns: Columns, fields: Fields | None, compared: Collection[str]) -> list[str]:
    """What a run says first of its data: the inputs, the expected outputs, and columns that are neither.

    Args:
        fields: of the program, if they are known.
        compared: fields that the rubric's criteria name.
    """
    optional = {} if fields is None else fields.optional
    outputs = set() if fields is None or not fields.outputs else {*fields.outputs, *USUAL_OUTPUTS, *compared}
    other = [name for name in columns.expected if outputs and name not in outputs]
    expected = [name for name in columns.expected if name not in other]
    lines = [f"columns: inputs {_listed(columns.inputs, fields)}; expected {', '.join(expected) or 'none'}"]
    if fields is None and len(columns.inputs) > 1 and not columns.expected:
        usual = ", ".join(sorted(USUAL_OUTPUTS))
        lines.append(f"note: every column is an input; an expected output is named {usual}, or by a criterion")
    if absent := [name for name in optional if name not in columns.inputs]:
        lines.append(f"note: no column has the optional input {', '.join(absent)}")
    if other:
        where = "they are in task.expected, for checks that read them there"
        lines.append(f"note: neither inputs nor outputs of the program: {', '.join(other)}; {where}")
    if columns.metadata:
        lines.append(f"note: neither inputs nor expected: {', '.join(columns.metadata)}; they are in task.metadata")
    return lines


def used_columns(columns: Collection[str], fields: Fields) -> str:
    """What `assay run` says first of the columns of a file: the inputs, those of the owner, and those that it leaves
    out."""
    owners = [name for name in OWNERS if name in columns]
    unused = sorted(set(columns) - fields.inputs.keys() - set(owners))
    parts = {"inputs": _listed(columns, fields), "owner": ", ".join(owners), "not used": ", ".join(unused)}
    return "columns: " + "; ".join(f"{part} {names}" for part, names in parts.items() if names)


def _listed(columns: Collection[str], fields: Fields | None) -> str:
    names = columns if fields is None else [name for name in columns if name in fields.inputs]
    optional = {} if fields is None else fields.optional
    return ", ".join(f"{name} (optional)" if name in optional else name for name in names)


# -- The splits of a dataset.


@dataclass
class Splits:
    """The four splits. `test` is sealed until `unseal` is called, once, by the final report."""

    train: list[Task]
    val: list[Task]
    gate: list[Task]
    _test: list[Task] = field(repr=False)
    salt: str = ""
    rows: int = 0  # that the data has
    used: Sequence[ComparedRow] = field(default=(), repr=False)  # in the order of the data
    outputs: frozenset[str] = frozenset()  # the program's output fields, as far as they are known
    columns: Columns = field(default_factory=Columns)
    on_open: Callable[[], None] | None = field(default=None, repr=False)  # called before the test split is opened
    curriculum: Curriculum | None = None
    _unsealed: bool = False

    def report(self, *, same: Callable[[Any, Any], bool] = operator.eq) -> RowFindings:
        """Repeated, contradicting and moved rows, and near-duplicates across splits.

        Args:
            same: whether two expected outputs are the same to the checks.
        """
        return compare_rows(self.used, outputs=self.outputs, same=same)

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
        if not self._unsealed and self._test and self.on_open is not None:
            self.on_open()
        self._unsealed = True
        return self._test

    def sizes(self) -> dict[str, int]:
        return {"train": len(self.train), "val": len(self.val), "gate": len(self.gate), "test": len(self._test)}

    def parts(self) -> dict[str, list[Task]]:
        """Tasks by split, including the sealed ones: for identifying tasks, not for running them."""
        return {"train": self.train, "val": self.val, "gate": self.gate, "test": self._test}

    def subjects(self) -> list[tuple[str, str]]:
        """Key and data subject of the tasks that have one, without those of the test split."""
        tasks = itertools.chain(self.train, self.val, self.gate)
        return [(task.key, str(subject)) for task in tasks if (subject := task.metadata.get("data_subject"))]

    def manifest(self) -> dict[str, Any]:
        """Record for an artifact's manifest: the key of every task, by split."""
        keys = {name: [task.key for task in tasks] for name, tasks in self.parts().items()}
        digest = hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()
        return {"salt": self.salt, "rows": self.rows, "sha256": digest, "tasks": keys}


def split_of(key: str, salt: str) -> tuple[str, int]:
    """Split of a task, and its rank: an integer in [0, 2^64) by which a split keeps its tasks, smallest first."""
    position, rank = _place_of(key, salt)
    for name in SPLITS:
        if position < SHARES[name]:
            return name, rank
        position -= SHARES[name]
    return SPLITS[-1], rank


def _place_of(key: str, salt: str) -> tuple[float, int]:
    """Position in [0, 100), which the shares divide into splits, and the rank."""
    digest = hashlib.sha256(f"{salt}\0{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 10_000 / 100, int.from_bytes(digest[8:16], "big")


def splits_of_few(
    named: Mapping[str, str | None],
    salt: str,
    *,
    known: Mapping[str, str] | None = None,
    need: Sequence[str] = SPLITS,
) -> dict[str, str]:
    """Splits of fewer than `FEW` tasks: by rank instead of by hash, so that with four tasks no split is empty.

    The others come in the order of their hashes, in shares as close as possible to `SHARES`.

    Args:
        named: key -> split that the data names, or None.
        known: splits of the store, which stand.
        need: splits that get a task before others if there are fewer than four.
    """
    chosen = {key: (known or {}).get(key) or name for key, name in named.items()}
    splits = {key: split for key, split in chosen.items() if split is not None}
    free = sorted(chosen.keys() - splits.keys(), key=lambda key: _place_of(key, salt))
    sizes = Counter(splits.values())
    before = sizes.copy()
    for _ in free:
        empty = [name for name in (*need, *SPLITS) if not sizes[name]]
        sizes[empty[0] if empty else max(SPLITS, key=lambda name: SHARES[name] * len(named) / 100 - sizes[name])] += 1
    places = [name for name in SPLITS for _ in range(sizes[name] - before[name])]
    return {**splits, **dict(zip(free, places, strict=True))}


def _tasks(
    spec: str, inputs: Inputs, rename: Mapping[str, str] | None, outputs: Collection[str] = ()
) -> Iterator[Task]:
    if spec.startswith(PREFIX):
        yield from _staged(load_curriculum(spec.removeprefix(PREFIX)), None, inputs, rename, outputs)
        return
    rows, folder = iter_rows(spec), _folder_of(spec)
    if spec.endswith(".parquet"):  # one form for all files: its dates, decimals and bytes as JSON has them
        rows = ((where, json_value(row)) for where, row in rows)

    def task_of(where: str, row: Mapping[str, Any]) -> Task:
        row = renamed(row, rename, where) if rename else row
        return make_task(row, where=where, inputs=inputs, outputs=outputs, folder=folder)

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
    curriculum: Curriculum, data: str | None, inputs: Inputs, rename: Mapping[str, str] | None,
    outputs: Collection[str],
) -> Iterator[Task]:  # fmt: skip
    return staged_tasks(curriculum, data, functools.partial(_tasks, inputs=inputs, rename=rename, outputs=outputs))


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


@takes
def load_tasks(
    spec: str,
    *,
    inputs: Collection[str] | None = None,
    rename: Mapping[str, str] | None = None,
    limit: int | None = None,
) -> list[Task]:
    """All tasks of a dataset in order, a task for each row; at most `limit`.

    Args:
        spec: a path, or a spec such as `arithmetic:size=80`.
        inputs: names of the input columns; by default those that the data names.
        rename: column -> its new name.
    Raises:
        ConfigError: an argument of the wrong type.
        DataError: the dataset is empty, or a row cannot be read.
    """
    if inputs is not None and (isinstance(inputs, str) or not isinstance(inputs, Collection)):
        raise ConfigError(f"`inputs={inputs!r}` must be a list of the names of input columns, or None")
    if rename is not None and not isinstance(rename, Mapping):
        raise ConfigError(f"`rename={rename!r}` must be a mapping from a column's name to its new name, or None")
    tasks: list[Task] = []
    for task in _tasks(spec, inputs, rename):
        if limit is not None and len(tasks) >= limit:
            break
        tasks.append(task)
    if not tasks:
        raise DataError(f"{spec} has no tasks")
    return _with_own_ids(tasks)


class _Sample:
    """Up to `limit` rows of one split with the smallest ranks, balanced over task types."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.heaps: dict[str, list[tuple[int, int, Task]]] = defaultdict(list)
        self.keys = Counter[str]()

    def offer(self, rank: int, order: int, task: Task) -> None:
        heap = self.heaps[task.task_type]
        if len(heap) == self.limit and rank > -heap[0][0]:
            return
        heapq.heappush(heap, (-rank, -order, task))
        self.keys[task.key] += 1
        if self.limit is not None and len(heap) > self.limit:
            dropped = heapq.heappop(heap)[2].key
            self.keys[dropped] -= 1
            if not self.keys[dropped]:
                del self.keys[dropped]

    def rows(self) -> list[tuple[int, Task]]:
        """Number of the row and task, by rank."""
        queues = [sorted(heap, key=_by_rank) for _, heap in sorted(self.heaps.items())]
        chosen = [entry for entries in itertools.zip_longest(*queues) for entry in entries if entry is not None]
        return [(-order, task) for _, order, task in sorted(chosen[: self.limit], key=_by_rank)]


def _by_rank(entry: tuple[int, int, Task]) -> tuple[int, int]:
    return -entry[0], -entry[1]


class _Assignment:
    """Splits of tasks, in the order of the data.

    The split that the store gave a task stands, then that of an earlier row of the task, then the one that the store
    gave the row for a program of other types.

    Args:
        few: splits of all tasks, if they are few; `alone`: those that they would have without the store.
    """

    def __init__(
        self, samples: Mapping[str, _Sample], salt: str, known: Mapping[str, str],
        few: Mapping[str, str], alone: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.samples, self.salt, self.known, self.few, self.alone = samples, salt, known, few, alone
        self.named: dict[str, str] = {}  # by key, only of rows that name or have a split: 100 bytes each

    def of(self, task: Task) -> tuple[str, str, int]:
        """The split of a task, the one that its row alone would have, and its rank."""
        key = task.key
        by_hash, rank = split_of(key, self.salt)
        wanted = task.split or self.alone.get(key) or self.named.get(key) or by_hash
        earlier = self.named.get(key) or next((name for name, rows in self.samples.items() if key in rows.keys), None)
        of_row = self.known.get(task.row_key)
        split = self.known.get(key) or self.few.get(key) or earlier or of_row or wanted
        if task.split is not None or of_row is not None:
            self.named[key] = split
        return split, wanted, rank


def load_splits(
    spec: str,
    *,
    inputs: Inputs = None,
    outputs: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    salt: str = "assay",
    limits: Mapping[str, int | None] | None = None,
    need: Sequence[str] = SPLITS,
    curriculum: Curriculum | None = None,
    known: Mapping[str, str] | None = None,
) -> Splits:
    """The splits of a dataset, in constant memory.

    Args:
        spec: path or spec; with a curriculum that of the stages that name no data.
        outputs: columns that are expected outputs, whatever their name, where the program's inputs are not known.
        curriculum: takes the tasks of its stages. Each stage must have tasks in train and val, as far as these are in
            `need`.
        limits: split name -> number of rows to keep at most, None for all; other splits keep the defaults of `LIMITS`.
        need: splits that must not be empty.
        known: key -> split of the tasks that have one in the store; it stands.
    Raises:
        DataError: no tasks, a row that cannot be read, a split name in the file that does not exist, two tasks with
            one id, or an empty split in `need`.
    """
    limits = {**LIMITS, **(limits or {})}
    if curriculum is None:
        tasks = _tasks(spec, inputs, rename, outputs)
        return collect_splits(tasks, spec=spec, salt=salt, limits=limits, need=need, known=known)
    tasks = _staged(curriculum, spec, inputs, rename, outputs)
    splits = collect_splits(tasks, spec=curriculum.source, salt=salt, limits=limits, need=need, known=known)
    check_stages(curriculum, splits.parts(), [name for name in ("train", "val") if name in need])
    splits.curriculum = curriculum
    return splits


def collect_splits(
    tasks: Iterable[Task],
    *,
    spec: str,
    salt: str,
    limits: Mapping[str, int | None],
    need: Sequence[str] = SPLITS,
    known: Mapping[str, str] | None = None,
) -> Splits:
    """`load_splits` for an iterable of tasks."""
    known, remaining = known or {}, iter(tasks)
    first, named, stored = list[Task](), dict[str, str | None](), dict[str, str]()
    for task in remaining:
        first.append(task)
        named[task.key] = named.get(task.key) or task.split
        if (split := known.get(task.key) or known.get(task.row_key)) is not None:
            stored.setdefault(task.key, split)
        if len(named) == FEW or len(first) == _FIRST_ROWS:
            break
    few, alone = dict[str, str](), dict[str, str]()
    if len(named) < FEW and len(first) < _FIRST_ROWS:
        few, alone = splits_of_few(named, salt, known=stored, need=need), splits_of_few(named, salt, need=need)
    samples = {name: _Sample(limits[name]) for name in SPLITS}
    assignment, rows, wanted = _Assignment(samples, salt, known, few, alone), 0, dict[int, str]()
    columns = Columns()
    for rows, task in enumerate(itertools.chain(first, remaining), 1):
        columns.add(task)
        split, own, rank = assignment.of(task)
        samples[split].offer(rank, rows, task)
        if own != split:
            wanted[rows] = own
    if rows == 0:
        raise DataError(f"{spec} has no tasks")
    chosen = {name: sample.rows() for name, sample in samples.items()}
    if empty := [name for name in need if not chosen[name]]:
        raise (
            _empty_splits(spec, empty, named, need)
            if few or all(named.values())
            else DataError(
                f"{spec}: no task fell into {', '.join(empty)} ({counted(rows, 'rows')}; "
                f"shares are {', '.join(f'{name} {share} %' for name, share in SHARES.items())}). "
                "Add tasks (`size=…` of generated ones), or name the split of each task in a column 'split'."
            )
        )
    ordered = sorted((order, name, task) for name, members in chosen.items() for order, task in members)
    _check_ids([(order, task) for order, _, task in ordered], spec)
    placed = _with_own_ids([replace(task, split=name) for _, name, task in ordered])
    task_of = dict(zip((order for order, *_ in ordered), placed, strict=True))
    parts = {name: [task_of[order] for order, _ in members] for name, members in chosen.items()}
    return Splits(
        parts["train"],
        parts["val"],
        parts["gate"],
        parts["test"],
        salt=salt,
        rows=rows,
        used=[
            ComparedRow(
                row=task.where or f"row {order}", key=task.key, split=name, wanted=wanted.get(order, name),
                inputs=task.inputs, outputs=task.expected,
            )
            for order, name, task in ordered
        ],
        columns=columns,
    )  # fmt: skip


def _empty_splits(spec: str, empty: Sequence[str], named: Mapping[str, str | None], need: Sequence[str]) -> DataError:
    """Error for few tasks that leave a split empty."""
    if len(named) >= len(need):
        return DataError(
            f"{spec}: no task is in {', '.join(empty)}: the data names the splits of its tasks, or an earlier job of "
            "this store assigned them, and a task of two splits is in the first. Add tasks"
        )
    return DataError(
        f"{spec} has {counted(len(named), 'distinct tasks')}, and none is left for {', '.join(empty)}: "
        f"at least {len(need)} are needed, one for each of {', '.join(need)}. Add tasks"
    )


def _check_ids(rows: Iterable[tuple[int, Task]], spec: str) -> None:
    """Raises `DataError` if different tasks have one id."""
    by_id: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for order, task in rows:
        by_id[task.id].append((order, task.key))
    for name, places in by_id.items():
        if len({key for _, key in places}) > 1:
            raise DataError(
                f"{spec}: {len(places)} rows have the id {name!r} and not the same task, first in rows "
                f"{sorted(order for order, _ in places)[:5]}. Ids must be unique"
            )


def _with_own_ids(tasks: Sequence[Task]) -> list[Task]:
    """The tasks, with `-2`, `-3`, … after the ids of further rows of a task."""
    taken, seen, own = {task.id for task in tasks}, set[tuple[str, str]](), list[Task]()
    numbers: Counter[str] = Counter()
    for task in tasks:
        name = task.id
        if (name, task.key) in seen:
            while name in taken:
                numbers[task.id] += 1
                name = f"{task.id}-{numbers[task.id] + 1}"
            taken.add(name)
        seen.add((task.id, task.key))
        own.append(task if name == task.id else replace(task, id=name))
    return own
