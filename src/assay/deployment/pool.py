"""The benchmark pool of an agent: rollouts of production as tasks, deduplicated, anonymized, stratified, versioned.

Tenants, consent and erasure are respected as in exports. A task has the split that its recorded inputs have in the
store, also after anonymization. Answers of production are not taken as expected outputs.
"""

import hashlib
import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.datasets.tasks import SPLITS, Task, task_key, written_outputs
from assay.deployment.settings import PoolSettings
from assay.errors import DISTRIBUTION, ConfigError, DataError
from assay.support.numbers import counted
from assay.support.places import write_whole
from assay.support.report import Report
from assay.support.values import check_format
from assay.traces.export.hiding import DeclaredValues, Hider
from assay.traces.export.selection import difficulty_of, drawn, loaded, permitted, snapshot
from assay.traces.export.settings import FAILED, PATTERNS, VERIFIED, Selection
from assay.traces.records import Rollout, subject_digest
from assay.traces.store import Store, tables as schema
from assay.traces.store.leases import present
from assay.traces.store.rows import rollout_of
from assay.traces.store.sealing import SplitFinder, claim_salt
from assay.traces.store.store import Forgotten

# -- How tasks of production differ from the training data: shares of task types, lengths of inputs.


@dataclass
class Profile:
    """Task types and lengths of a set of tasks.

    Attributes:
        types: number of tasks by task type.
        lengths: characters of the inputs, one number a task.
    """

    types: Counter[str] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)

    def add(self, task_type: str, inputs: Mapping[str, Any], count: int = 1) -> None:
        """Counts a task.

        Args:
            count: number of its rollouts.
        """
        self.types[task_type] += count
        self.lengths.append(sum(len(str(value)) for value in inputs.values()))

    @classmethod
    def of(cls, tasks: Iterable[Task]) -> "Profile":
        profile = cls()
        for task in tasks:
            profile.add(task.task_type, task.inputs)
        return profile


def drift(before: Profile, now: Profile) -> dict[str, Any] | None:
    """Difference of two profiles; None if one of them is empty.

    Returns:
        `task_types`: share before and now by type; `distance`: total variation distance of the shares, in [0, 1];
        `new_task_types`; `length`: medians before and now with the Kolmogorov-Smirnov statistic and its p value.
    """
    from scipy import stats

    if not before.lengths or not now.lengths:
        return None
    shares = {
        kind: [profile.types[kind] / profile.types.total() for profile in (before, now)]
        for kind in sorted(before.types.keys() | now.types.keys())
    }
    test = stats.ks_2samp(before.lengths, now.lengths)
    return {
        "task_types": shares,
        "distance": sum(abs(one - other) for one, other in shares.values()) / 2,
        "new_task_types": sorted(now.types.keys() - before.types.keys()),
        "length": {
            "before": statistics.median(before.lengths), "now": statistics.median(now.lengths),
            "ks": float(test.statistic), "p": float(test.pvalue),
        },
    }  # fmt: skip


# -- Pool.


FORMAT = 1
_ROLLOUTS = schema.rollouts
_BATCH = 500


@dataclass
class _Candidate:
    """A distinct task of production, and what its rollouts have shown. `newest` is the id of the last one of them, and
    `at` its place among all rollouts."""

    newest: str = ""
    at: int = 0
    task_type: str = ""
    count: int = 0
    failed: int = 0
    total: float = 0.0  # sum of the scores

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def is_hard(self) -> bool:
        return self.failed > 0 or self.mean < 1 / 3


@dataclass(frozen=True, kw_only=True, repr=False)
class PoolReport(Report):
    """A pool that was written, or would be.

    Attributes:
        path: the file; null if it was only counted.
        sha256: of the file, its version.
        tasks: number of tasks.
        new_tasks: tasks that `against` does not have.
        splits: number of tasks by split.
        task_types: number of tasks by task type.
        hard: tasks on which production failed, or scored below 1/3.
        clean: share of the rollouts that ended without a failure of a model or judge and are scored.
        rollouts: number of rollouts that were read.
        left_out: number of rollouts or tasks left out, by reason.
        gates: prerequisites of a training, each with its value, what is required and whether it passed.
        passed: whether all did.
        drift: against the training data; null without any.
    """

    path: str | None
    sha256: str | None
    tasks: int
    new_tasks: int
    splits: Mapping[str, int]
    task_types: Mapping[str, int]
    hard: int
    clean: float
    rollouts: int
    left_out: Mapping[str, int]
    gates: list[dict[str, Any]]
    passed: bool
    drift: dict[str, Any] | None

    def lines(self) -> Iterator[str]:
        place = "not written" if self.path is None else f"{self.path} ({str(self.sha256)[:12]})"
        splits = ", ".join(f"{name} {count}" for name, count in self.splits.items())
        yield (
            f"{counted(self.tasks, 'tasks')} from {counted(self.rollouts, 'rollouts')}, {self.hard} hard or failed, "
            f"{self.new_tasks} new ({splits}): {place}"
        )
        for gate in self.gates:
            state, value = "passed" if gate["passed"] else "failed", gate_value(gate)
            yield f"  {state}  {gate['gate']:10} {value}, required {gate['required']}"
        yield from (f"  {count} left out: {reason}" for reason, count in self.left_out.items())
        if (drift := self.drift) is not None:
            new, length = ", ".join(drift["new_task_types"]) or "none", drift["length"]
            yield (
                f"  drift: {drift['distance']:.0%} of the task types (new: {new}); median length "
                f"{length['before']:g} -> {length['now']:g} characters (p = {length['p']:.2g})"
            )


def gate_value(gate: Mapping[str, Any]) -> str:
    """The measured value of a gate, as text."""
    return f"{gate['value']:.3g}" if isinstance(gate["value"], float) else str(gate["value"])


def manifest_path(pool: str | Path) -> Path:
    """The file that describes a pool."""
    return Path(pool).with_suffix(".manifest.json")


def read_manifest(pool: str | Path) -> dict[str, Any]:
    """The manifest of a pool, after verifying that the pool is the file that it describes.

    Raises:
        DataError: there is none, it has another format, or the file was changed.
    """
    path = manifest_path(pool)
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        sha256 = hashlib.sha256(Path(pool).read_bytes()).hexdigest()
    except (OSError, ValueError) as error:
        raise DataError(f"{pool} is not a pool with a manifest: {error}") from None
    check_format(f"the pool {pool}", manifest.get("format"), FORMAT, remake="write it again", error=DataError)
    if manifest.get("sha256") != sha256:
        raise DataError(f"{pool} was changed since it was written: its hash is not the one in {path}")
    return manifest


def write_pool(
    store: Store,
    agent: str,
    settings: PoolSettings,
    out: Path | None,
    *,
    key: Path | None = None,
    training: Iterable[Task] = (),
    replace: bool = False,
) -> PoolReport:
    """Collects the pool of an agent and writes it with its manifest.

    Args:
        out: new file that ends in .jsonl; None only counts.
        key: key file of the surrogates.
        training: the tasks to compare with.
        replace: an existing file is replaced.
    Raises:
        ConfigError: the file exists, or has another ending.
        DataError: there are no tasks, or the anonymization is incomplete; nothing was written.
    """
    if out is not None and (out.suffix != ".jsonl" or (out.exists() and not replace)):
        raise ConfigError(f"{out} must be a new file that ends in .jsonl: existing pools are not overwritten")
    run = _Pool(store, agent, settings, key)
    run.read(present(store.engine))
    rows = run.rows(run.chosen())
    known = list(training)
    report = run.report(rows, known)
    if not rows:
        raise DataError(f"there is no task for the pool of {agent!r}: {_reasons(report.left_out)}")
    if run.hider.state == FAILED:
        raise DataError(
            f"the anonymization of the pool is incomplete: {run.hider.missing}. Nothing was written; leave these task "
            f"types out, or install {DISTRIBUTION}[privacy]"
        )
    return report if out is None else _written(store, run, rows, report, out)


def _reasons(left_out: Mapping[str, int]) -> str:
    listed = "; ".join(f"{count} {reason}" for reason, count in left_out.items())
    return f"left out: {listed}" if listed else "it has no rollouts of assay.deployed or assay serve --registered"


def _written(store: Store, run: "_Pool", rows: list[dict[str, Any]], report: PoolReport, out: Path) -> PoolReport:
    text = "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows).encode()
    sha256 = hashlib.sha256(text).hexdigest()
    path = out.absolute()
    report = PoolReport(**{**vars(report), "path": str(path), "sha256": sha256})
    manifest = {
        "format": FORMAT, "agent": run.agent, "written_at": time.time(), "people": sorted(run.people),
        "salt": run.splits.salt, "privacy": run.hider.to_dict(), **report.to_dict(),
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    claim_salt(store, run.splits.salt)
    # Registered before the file appears, so that erasure finds it even if this process is killed in between.
    store.put_artifact(str(path), sorted(run.people))
    for place, content in (
        (path, text),
        (manifest_path(path), json.dumps(manifest, indent=1, ensure_ascii=False).encode() + b"\n"),
    ):
        write_whole(place, content)
    return report


@dataclass
class _Pool:
    """One pass over the rollouts of an agent."""

    store: Store
    agent: str
    settings: PoolSettings
    key: Path | None
    people: set[str] = field(default_factory=set)
    left_out: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    seen: int = 0

    def __post_init__(self) -> None:
        chosen = self.settings
        self.selection = Selection(
            tenants=tuple(chosen.tenants), require_consent=chosen.require_consent, task_types=tuple(chosen.task_types)
        )
        self.splits, self.profile = SplitFinder(self.store), Profile()
        key = None if chosen.privacy == "off" else self.key
        self.hider = Hider(chosen.privacy, key, declared=DeclaredValues(self.store))
        self.tasks: dict[str, _Candidate] = defaultdict(_Candidate)

    def read(self, now: float) -> None:
        """Reads all rollouts of production once, newest last."""
        self.store.flush()
        r, forgotten = _ROLLOUTS.c, self.store.forgotten()
        since = [] if self.settings.since_days is None else [r.started_at >= now - 86400 * self.settings.since_days]
        conditions = [
            *drawn(self.selection), r.version.startswith(f"{self.agent}@", autoescape=True), r.phase == "deployed",
            r.status != "running", *since,
        ]  # fmt: skip
        columns = [r.id, r.inputs_json, r.task_type, r.status, r.score, r.human_rating, r.data_subject, r.tenant]
        query = sa.select(*columns).where(*conditions, *permitted(self.selection)).order_by(r.started_at, r.id)
        with snapshot(self.store) as connection:
            count = sa.select(sa.func.count()).select_from(_ROLLOUTS).where(*conditions)
            whole = int(connection.execute(count).scalar() or 0)
            for row in connection.execute(query).mappings():
                self._see(row, forgotten)
        if (refused := whole - self.seen) > 0:
            self.left_out["of other tenants or without consent"] = refused

    def _see(self, row: Any, forgotten: Forgotten) -> None:
        self.seen += 1
        if row["data_subject"] and forgotten.covers(subject_digest(row["data_subject"]), row["tenant"]):
            self.left_out["of erased people"] += 1
            return
        inputs, value = loaded(row["inputs_json"]), row["human_rating"]
        value = row["score"] if value is None else value
        problem = (
            "ended by an error of a model or judge" if row["status"] == "error"
            else "without inputs" if not inputs
            else "unscored" if value is None
            else None
        )  # fmt: skip
        if problem is not None:
            self.problems[problem] += 1
            return
        key = task_key(inputs)
        if key not in self.tasks:
            self.profile.add(row["task_type"], inputs)
        else:
            self.profile.types[row["task_type"]] += 1
        task = self.tasks[key]
        task.newest, task.at, task.task_type = row["id"], self.seen, row["task_type"]
        task.count, task.failed = task.count + 1, task.failed + (row["status"] == "failed")
        task.total += float(value)

    def chosen(self) -> list[str]:
        """Keys of the tasks: at most `max_tasks`, equally many of each type as far as it has them.

        Of a type the hard ones come first, and the newer before the older ones, so that the pool follows production.
        """
        by_type: dict[str, list[str]] = defaultdict(list)
        for key in sorted(self.tasks, key=lambda key: (not self.tasks[key].is_hard, -self.tasks[key].at)):
            by_type[self.tasks[key].task_type].append(key)
        if (dropped := len(self.tasks) - self.settings.max_tasks) > 0:
            self.left_out["tasks beyond max_tasks"] = dropped
        keys, left = list[str](), self.settings.max_tasks
        for at, kind in enumerate(sorted(by_type, key=lambda kind: (len(by_type[kind]), kind))):
            share = by_type[kind][: left // (len(by_type) - at)]
            keys, left = keys + share, left - len(share)
        return keys

    def rows(self, keys: list[str]) -> list[dict[str, Any]]:
        """Rows of the file, sorted by id. Of tasks that are the same after anonymization the strictest split counts."""
        rows = dict[str, dict[str, Any]]()
        for key, rollout in self._rollouts(keys):
            row = self._row(self.tasks[key], rollout)
            other = rows.get(row["id"])
            if other is not None:
                self.left_out["tasks that are equal after anonymization"] += 1
                row["split"] = max(row["split"], other["split"], key=SPLITS.index)
            rows[row["id"]] = row
        return [rows[name] for name in sorted(rows)]

    def _rollouts(self, keys: list[str]) -> Iterator[tuple[str, Rollout]]:
        of = {self.tasks[key].newest: key for key in keys}
        names = sorted(of)
        with self.store.engine.connect() as connection:
            for at in range(0, len(names), _BATCH):
                query = sa.select(_ROLLOUTS).where(_ROLLOUTS.c.id.in_(names[at : at + _BATCH]))
                for row in connection.execute(query).mappings():
                    yield of[row["id"]], rollout_of(row)

    def _row(self, task: _Candidate, rollout: Rollout) -> dict[str, Any]:
        hides = self.hider.anonymizer is not None
        metadata = {key: value for key, value in rollout.metadata.items() if not hides or key != "entities"}
        content = {
            "task_type": rollout.task_type, "inputs": dict(rollout.inputs),
            "expected": written_outputs(rollout.expected), "metadata": metadata,
        }  # fmt: skip
        row = self.hider.row(content, self.hider.known([rollout]))
        owners = {"tenant": rollout.tenant, "consent": rollout.consent}
        if rollout.data_subject:
            self.people.add(subject_digest(rollout.data_subject))
            if not hides:
                owners["data_subject"] = rollout.data_subject
        production = {"rollouts": task.count, "score": task.mean, "failed": task.failed}
        return {
            **row,
            "id": task_key(row["inputs"]),
            "split": self._split(rollout),
            **{name: value for name, value in owners.items() if value is not None},
            "metadata": {
                **row["metadata"],
                "difficulty": difficulty_of(rollout.metadata, task.mean),
                "production": production,
            },
        }

    def _split(self, rollout: Rollout) -> str:
        """The split of the recorded inputs."""
        return self.splits.of_inputs(rollout.inputs, rollout.split) or "train"

    def report(self, rows: list[dict[str, Any]], training: list[Task]) -> PoolReport:
        known = {name for task in training for name in (task.id, task.key)}
        clean = 1 - self.problems.total() / self.seen if self.seen else 0.0
        types = Counter(row["task_type"] for row in rows)
        gates = self._gates(len(rows), clean, len(types))
        return PoolReport(
            path=None, sha256=None, tasks=len(rows), new_tasks=sum(row["id"] not in known for row in rows),
            splits=dict(sorted(Counter(row["split"] for row in rows).items())), task_types=dict(sorted(types.items())),
            hard=sum(row["metadata"]["production"]["failed"] > 0 or row["metadata"]["production"]["score"] < 1 / 3
                     for row in rows),
            clean=clean, rollouts=self.seen, left_out=dict(self.left_out + self.problems), gates=gates,
            passed=all(gate["passed"] for gate in gates), drift=drift(Profile.of(training), self.profile),
        )  # fmt: skip

    def _gates(self, points: int, clean: float, types: int) -> list[dict[str, Any]]:
        settings, off = self.settings, self.settings.privacy == "off"
        state = self.hider.state
        gates: list[tuple[str, Any, Any, bool]] = [
            ("points", points, settings.min_points, points >= settings.min_points),
            ("clean", clean, settings.min_clean, clean >= settings.min_clean),
            ("task types", types, settings.min_task_types, types >= settings.min_task_types),
            (
                "privacy", "off" if off else state,
                "nothing" if off else VERIFIED if settings.privacy == "names" else PATTERNS,
                off or state == VERIFIED or (state == PATTERNS and settings.privacy != "names"),
            ),
        ]  # fmt: skip
        return [
            {"gate": name, "value": value, "required": required, "passed": passed}
            for name, value, required, passed in gates
        ]
