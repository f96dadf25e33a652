"""Exports training data from the store: selects, anonymizes, gates, balances and writes rollouts, in constant memory.

Files are written to a temporary folder, which is renamed when all enforced gates have passed. A pass over the store
decides what becomes a row, writes the rows and counts what is left out.
"""

import contextlib
import math
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from assay.errors import ConfigError, FailureKind
from assay.models.calls import is_agent_failure
from assay.models.chat_templates import TemplateRefused, find_template, hub_name
from assay.models.registry import tokenizer_of
from assay.models.roles import DEFAULT_WEIGHTS
from assay.support.numbers import counted
from assay.support.package import __version__
from assay.support.report import Report, Table, shortened
from assay.support.scrubbing import fields
from assay.support.values import json_text
from assay.traces.credit import AgentBaselines, Baseline, differs_by_turn, returns
from assay.traces.export.files import RowWriter, trl_files, without_gc
from assay.traces.export.hiding import DeclaredValues, Hider
from assay.traces.export.rendering import (
    Labels,
    RowRenderer,
    grpo_columns,
    grpo_rows,
    labelled_rows,
    marked_by_trl,
    preference_rows,
    prompt_of,
    prompted_turns,
    sft_rows,
    shows_tools,
    trained_parts,
    training_template,
)
from assay.traces.export.restrictions import RESTRICTED_DEMO, RESTRICTED_TASK, Restrictions
from assay.traces.export.selection import (
    Episode,
    Overlap,
    Turn,
    check_named,
    count_drawn,
    count_turns,
    exclusion_counts,
    read_groups,
    sealed_tasks,
)
from assay.traces.export.settings import ExportConfig, GateReport, Sampler, gates_table, refuse_ungated
from assay.traces.export.transitions import FORMAT, JSON_COLUMNS, WITHOUT_TEXT, transition_row
from assay.traces.records import Rollout, subject_digest
from assay.traces.shown import OwnTask
from assay.traces.store import Store
from assay.traces.store.rows import as_json
from assay.traces.store.sealing import SplitFinder, claim_salt

# -- The model to be trained on an export: its chat template and how it renders the rows. Writes no files.


TEMPLATE = "template"  # problem of a call whose answer the template does not render


class Target:
    """Chat template of the model in an export's settings, with counts of the checked calls.

    Raises:
        ModelError: The embedded model does not exist.
    """

    def __init__(self, config: ExportConfig) -> None:
        self.name, self.demos, self.whole = config.model, config.demos, config.whole
        self.renders = config.kind != "transitions"  # transitions are trained on their token ids
        self.checks = config.kind in ("sft", "preferences")  # grpo writes prompts only
        self.template = find_template(config.model) if self.renders else None
        # TRL's GRPO trainer never renders the tools of a row
        self.renderer = RowRenderer(
            self.template, "text" if (config.kind, config.tools) == ("grpo", "auto") else config.tools
        )
        marked = self.template is not None and config.whole and not shows_tools(self.template)
        self.marked = training_template(self.template) if self.template is not None and marked else None

    def problem(self, turn: Turn) -> str | None:
        """`TEMPLATE` if a model cannot be trained on this call's answer, else None."""
        refused = self.checks and self.renderer.check(*trained_parts(turn, demos=self.demos)) is not None
        return TEMPLATE if refused else None

    def see_whole(self, row: Mapping[str, Any]) -> None:
        """Discard the marked template if it renders this conversation differently from the model's template."""
        if self.marked is None or self.template is None:
            return
        try:
            if self.marked.render(row["messages"]) != self.template.render(row["messages"]):
                self.marked = None
        except TemplateRefused:
            self.marked = None

    @property
    def masks(self) -> bool | None:
        """Whether TRL can restrict the loss to the assistant's text; None if that is not needed or not known."""
        if not self.whole or self.template is None:
            return None
        return self.template.marks_generation or self.marked is not None or marked_by_trl(self.template)

    def to_dict(self) -> dict[str, Any]:
        """For the manifest: the model, whether and where its template was found, and the counts of the calls."""
        source = self.template.source if self.template else None
        model = {"model": self.name, "trained_as": hub_name(self.name), "found": self.template is not None}
        note = f"the chat template of {self.name} is not installed; whether it renders the answers was not checked"
        unchecked = {"calls": 0, "note": note} if self.template is None else {}
        return {**model, "source": source, "masks": self.masks, **self.renderer.to_dict(), **unchecked}


# -- Provenance of an export: counts of the models, tokenizers, programs, rubrics, consents, runs and splits.


_MOST_RUNS = 200  # with more runs, only their number is reported


class Provenance:
    """Counts rollouts by origin."""

    def __init__(self) -> None:
        names = ("models", "tokenizers", "programs", "rubrics", "consent", "runs", "splits")
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in names}

    def see(self, episode: Episode, *, split: str) -> None:
        """Count a rollout."""
        rollout, counts = episode.rollout, self._counts
        models = {
            f"{turn.model}@{turn.weights[:12] or '?'}" + "".join(f"+{a[:12]}" for a in orjson.loads(turn.adapters_json))
            for turn in episode.turns
        }
        counts["models"].update(models)
        counts["tokenizers"].update({tokenizer_of(turn.weights) or "not known" for turn in episode.turns})
        counts["programs"][f"{rollout.program}@{rollout.program_version}"] += 1
        counts["rubrics"][rollout.rubric or "none"] += 1
        counts["consent"]["given" if rollout.consent else "not asked"] += 1
        counts["runs"][rollout.run_id or "none"] += 1
        counts["splits"][split or "none"] += 1

    def to_dict(self) -> dict[str, Counter[str]]:
        """Counts by kind and name. More than 200 runs are reported as one number under `runs`."""
        runs = self._counts["runs"]
        return {**self._counts, "runs": runs if len(runs) <= _MOST_RUNS else Counter({"runs": len(runs)})}


# -- Export pass.


_LEARNED_FROM = ("truncated", "parse")  # problems that a policy must learn to avoid: exported although not clean
REPEATED = "cached copies of calls that are exported"
OTHER_AGENT = "calls of other agents"
RETRIED = "failed calls that were made again"
OWN_FAILURE = "calls in which a scored rollout failed"  # of the agent, not of the record
ITSELF = "calls whose prompt demonstrates their own task"
_ANSWERS = 20  # answers of a GRPO export on which the reward is tried; at most half of them have one score
_SEPARATE_SECTIONS = ("selection", "gates", "balance", "privacy_key")  # not in the manifest's "config"


class ExportPass:
    """One pass over the store with its counters.

    Args:
        sealed: Keys of the inputs of gate and test tasks, see `sealed_tasks`.
        overlap: Text overlap with sealed inputs, see `sealed_tasks`.
        splits: Finds the split of a task.
    """

    def __init__(
        self, store: Store, config: ExportConfig, sealed: set[str], overlap: Overlap, splits: SplitFinder
    ) -> None:
        self.store, self.config, self.sealed, self.overlap, self.splits = store, config, sealed, overlap, splits
        self.target = Target(config)
        encoded, unchanged = (JSON_COLUMNS, WITHOUT_TEXT) if config.kind == "transitions" else ((), frozenset[str]())
        if config.kind in ("sft", "preferences"):
            unchanged = frozenset({"rollout"})
        self.hider = Hider(
            config.privacy, config.privacy_key, encoded, unchanged=unchanged, declared=DeclaredValues(store)
        )
        gates = replace(config.gates, privacy="names") if config.privacy == "names" else config.gates
        self.gates = GateReport(gates)
        self.exclusions = Counter(exclusion_counts(store, config.selection))
        self.people: set[str] = set()
        self.zero_variance_groups = self.rollouts = self.groups = 0
        self.written = Counter[str]()
        self.answers: list[tuple[Rollout, Turn]] = []
        self.columns: dict[str, dict[str, str]] = {"inputs": {}, "outputs": {}}
        self._task: str | None = None
        self._cached_only: dict[int, bool] = {}  # calls of this task, and whether only a copy from the cache was seen
        self._row_keys: set[int] = set()  # SFT rows of this task
        self.provenance = Provenance()
        self.restrictions = Restrictions(store, config.selection, splits)
        self.total = count_turns(store, config.selection)
        self.batch: AgentBaselines | None = None
        surveyed = config.balance.method != "none" or config.advantage == "batch"
        self.sampler = Sampler(self._survey() if surveyed else {}, config.balance)

    def _survey(self) -> Counter[tuple[str, ...]]:
        """First pass over scores and step rewards: number of rollouts by balance cell. Sets the baseline of the
        batch.
        """
        counts, baseline = Counter[tuple[str, ...]](), self._baseline()
        for group in self._groups(light=True):
            for episode in group:
                if self._is_exported(episode):
                    counts[self._cell(episode)] += 1
                if (credited := self._credited(episode)) is not None:
                    baseline.add(credited[1], episode.agents)
        self.batch = baseline if self.config.advantage == "batch" else None
        return counts

    def _groups(self, *, light: bool = False) -> Iterator[list[Episode]]:
        config = self.config
        return read_groups(
            self.store, config.selection, self.sealed, splits=self.splits, light=light,
            means="difficulty" in config.balance.by, by_task=config.group_by == "task",
            exclusions=None if light else self.exclusions,
        )  # fmt: skip

    def _cell(self, episode: Episode) -> tuple[str, ...]:
        quality = episode.quality
        outcome = "unscored" if quality is None else "good" if quality >= self.config.min_quality else "bad"
        values = {"task_type": episode.rollout.task_type, "difficulty": episode.difficulty, "outcome": outcome}
        return tuple(values[name] for name in self.config.balance.by)

    def _is_exported(self, episode: Episode) -> bool:
        """Whether this rollout is exported: all for GRPO, for SFT those with `min_quality`, for the others all
        scored.
        """
        quality = episode.quality
        if self.config.kind == "grpo":
            return True
        return quality is not None and (self.config.kind != "sft" or quality >= self.config.min_quality)

    def _credited(self, episode: Episode) -> tuple[list[float], list[float]] | None:
        """Rewards and returns by turn; None without an outcome or with a non-finite reward."""
        if episode.credited is None:
            episode.credited = self._credit(episode)
        return episode.credited or None

    def _credit(self, episode: Episode) -> tuple[list[float], list[float]] | tuple[()]:
        config = self.config
        outcome = episode.quality if config.outcome == "human" else episode.rollout.score
        if outcome is None or not 0 <= outcome <= 1:
            return ()
        rewards = [config.step_weight * reward for reward in episode.rewards]
        rewards[-1] += outcome
        if not all(map(math.isfinite, rewards)):
            return ()
        return rewards, returns(rewards, scheme=config.returns, discount=config.discount)

    def write(self, folder: Path, advance: Callable[[int], None], *, parquet: bool = True) -> dict[str, dict[str, Any]]:
        """Write all rows into a folder.

        Args:
            parquet: Whether transitions are also written as Parquet. Its library takes about 80 MB of memory.
        Returns:
            Rows, bytes and sha256 by file name.
        """
        encoded = self.config.kind == "transitions"
        labels = Labels()
        types: list[str] = []  # task type of each KTO row
        with without_gc(), RowWriter(folder, parquet=parquet and encoded, encoded=encoded) as writer:
            for group in self._groups():
                self.groups += 1
                turns = [turn for episode in group for turn in episode.turns]
                known = self.hider.known([episode.rollout for episode in group], turns)
                for row in self._rows(group):
                    self.written[group[0].rollout.task_type] += 1
                    row = self.hider.row(row, known)
                    writer.write(row)
                    if self.config.kind == "preferences" and self.config.unpaired:
                        labels.see(row)
                        types.append(group[0].rollout.task_type)
                advance(len(turns))
            contradictions = labels.contradictions()
            writer.leave_out(contradictions)
        self.written -= Counter(types[number] for number in contradictions)  # without types that have no rows
        self.exclusions["rows whose answer has both labels"] += len(contradictions)
        self.gates.state, self.gates.missing = self.hider.state, self.hider.missing
        self.gates.template = self.target.to_dict() if self.target.renders else None
        return writer.files

    def _rows(self, group: list[Episode]) -> Iterator[dict[str, Any]]:
        selected = [episode for episode in group if self._takes(episode)]
        for episode in selected:
            self._note(episode)
        if self.config.kind == "grpo":
            return self._grpo_rows(selected)
        if self.config.kind == "sft":
            return self._sft_rows(selected)
        calls = self._calls(selected, self._baseline_of(group))
        if self.config.kind == "transitions":
            return (transition_row(episode, turn) for episode, turn in calls for _ in range(episode.copies))
        if self.config.unpaired:
            return labelled_rows(calls, self.target.renderer, good=self.config.min_quality)
        return preference_rows(calls, self.target.renderer, margin=self.config.margin)

    def _takes(self, episode: Episode) -> bool:
        """Whether a rollout has rows. Sets their number of copies and the calls that become rows."""
        episode.copies = self._copies(episode)
        episode.usable = self._usable(episode) if episode.copies else []
        return bool(episode.usable)

    def _grpo_rows(self, episodes: list[Episode]) -> Iterator[dict[str, Any]]:
        inputs, outputs = grpo_columns(episodes)
        self.columns["inputs"].update(inputs)
        self.columns["outputs"].update(dict.fromkeys(outputs, ""))
        for rollout, episode in ((episode.rollout, episode) for episode in episodes):
            for turn in prompted_turns(episode, self.config.call) if rollout.status == "done" else ():
                alike = sum(known.score == rollout.score for known, _ in self.answers)
                if len(self.answers) < _ANSWERS and alike < _ANSWERS // 2:
                    self.answers.append((rollout, turn))
        return grpo_rows(episodes, self.target.renderer, call=self.config.call)

    def _sft_rows(self, selected: list[Episode]) -> Iterator[dict[str, Any]]:
        for episode in selected:
            for row in sft_rows(episode, self.target.renderer, whole=self.config.whole, demos=self.config.demos):
                key = hash(as_json([row.get("prompt"), row.get("completion"), row.get("messages")]))
                if key in self._row_keys:
                    self.exclusions["duplicate rows of a task"] += 1
                    continue
                self._row_keys.add(key)
                if self.config.whole:
                    self.target.see_whole(row)
                yield from [row] * episode.copies

    def _calls(self, selected: list[Episode], baseline: AgentBaselines | None) -> Iterator[tuple[Episode, Turn]]:
        """Usable calls, with their reward, return and advantage."""
        for episode in selected:
            if (credit := self._credited(episode)) is None:
                continue
            rewards, credited = credit
            advantages = baseline.advantages(credited, episode.agents) if baseline is not None else [0.0] * len(rewards)
            for at, turn in enumerate(episode.turns):
                turn.reward, turn.credited, turn.advantage = rewards[at], credited[at], advantages[at]
            yield from ((episode, turn) for turn in episode.usable)

    def _baseline(self) -> AgentBaselines:
        every_turn = differs_by_turn(self.config.returns, self.config.discount)
        return AgentBaselines(lambda: Baseline(every_turn=every_turn))

    def _baseline_of(self, group: list[Episode]) -> AgentBaselines | None:
        """Baseline of a group, over all its rollouts, before balancing; None if it has none."""
        if self.config.advantage == "none" or self.batch is not None:
            return self.batch
        credits = [(credited, episode) for episode in group if (credited := self._credited(episode)) is not None]
        if not credits:
            return None
        baseline = self._baseline()
        for (_, returned), episode in credits:
            baseline.add(returned, episode.agents)
        self.zero_variance_groups += not baseline.has_variance
        return baseline

    def _copies(self, episode: Episode) -> int:
        quality, run = episode.quality, episode.rollout.run_id
        if not self._is_exported(episode):
            below = f"below the quality of {self.config.min_quality:g}"
            self.exclusions["unscored" if quality is None else below] += 1
            for turn in episode.turns if quality is None else ():
                if not _is_retried(turn, episode):
                    problem = turn.problem(episode.rollout, turn is episode.turns[-1]) or "unscored"
                    self.gates.see(episode.rollout.task_type, problem, run)
            return 0
        if self.config.kind in ("transitions", "preferences") and self._credited(episode) is None:
            self.exclusions["without an outcome or with a non-finite reward"] += 1
            for _ in episode.turns:
                self.gates.see(episode.rollout.task_type, "reward", run)
            return 0
        cell = self._cell(episode)
        if self.config.balance.method == "none":
            for table in (self.sampler.before, self.sampler.after):
                table[cell] = table.get(cell, 0) + 1
            return 1
        copies = self.sampler.take(cell)
        self.exclusions["by balancing"] += not copies
        return copies

    def _usable(self, episode: Episode) -> list[Turn]:
        """Calls of a rollout that become rows. The gates count all calls with their problems."""
        rollout, usable = episode.rollout, []
        if rollout.task_id != self._task:
            self._task, self._cached_only, self._row_keys = rollout.task_id, {}, set()
        if self.restrictions.refuses_task(rollout):
            self.exclusions[RESTRICTED_TASK] += 1
            return []
        refused = {turn.t for turn in episode.turns if self.restrictions.refuses(turn, rollout.inputs)}
        self.exclusions[RESTRICTED_DEMO] += len(refused)
        copied = self._turns_with_own_task(episode) - refused
        self.exclusions[ITSELF] += len(copied)
        refused |= copied
        if refused and (self.config.kind == "grpo" or self.config.whole):
            return []  # a row of these kinds contains the whole rollout
        for turn in episode.turns:
            if turn.t in refused:
                continue
            if self.config.agents and turn.agent not in self.config.agents:
                self.exclusions[OTHER_AGENT] += 1
                continue
            if _is_retried(turn, episode):
                self.exclusions[RETRIED] += 1
                continue
            problem = turn.problem(rollout, turn is episode.turns[-1])
            if problem is None and not turn.model:
                problem = "provenance"
            if problem is None and not self._first_time(turn):
                self.exclusions[REPEATED] += 1
                continue
            problem = problem or self.target.problem(turn)
            if problem is not None and _is_own_failure(turn, problem, rollout):
                self.exclusions[OWN_FAILURE] += 1
            else:
                self.gates.see(rollout.task_type, problem, rollout.run_id)
            if problem is None or (problem in _LEARNED_FROM and self.config.kind in ("transitions", "preferences")):
                usable.append(turn)
        return usable

    def _turns_with_own_task(self, episode: Episode) -> set[int]:
        """Turns whose exported prompt demonstrates their own task: a model trained on them learns to copy."""
        own_task, turns = OwnTask(episode.rollout.inputs), set[int]()
        for turn in episode.turns:
            prompt = prompt_of(turn, demos=self.config.demos)
            if own_task.possible(turn.request_json) and own_task.demonstrated(
                prompt, instructions=not turn.request.get("dialect")
            ):
                turns.add(turn.t)
            else:
                own_task.answered(prompt, turn.output)
        return turns

    def _first_time(self, turn: Turn) -> bool:
        """Whether this call is not a cached copy of a call of its task that is exported, or the original of such a
        copy.

        Rollouts of a group may have identical uncached answers; all of them are exported.
        """
        key = hash((turn.request_json, turn.output, turn.tools_json))
        before = self._cached_only.get(key)
        if before is None or (not turn.cached and not before):
            self._cached_only[key] = bool(turn.cached)
            return True
        self._cached_only[key] = before and turn.cached
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

    def manifest(self, files: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        config = self.config
        settings = {key: value for key, value in asdict(config).items() if key not in _SEPARATE_SECTIONS}
        return {
            "format": FORMAT,
            "assay": __version__,
            "kind": config.kind,
            "rows": files["data.jsonl"]["rows"],
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "files": dict(files),
            "config": settings,
            "filters": {
                **asdict(config.selection),
                "min_quality": config.min_quality if config.kind == "sft" else None,
            },
            "gates": self.gates.to_list(),
            "passed": self.gates.passed,
            "gated": config.gates.gated or self.gates.passed,
            "transitions": self.gates.transitions,
            "rollouts": self.rollouts,
            "groups": self.groups,
            "groups_without_spread": self.zero_variance_groups,
            "problems": dict(self.gates.problems),
            **({"template": self.gates.template} if self.gates.template is not None else {}),
            "left_out": {reason: count for reason, count in self.exclusions.items() if count},
            "task_types": self.hider.names(self.written),
            "sealed_tasks": len(self.sealed),
            "overlap": self.hider.plain(self.overlap.to_dict()),
            "balance": {
                **asdict(config.balance),
                "before": self._table(self.sampler.before),
                "after": self._table(self.sampler.after),
            },
            **(
                {"columns": {**self.columns, "outputs": sorted(self.columns["outputs"])}}
                if config.kind == "grpo"
                else {}
            ),
            "privacy": self.hider.to_dict(),
            "salt": self.splits.salt,
            "tenants": list(config.selection.tenants),
            **{name: self.hider.names(counts) for name, counts in self.provenance.to_dict().items()},
        }

    def _table(self, counts: Mapping[tuple[str, ...], int]) -> dict[str, int]:
        return self.hider.names({" / ".join(cell): count for cell, count in sorted(counts.items())})

    def save_table(self, folder: Path) -> None:
        """Write the encrypted table that reverses the surrogates. Does nothing without a key file."""
        self.hider.save_table(folder / "surrogates.enc")


def _is_retried(turn: Turn, episode: Episode) -> bool:
    """Whether a call failed, such as with status 429, and its rollout made the same request again."""
    return turn.error is not None and any(
        other.t > turn.t and other.request_json == turn.request_json for other in episode.turns
    )


def _is_own_failure(turn: Turn, problem: str, rollout: Rollout) -> bool:
    """Whether the problem of a call is the failure for which its rollout has its score."""
    if rollout.status != "failed" or rollout.score is None:
        return False
    kind = None if turn.failure is None else FailureKind(turn.failure)
    return problem in _LEARNED_FROM or (problem == "error" and kind is not None and is_agent_failure(kind))


_SHOWN = (  # parts of the manifest that are in the report
    "gates", "passed", "left_out", "problems", "groups_without_spread", "balance", "overlap", "privacy", "task_types",
    "rollouts",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, repr=False)
class ExportReport(Report):
    """Result of `export_traces`. `to_dict()` is the `--json` object."""

    path: Path
    rows: int
    manifest: dict[str, Any]
    # kind="grpo" only: up to 20 rollouts with the text of their last call, to try the rubric's checks on
    answers: list[tuple[Rollout, Turn]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def _facts(self) -> list[tuple[str, str]]:
        failed = [gate["gate"] for gate in self.manifest["gates"] if not gate["passed"]]
        return super()._facts() + ([("failed_gates", shortened(", ".join(failed)))] if failed else [])

    def to_dict(self) -> dict[str, Any]:
        shown = {"path": str(self.path), "rows": self.rows, "notes": self.notes}
        return shown | {key: self.manifest[key] for key in _SHOWN} | {"template": self.manifest.get("template")}

    def lines(self) -> Iterator[str | Table]:
        data, manifest = self.to_dict(), self.manifest
        yield gates_table(data["gates"])
        if data["balance"]["method"] != "none":
            before, after = data["balance"]["before"], data["balance"]["after"]
            cells = [(cell, str(before[cell]), str(after.get(cell, 0))) for cell in before]
            yield Table(
                title=f"balance: {data['balance']['method']}", header=("rollouts of", "before", "after"), rows=cells
            )
        title = f"{counted(self.rows, 'rows')} for {manifest['kind']} from {counted(data['rollouts'], 'rollouts')}"
        yield Table(title=title, rows=list(_facts_of(data)))
        privacy = data["privacy"]
        yield from (f"note: {note}" for note in [*([privacy["note"]] if privacy.get("note") else []), *self.notes])
        yield str(self.path)


def _facts_of(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What the rows are, and what is not in them."""
    if template := data.get("template"):
        by_default = ", the default `model`" if template["model"] == DEFAULT_WEIGHTS else ""
        yield "rows are for the chat template of", f"{template['model']}{by_default}"
    yield from ((f"rows of {kind}", str(count)) for kind, count in data["task_types"].items())
    yield from ((f"left out: {reason}", str(count)) for reason, count in data["left_out"].items())
    yield from ((f"calls with a problem: {problem}", str(count)) for problem, count in data["problems"].items())
    if data["groups_without_spread"]:
        yield "zero-variance groups (advantage 0)", str(data["groups_without_spread"])
    overlap, privacy = data["overlap"], data["privacy"]
    if overlap["shared"]:
        text = f"{overlap['shared']} of {overlap['tasks']}"
        yield f"tasks that share {overlap['ngram']} words with a sealed one", text
    replaced = ", ".join(f"{count} {name}" for name, count in privacy.get("found", {}).items()) or "nothing"
    result = "not replaced" if privacy["engine"] == "off" else f"{replaced} replaced; {privacy['state']}"
    yield "personal data", f"{privacy['engine']}: {result}"
    for language, types in privacy.get("recall", {}).items():
        shares = (f"{name} {result['found']}/{result['planted']}" for name, result in types.items())
        yield f"planted values found, {language}", ", ".join(shares)


def is_export(folder: str | Path) -> bool:
    """Whether a folder is an export of any kind."""
    return (Path(folder) / "manifest.json").is_file() and (Path(folder) / "data.jsonl").is_file()


def export_traces(
    store: Store,
    out: str | Path,
    config: ExportConfig,
    *,
    rubric: Mapping[str, bytes] | None = None,
    check_reward: Callable[[Mapping[str, Any], Sequence[tuple[Rollout, Turn]]], Sequence[str]] | None = None,
    bar: Callable[[int], contextlib.AbstractContextManager[Callable[[int], None]]] | None = None,
) -> ExportReport:
    """Export training data into a new folder.

    Writes `data.jsonl`, `manifest.json`, a dataset card, `data.parquet` for transitions, and a `trl` configuration for
    the other kinds.

    Args:
        store: Store to read from.
        out: Folder to create.
        config: Settings of the export.
        rubric: Files of the rubric that scores GRPO completions, by relative path; the rubric's YAML file comes first.
        check_reward: Called with the manifest and some exported answers with their rollouts; raises `DataError` if the
            reward says nothing about them. Returns the criteria that the reward leaves out.
        bar: Opens a progress bar for a number of transitions.
    Raises:
        ConfigError: The folder exists, or a setting is invalid.
        DataError: There is nothing to export; nothing was written.
        UngatedExport: An enforced gate failed; nothing was written.
    """
    folder = Path(out).absolute()
    _check_arguments(folder, config, rubric)
    run = _pass(store, config)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error}. Choose another folder with `out=…`") from None
    try:
        with bar(run.total) if bar else contextlib.nullcontext(lambda _: None) as advance:
            written = run.write(scratch, advance)
        manifest = run.manifest(written)
        refuse_ungated(manifest, drawn=count_drawn(store, config.selection))
        left_out = check_reward(manifest, run.answers) if check_reward is not None else ()
        trl_files(scratch, config.kind, manifest, rubric=rubric, template=run.target.marked, without=sorted(left_out))
        run.save_table(scratch)
        manifest_text = json_text(fields(manifest, texts=True), indent=1)
        (scratch / "manifest.json").write_text(manifest_text + "\n", encoding="utf-8")
        os.chmod(scratch, 0o755)
        try:
            claim_salt(store, run.splits.salt)  # fixes the splits: exported tasks cannot become test tasks later
            # Registered before the folder appears, so that erasure finds it even if this process is killed in between.
            store.put_artifact(str(folder), sorted(run.people))
            os.rename(scratch, folder)
        except OSError as error:
            raise ConfigError(
                f"{folder} was created while this export was written; name a new folder (`out`)"
            ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    rows = written["data.jsonl"]["rows"]
    return ExportReport(path=folder, rows=rows, manifest=manifest, answers=run.answers)


def preview_export(store: Store, config: ExportConfig) -> dict[str, Any]:
    """What an export would be: its manifest, with gates that may have failed. Reads the whole store.

    The rows are written to a temporary folder, which is removed; neither salt nor export is registered.

    Raises:
        ConfigError: A setting is invalid.
        DataError: There is nothing to export.
    """
    run = _pass(store, config)
    with tempfile.TemporaryDirectory(prefix="assay-preview-") as scratch:
        return run.manifest(run.write(Path(scratch), lambda _: None, parquet=False))


def export_rows(store: Store, config: ExportConfig, *, registered_as: str) -> tuple[BinaryIO, int]:
    """The rows of an export alone, as a file open for reading that has no name, and their number.

    Args:
        registered_as: Name under which erasure finds the export.
    Raises:
        ConfigError, DataError, UngatedExport: As `export_traces`.
    """
    run = _pass(store, config)
    with tempfile.TemporaryDirectory(prefix="assay-rows-") as scratch:
        manifest = run.manifest(run.write(Path(scratch), lambda _: None, parquet=False))
        refuse_ungated(manifest, drawn=count_drawn(store, config.selection))
        claim_salt(store, run.splits.salt)
        store.put_artifact(registered_as, sorted(run.people))
        return (Path(scratch) / "data.jsonl").open("rb"), manifest["rows"]  # the folder is removed, the file stays


def _pass(store: Store, config: ExportConfig) -> ExportPass:
    """A pass over what the store holds now.

    Raises:
        DataError: Nothing in the store has a selected name.
    """
    store.flush()
    check_named(store, config.selection)
    splits = SplitFinder(store)
    sealed, overlap = sealed_tasks(store, splits)
    return ExportPass(store, config, sealed, overlap, splits)


def _check_arguments(folder: Path, config: ExportConfig, rubric: Mapping[str, bytes] | None) -> None:
    if config.kind == "grpo" and rubric is None:
        raise ConfigError("`kind='grpo'` requires `rubric=…`, which scores the completions")
    if folder.exists():
        raise ConfigError(f"{folder} already exists and is not overwritten; name a new folder (`out`)")
    if config.privacy_key is not None and Path(config.privacy_key).absolute().is_relative_to(folder):
        raise ConfigError(
            f"`privacy_key={str(config.privacy_key)!r}` is inside the export folder; keep the key elsewhere"
        )
