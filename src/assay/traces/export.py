"""Training data out of the store: read once, group by group, hidden, gated, balanced, written, in constant memory.

Everything is written beside the folder first; it takes its name only when the gates have passed, or were told not to matter.
"""

import contextlib
import json
import math
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from assay.errors import ConfigError
from assay.reprs import Shown
from assay.scrubbing import fields
from assay.traces.balance import Sampler
from assay.traces.credit import Baseline, differs_by_turn, returns
from assay.traces.export_config import ADVANTAGES, KINDS, ExportConfig
from assay.traces.formats import JSON_COLUMNS, grpo_columns, grpo_rows, preference_rows, prompt_of, sft_rows, transition_row
from assay.traces.gates import VERIFIED, GateReport, refuse_ungated
from assay.traces.hiding import Hider
from assay.traces.provenance import Provenance
from assay.traces.records import Rollout, subject_digest
from assay.traces.restrictions import SHOWN, Restrictions
from assay.traces.rows import as_json
from assay.traces.sealing import SplitFinder, claim_salt
from assay.traces.selection import Episode, Overlap, Turn, check_named, count_drawn, count_turns, left_out, read_groups, sealed_tasks
from assay.traces.shown import OwnTask
from assay.traces.store import Store
from assay.traces.target import Target
from assay.traces.writing import RowWriter, trl_files, without_gc

__all__ = ["ADVANTAGES", "KINDS", "ExportConfig", "ExportReport", "export_traces", "is_export"]

FORMAT = 1  # of the manifest
_LEARNED_FROM = ("truncated", "parse")  # calls that are not clean, and yet what a policy must learn to avoid
REPEATED = "calls answered from the response cache that another exported call was answered with"
ITSELF = "calls whose prompt demonstrates the task that they answer"
_ANSWERS = 20  # on which an export for GRPO tries the rubric's checks
_TOLD = ("selection", "gates", "balance")


@dataclass(repr=False)
class ExportReport(Shown):
    """What `export_traces` did. `to_dict()` is the `--json` object."""

    path: Path
    rows: int
    manifest: dict[str, Any]
    answers: list[tuple[Rollout, str]] = field(default_factory=list)  # of grpo: some rollouts with the text of their last call
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        keys = ("gates", "passed", "left_out", "problems", "groups_without_spread", "balance", "overlap", "privacy", "task_types", "rollouts")
        told = {key: self.manifest[key] for key in keys}
        return {"path": str(self.path), "rows": self.rows, "notes": self.notes, **told, "template": self.manifest.get("template")}


def is_export(folder: str | Path) -> bool:
    """Whether a folder is an export, of whatever kind."""
    return (Path(folder) / "manifest.json").is_file() and (Path(folder) / "data.jsonl").is_file()


def export_traces(
    store: Store,
    out: str | Path,
    config: ExportConfig,
    *,
    rubric: Mapping[str, bytes] | None = None,
    bar: Callable[[int], contextlib.AbstractContextManager[Callable[[int], None]]] | None = None,
) -> ExportReport:
    """Writes `data.jsonl` (and `data.parquet` of transitions), `manifest.json`, a dataset card, and for `sft` and `grpo` a config
    for `trl`, into the folder `out`.

    Args:
        rubric: files of the rubric that a GRPO trainer is to score completions by, by their places; the rubric's own first.
        bar: opens a progress bar for a number of transitions.
    Raises:
        ConfigError: the folder is there already, or a setting makes no sense.
        DataError: nothing to export, nothing was written.
        UngatedExport: a gate failed, nothing was written.
    """
    folder = Path(out).absolute()
    if config.kind == "grpo" and rubric is None:
        raise ConfigError("an export for GRPO needs the rubric that completions are scored by: --rubric FILE_OR_NAME")
    if folder.exists():
        raise ConfigError(f"{folder} is there already; an export never writes over another: name a new folder with --out")
    if config.privacy_key is not None and Path(config.privacy_key).absolute().is_relative_to(folder):
        raise ConfigError(f"the key {config.privacy_key} would lie in the export and travel with it: keep it elsewhere")
    store.flush()
    check_named(store, config.selection)
    splits = SplitFinder(store)
    sealed, overlap = sealed_tasks(store, splits)
    run = _Export(store, config, sealed, overlap, splits)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with bar(run.total) if bar else contextlib.nullcontext(lambda _: None) as told:
            written = run.write(scratch, told)
        manifest = run.manifest(written)
        refuse_ungated(manifest, drawn=count_drawn(store, config.selection))
        trl_files(scratch, config.kind, manifest, rubric=rubric, template=run.target.marked)
        run.save_table(scratch)
        manifest_text = json.dumps(fields(manifest, texts=True), indent=1, ensure_ascii=False, default=str)
        (scratch / "manifest.json").write_text(manifest_text + "\n", encoding="utf-8")
        os.chmod(scratch, 0o755)
        try:
            claim_salt(store, splits.salt)  # what is exported as training data now can be no test task later
            store.put_artifact(str(folder), sorted(run.people))  # before it is there: what is made from somebody is never unnamed
            os.rename(scratch, folder)
        except OSError as error:
            raise ConfigError(f"{folder} came to be while this export was written; name a new folder with --out") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return ExportReport(folder, written["data.jsonl"]["rows"], manifest, run.answers)


class _Export:
    """One pass over the store, and what it counts."""

    def __init__(self, store: Store, config: ExportConfig, sealed: set[str], overlap: Overlap, splits: SplitFinder) -> None:
        self.store, self.config, self.sealed, self.overlap, self.splits = store, config, sealed, overlap, splits
        self.target = Target(config)
        self.hider = Hider(config.privacy, config.privacy_key, JSON_COLUMNS if config.kind == "transitions" else ())
        gates = replace(config.gates, privacy="names") if config.privacy == "names" else config.gates
        self.gates = GateReport(gates, finds_names=self.hider.finds_names)
        self.left = Counter(left_out(store, config.selection))
        self.people: set[str] = set()
        self.flat_groups = self.rollouts = self.groups = 0
        self.written = Counter[str]()
        self.answers: list[tuple[Rollout, str]] = []
        self.columns: dict[str, dict[str, str]] = {"inputs": {}, "outputs": {}}
        self._task: str | None = None
        self._seen: dict[int, bool] = {}  # calls of this task, and whether only a copy from the cache was seen
        self._said_before: set[int] = set()  # SFT rows of this task
        self.provenance = Provenance()
        self.restrictions = Restrictions(store, config.selection, splits)
        self.total = count_turns(store, config.selection)
        counts, self.batch = self._survey() if config.balance.method != "none" or config.advantage == "batch" else (Counter[tuple[str, ...]](), None)
        self.sampler = Sampler(counts, config.balance)

    def _survey(self) -> tuple[Counter[tuple[str, ...]], Baseline | None]:
        """A first pass over scores and step rewards alone: rollouts by cell of the balance, the batch's baseline."""
        counts, baseline = Counter[tuple[str, ...]](), self._baseline()
        for group in self._groups(light=True):
            for episode in group:
                if self._wanted(episode):
                    counts[self._cell(episode)] += 1
                if (credited := self._credited(episode)) is not None:
                    baseline.add(credited[1])
        return counts, baseline if self.config.advantage == "batch" else None

    def _groups(self, *, light: bool = False) -> Iterator[list[Episode]]:
        config, left = self.config, None if light else self.left
        means, by_task = "difficulty" in config.balance.by, config.group_by == "task"
        return read_groups(self.store, config.selection, self.sealed, splits=self.splits, light=light, means=means, by_task=by_task, left=left)

    def _cell(self, episode: Episode) -> tuple[str, ...]:
        quality = episode.quality
        outcome = "unscored" if quality is None else "good" if quality >= self.config.min_quality else "bad"
        told = {"task_type": episode.rollout.task_type, "difficulty": episode.difficulty, "outcome": outcome}
        return tuple(told[name] for name in self.config.balance.by)

    def _wanted(self, episode: Episode) -> bool:
        """Whether the kind of export takes anything of this rollout: SFT the good ones, the others all that are scored."""
        quality = episode.quality
        if self.config.kind == "grpo":
            return True
        return quality is not None and (self.config.kind != "sft" or quality >= self.config.min_quality)

    def _credited(self, episode: Episode) -> tuple[list[float], list[float]] | None:
        """Rewards and returns by turn; None where it has no outcome, or a reward that is no finite number."""
        if episode.credited is None:
            episode.credited = self._credit(episode)
        return episode.credited or None

    def _credit(self, episode: Episode) -> tuple[list[float], list[float]] | tuple[()]:
        config = self.config
        outcome = episode.quality if config.outcome == "human" else episode.rollout.score
        if outcome is None or not 0 <= outcome <= 1:
            return ()
        rewards = [config.step_weight * reward for reward in episode.rewards]
        rewards[-1] += config.outcome_weight * outcome
        if not all(map(math.isfinite, rewards)):
            return ()
        return rewards, returns(rewards, scheme=config.returns, discount=config.discount)

    # -- writing

    def write(self, folder: Path, advance: Callable[[int], None]) -> dict[str, dict[str, Any]]:
        """Files with their rows and sha256, by name."""
        with without_gc(), RowWriter(folder, parquet=self.config.kind == "transitions") as writer:
            for group in self._groups():
                self.groups += 1
                known = self.hider.known([episode.rollout for episode in group])
                for row in self._rows(group):
                    self.written[group[0].rollout.task_type] += 1
                    writer.write(self.hider.row(row, known))
                advance(sum(len(episode.turns) for episode in group))
        self.gates.verified, self.gates.residual = self.hider.verified, self.hider.residual
        self.gates.template = self.target.to_dict() if self.target.renders else None
        return writer.files

    def _rows(self, group: list[Episode]) -> Iterator[dict[str, Any]]:
        kept = [(episode, self._usable(episode), copies) for episode in group if (copies := self._copies(episode))]
        kept = [(episode, turns, copies) for episode, turns, copies in kept if turns]
        for episode, _, _ in kept:
            self._note(episode)
        if self.config.kind == "grpo":
            episodes = [episode for episode, _, _ in kept]
            inputs, outputs = grpo_columns(episodes)
            self.columns["inputs"].update(inputs)
            self.columns["outputs"].update(dict.fromkeys(outputs, ""))
            answered = [(episode.rollout, episode.turns[-1].output) for episode in episodes if episode.rollout.status == "done"]
            self.answers += answered[: _ANSWERS - len(self.answers)]
            return grpo_rows(episodes, self.target.renderer, call=self.config.call)
        if self.config.kind == "sft":
            return self._sft_rows(kept)
        calls = self._calls(kept, self._baselines(group))
        if self.config.kind == "preferences":
            paired = [(episode, turn, credited) for episode, turn, _, credited, _ in calls]
            return preference_rows(
                paired, self.target.renderer, margin=self.config.margin, unpaired=self.config.unpaired, good=self.config.min_quality
            )
        return self._transition_rows(kept, calls)

    def _sft_rows(self, kept: list[tuple[Episode, list[Turn], int]]) -> Iterator[dict[str, Any]]:
        for episode, turns, copies in kept:
            for row in sft_rows(episode, turns, self.target.renderer, whole=self.config.whole, demos=self.config.demos):
                key = hash(as_json([row.get("prompt"), row.get("completion"), row.get("messages")]))
                if key in self._said_before:
                    self.left["rows that say what another of their task says"] += 1
                    continue
                self._said_before.add(key)
                if self.config.whole:
                    self.target.see_whole(row)
                yield from [row] * copies

    def _transition_rows(
        self, kept: list[tuple[Episode, list[Turn], int]], calls: Iterator[tuple[Episode, Turn, float, float, float]]
    ) -> Iterator[dict[str, Any]]:  # fmt: skip
        shares = {episode.rollout.id: (copies, 1 / len(turns)) for episode, turns, copies in kept}
        for episode, turn, reward, credited, advantage in calls:
            copies, weight = shares[episode.rollout.id]
            yield from [transition_row(episode, turn, reward=reward, credited=credited, advantage=advantage, weight=weight)] * copies

    def _calls(
        self, kept: list[tuple[Episode, list[Turn], int]], baselines: dict[str, Baseline]
    ) -> Iterator[tuple[Episode, Turn, float, float, float]]:
        """Each usable call with its reward, return and advantage."""
        for episode, turns, _ in kept:
            if (found := self._credited(episode)) is None:
                continue
            rewards, credited = found
            baseline = baselines.get(self._group_of(episode))
            advantages = baseline.advantages(credited) if baseline is not None else [0.0] * len(rewards)
            places = {turn.t: at for at, turn in enumerate(episode.turns)}
            for at, turn in ((places[turn.t], turn) for turn in turns):
                yield episode, turn, rewards[at], credited[at], advantages[at]

    def _group_of(self, episode: Episode) -> str:
        return ("good" if (episode.quality or 0.0) >= self.config.min_quality else "bad") if self.config.by_outcome else ""

    def _baseline(self) -> Baseline:
        return Baseline(every_turn=differs_by_turn(self.config.returns, self.config.discount))

    def _baselines(self, group: list[Episode]) -> dict[str, Baseline]:
        """Of the whole group, before the balance draws from it."""
        if self.config.advantage == "none":
            return {}
        if self.batch is not None:
            return {"": self.batch}
        found: dict[str, Baseline] = {}
        for episode in group:
            if (credited := self._credited(episode)) is not None:
                found.setdefault(self._group_of(episode), self._baseline()).add(credited[1])
        self.flat_groups += sum(not baseline.spread for baseline in found.values())
        return found

    def _copies(self, episode: Episode) -> int:
        if self._wanted(episode) and self.config.kind in ("transitions", "preferences") and self._credited(episode) is None:
            self.left["without an outcome, or with a reward that is no finite number"] += 1
            for _ in episode.turns:
                self.gates.see(episode.rollout.task_type, "reward", episode.rollout.run_id)
            return 0
        if not self._wanted(episode):
            self.left["unscored" if episode.quality is None else f"below the quality of {self.config.min_quality:g}"] += 1
            if episode.quality is None:
                for turn in episode.turns:
                    problem = turn.problem(episode.rollout, turn is episode.turns[-1]) or "unscored"
                    self.gates.see(episode.rollout.task_type, problem, episode.rollout.run_id)
            return 0
        if self.config.balance.method == "none":
            cell = self._cell(episode)
            for table in (self.sampler.before, self.sampler.after):
                table[cell] = table.get(cell, 0) + 1
            return 1
        copies = self.sampler.take(self._cell(episode))
        if not copies:
            self.left["by the balance"] += 1
        return copies

    def _usable(self, episode: Episode) -> list[Turn]:
        """The calls that become rows. All of them are counted by the gates, with what is wrong with them."""
        rollout, usable = episode.rollout, []
        if rollout.task_id != self._task:
            self._task, self._seen, self._said_before = rollout.task_id, {}, set()
        refused = {turn.t for turn in episode.turns if self.restrictions.refuses(turn, rollout.inputs)}
        self.left[SHOWN] += len(refused)
        itself = self._showing_itself(episode) - refused
        self.left[ITSELF] += len(itself)
        refused |= itself
        if refused and (self.config.kind == "grpo" or self.config.whole):
            return []  # their rows are made of the whole rollout
        for turn in episode.turns:
            if turn.t in refused:
                continue
            problem = turn.problem(rollout, turn is episode.turns[-1])
            if problem is None and not turn.model:
                problem = "provenance"
            if problem is None and not self._first_time(turn):
                self.left[REPEATED] += 1
                continue
            problem = problem or self.target.problem(turn)
            self.gates.see(rollout.task_type, problem, rollout.run_id)
            if problem is None or (problem in _LEARNED_FROM and self.config.kind in ("transitions", "preferences")):
                usable.append(turn)
        return usable

    def _showing_itself(self, episode: Episode) -> set[int]:
        """Turns whose exported prompt would demonstrate their own task, so that a model would learn to copy."""
        own, found = OwnTask(episode.rollout.inputs), set[int]()
        for turn in episode.turns:
            prompt = prompt_of(turn, demos=self.config.demos)
            if own.possible(turn.request_json) and own.demonstrated(prompt, instructions=not turn.request.get("dialect")):
                found.add(turn.t)
            else:
                own.answered(prompt, turn.output)
        return found

    def _first_time(self, turn: Turn) -> bool:
        """Whether this call, answered so, is new in its task. A group's rollouts may well say the same: what is doubled is an
        answer from the cache beside the one it was copied from, whichever is read first."""
        key = hash((turn.request_json, turn.output, turn.tools_json))
        before = self._seen.get(key)
        if before is None or (not turn.cached and not before):
            self._seen[key] = bool(turn.cached)
            return True
        self._seen[key] = before and turn.cached
        return False

    def _note(self, episode: Episode) -> None:
        rollout = episode.rollout
        self.rollouts += 1
        self.overlap.see(rollout.task_id, rollout.inputs)
        if rollout.data_subject:
            self.people.add(subject_digest(rollout.data_subject))
        for turn in episode.turns:
            self.people |= self.restrictions.people(turn)
        self.provenance.see(episode, split=self.splits.of_inputs(rollout.inputs, rollout.split))

    # -- telling

    def manifest(self, files: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        from assay import __version__

        config = self.config
        told = {key: value for key, value in asdict(config).items() if key not in (*_TOLD, "privacy_key")}
        return {
            "format": FORMAT, "assay": __version__, "kind": config.kind, "rows": files["data.jsonl"]["rows"],
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "files": dict(files), "config": told,
            "filters": {**asdict(config.selection), "min_quality": config.min_quality if config.kind == "sft" else None},
            "gates": self.gates.to_list(), "passed": self.gates.passed, "gated": config.gates.gated or self.gates.passed,
            "transitions": self.gates.transitions, "rollouts": self.rollouts, "groups": self.groups,
            "groups_without_spread": self.flat_groups, "problems": dict(self.gates.problems),
            **({"template": self.gates.template} if self.gates.template is not None else {}),
            "left_out": {reason: count for reason, count in self.left.items() if count},
            "task_types": self.hider.names(self.written), "sealed_tasks": len(self.sealed), "overlap": self.hider.plain(self.overlap.to_dict()),
            "balance": {**asdict(config.balance), "before": self._table(self.sampler.before), "after": self._table(self.sampler.after)},
            **({"columns": {"inputs": self.columns["inputs"], "outputs": sorted(self.columns["outputs"])}} if config.kind == "grpo" else {}),
            "privacy": {**self.hider.to_dict(), "state": self.gates.state, "verified": self.gates.state == VERIFIED}, "licence": config.licence,
            "salt": self.splits.salt,
            "tenants": list(config.selection.tenants), **{name: self.hider.names(counts) for name, counts in self.provenance.to_dict().items()},
        }  # fmt: skip

    def _table(self, counts: Mapping[tuple[str, ...], int]) -> dict[str, int]:
        return self.hider.names({" / ".join(cell): count for cell, count in sorted(counts.items())})

    def save_table(self, folder: Path) -> None:
        """What reverses the surrogates, encrypted; only where a key kept apart was named."""
        self.hider.save_table(folder / "surrogates.enc")
