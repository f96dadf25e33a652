"""`assay traces`: recorded rollouts."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge

from assay.commands.groups import InExistingStore, InStore
from assay.errors import ConfigError, FailureKind
from assay.support.numbers import calls_text, counted, figure, price
from assay.support.options import Flag, OneOf, Positive, Settings, Share, function_of
from assay.support.report import Report
from assay.support.values import json_text, json_value, value_text

if TYPE_CHECKING:
    from assay.traces.importers import ImportReport
    from assay.traces.otlp.exporter import TracesExportReport
    from assay.traces.records import Rollout, ToolCall, Transition
    from assay.traces.store import Store
else:
    Rollout = ImportReport = TracesExportReport = Any  # so that types can be read without the heavy packages

_PROGRAM = 32  # width of the column; longer names move the rest of their line


class OfRun(Settings):
    """Options."""

    run_id: Annotated[str | None, Flag(name="--run", key=False)] = None
    """Only rollouts of this run."""


class OfProgram(OfRun):
    """Options."""

    program: Annotated[str | None, Flag(key=False)] = None
    """Only programs whose name contains this text."""

    phase: Annotated[str | None, Flag(key=False)] = None
    """Only this phase of a command: baseline, search, gate, test, evaluate, collect, run, deployed, …"""

    since: Annotated[str | None, Flag(metavar="WHEN", key=False)] = None
    """Only started since: 30m, 12h, 7d, or a date such as 2026-11-23."""

    def found(
        self, store: "Store", *equal: str, least: float | None = None, most: float | None = None,
        limit: int | None = None,
    ) -> "Iterator[Rollout]":  # fmt: skip
        """The rollouts of this selection, the newest first, without their LM calls.

        Args:
            equal: names of further settings whose values select.
        """
        from assay.support.numbers import since
        from assay.traces.store.listing import find_rollouts

        values = {name: getattr(self, name) for name in ("run_id", "phase", *equal)}
        return iter(
            find_rollouts(
                store,
                equal={name: value for name, value in values.items() if value is not None},
                program=self.program,
                since=None if self.since is None else since(self.since, now=store.clock.now()),
                least=least,
                most=most,
                limit=limit,
            )
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class RolloutListing(Report):
    """The newest rollouts.

    Attributes:
        rollouts: newest first, each as `traces show` shows it, without its LM calls.
    """

    is_list = True
    rollouts: tuple[Rollout, ...]
    filters: InitVar[Mapping[str, Any]]

    def __post_init__(self, filters: Mapping[str, Any]) -> None:
        hint = "" if filters.get("source") else " (verdicts of judges are listed with `source` judge)"
        named = [f"{name.removesuffix('_id').replace('_', ' ')} {value}" for name, value in filters.items()]
        none = f"no rollout matches the filters: {', '.join(named)}" if named else "the store holds no rollouts"
        object.__setattr__(self, "none", f"{none}{hint}")

    def lines(self) -> Iterator[str]:
        if not self.rollouts:
            return
        width = min(_PROGRAM, max(len(_program(rollout)) for rollout in self.rollouts))
        columns = f"{'id':16} {'time':14} {'score':>5} {'status':7} {'program':{width}} {'source':7} {'phase':10}"
        yield f"{columns} {'split':5} {'failure':8} first input"
        for rollout in self.rollouts:
            started = time.strftime("%m-%d %H:%M:%S", time.localtime(rollout.started_at))
            first_input = " ".join(value_text(next(iter(rollout.inputs.values()), "")).split())
            yield (
                f"{rollout.id[:16]} {started} {figure(rollout.score, 2):>5} {rollout.status:7} "
                f"{_program(rollout):{width}} {rollout.source:7} {rollout.phase:10} {rollout.split or '–':5} "
                f"{rollout.failure or '–':8} {first_input[:60]}{'…' if len(first_input) > 60 else ''}"
            )


def _program(rollout: Rollout) -> str:
    """Its file or name with the version."""
    name = str(rollout.program).replace("\\", "/").rpartition("/")[2]
    return f"{name}@{rollout.program_version}" if rollout.program_version else name or "–"


class ListRollouts(InExistingStore, OfProgram):
    """List the newest rollouts, one per line: id, time, score, status, program, source, phase, split, failure,
    first input. In a terminal, lines are cut at its width.

    The program is followed by its version, a hash of prompts, demonstrations and settings. The versions of a run are
    those of its baseline, its candidates and the compiled program.

    Raises:
        ConfigError: no recorded program's name contains `program`.
        DataError: there is no run `run_id`.
    """

    task_id: Annotated[str | None, Flag(name="--task", key=False)] = None
    """Only rollouts of this task."""

    split: Annotated[Literal["train", "val", "gate", "test"] | None, Flag(key=False)] = None
    """Only rollouts of this split."""

    status: Annotated[Literal["done", "failed", "error", "running"] | None, Flag(key=False)] = None
    """Only rollouts with this status."""

    source: Annotated[str | None, Flag(key=False)] = None
    """Only rollouts of this source: program, gateway, …; judge for verdicts of judges, hidden by default."""

    failure: Annotated[str | None, OneOf(tuple(map(str, FailureKind))), Flag(metavar="KIND", key=False)] = None
    """Only this failure kind."""

    min_score: Annotated[Share | None, Flag(key=False)] = None
    """Lowest score."""

    max_score: Annotated[Share | None, Flag(key=False)] = None
    """Highest score."""

    limit: Positive = 20
    """Maximum number of rollouts to list."""

    def check(self) -> None:
        if self.min_score is not None and self.max_score is not None and self.min_score > self.max_score:
            raise ConfigError(
                f"must be at most `max_score` ({self.max_score}), not {self.min_score}", field="min_score"
            )

    def run(self) -> RolloutListing:
        from assay.traces.store.listing import check_run, known_programs

        with self.opened() as store:
            chosen = ("task_id", "split", "status", "source", "failure")
            rollouts = tuple(self.found(store, *chosen, least=self.min_score, most=self.max_score, limit=self.limit))
            if not rollouts:
                check_run(store, self.run_id)
                self._check_program(known_programs(store))
        given = {name: value for name, value in vars(self).items() if name not in ("store", "limit")}
        return RolloutListing(rollouts=rollouts, filters={k: value for k, value in given.items() if value is not None})

    def _check_program(self, known: list[str]) -> None:
        """Refuses a text that is in the name of no recorded program: it is misspelt."""
        if self.program and known and not any(self.program.lower() in name.lower() for name in known):
            raise ConfigError(
                f"must be in the name of a recorded program ({', '.join(known)}), not {self.program!r}", field="program"
            )


@dataclass(frozen=True, kw_only=True, repr=False)
class RolloutReport(Report):
    """A rollout with its LM calls, tools and verdicts."""

    rollout: Rollout

    def to_dict(self) -> dict[str, Any]:
        return dict(json_value(self.rollout))

    def lines(self) -> Iterator[str]:
        from assay.traces.messages.chaining import requests_of

        rollout = self.rollout
        score = "unscored" if rollout.score is None else f"{rollout.score:.3f}"
        program = "@".join(filter(None, (rollout.program, rollout.program_version))) or f"from {rollout.source}"
        task = ", ".join(filter(None, (rollout.task_type, rollout.split)))
        yield f"{rollout.id}  {program}  {rollout.model}  {rollout.status}  score {score}"
        yield f"task {rollout.task_id or '–'} ({task}): {json_text(rollout.inputs)}"
        yield from _tool_lines(rollout.early_tools)
        for call, request in zip(rollout.transitions, requests_of(rollout.transitions), strict=True):
            yield from _call_lines(call, request)
        yield f"\nprediction: {rollout.error if rollout.prediction is None else json_text(rollout.prediction)}"
        if rollout.human_rating is not None:
            yield f"human rating: {rollout.human_rating:g}"
        for v in rollout.verdicts:
            grade = "not counted" if not v.applies else "unscored" if v.grade is None else f"{v.grade:.2f}"
            yield f"  {v.criterion} (weight {v.weight:g}): {grade} {v.reason}"


def _call_lines(t: "Transition", request: dict[str, Any] | None) -> Iterator[str]:
    from assay.traces.messages.dialects import answer_of, chat_messages
    from assay.traces.messages.endings import ending_of

    marks = [word for word, on in (("cached", t.cached), ("constrained", t.constrained)) if on]
    if t.failure is not None:
        marks.append(f"failure {t.failure}")
    prompt, completion = ("?" if count is None else count for count in (t.prompt_tokens, t.completion_tokens))
    tokens = f"{prompt}+{completion} tokens, {t.latency_ms:.0f} ms"
    yield f"\n[{t.t}] {f'{t.agent}: ' if t.agent else ''}{', '.join([tokens, *marks])}"
    if request is None:
        yield "  (continues a conversation that is not on record)"
    for message in chat_messages(request or t.request):
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = "".join(f" [calls {function['name']}({function['arguments']})]" for function in functions)
        yield f"  {message['role']}: {_flat(message.get('content') or '')}{calls}"
    response = t.response or {}
    answer = answer_of(t.request.get("dialect"), response.get("body", response))
    if answer.reasoning:
        yield f"  reasoning: {_flat(answer.reasoning)}"
    ending = "refusal" if answer.refusal else "" if t.error else ending_of(t)
    yield f"  -> {_flat(t.output or t.error or '')}{f' ({ending})' if ending else ''}"
    if t.error and t.output:
        yield f"  error: {_flat(t.error)}"
    yield from _tool_lines(t.tools)
    if t.step_rewards:
        yield f"  step rewards: {', '.join(f'{name} {value:g}' for name, value in t.step_rewards.items())}"


def _tool_lines(tools: "Sequence[ToolCall]") -> Iterator[str]:
    for tool in tools:
        result = tool.result if tool.error is None else f"error: {tool.error}"
        isolation = "" if tool.isolation is None else f" [isolation {tool.isolation}]"
        yield f"  tool {tool.name}({value_text(tool.arguments)}){isolation} = {value_text(result)}"


def _flat(text: Any) -> str:
    return str(text).replace("\n", "\n      ")


class ShowRollout(InExistingStore):
    """Show one rollout with every LM call.

    A request that continues a conversation stored on the server is shown with it; --json has each request as it was
    sent. ROLLOUT_ID may be the first characters of the id.
    """

    rollout_id: Annotated[str, Flag(key=False)] = field(kw_only=False)
    """Id of the rollout, or its first characters."""

    def run(self) -> RolloutReport:
        with self.opened() as store:
            return RolloutReport(rollout=store.rollout(self.rollout_id))


@dataclass(frozen=True, kw_only=True, repr=False)
class StoreStats(Report):
    """What is recorded."""

    counts: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return self.counts

    def lines(self) -> Iterator[str]:
        yield from (f"{label:18} {text}" for label, text in self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        """Label with unit and value of each printed line."""
        counts = self.counts

        def by(name: str) -> str:
            return ", ".join(f"{part} {count:,}" for part, count in counts[name].items()) or "–"

        if counts["unrecorded"] is None:
            calls = counted(counts["unrecorded_seen"], "LM calls")
            unrecorded = f"unknown, at least {calls} ({counts['unrecorded_reason']})"
        else:
            unrecorded = counted(counts["unrecorded"], "LM calls")
        complete = counts["unrecorded"] == 0
        unpriced = "a call has no known price" if complete else "LM calls that were not recorded have no price"
        mean = "–" if counts["mean_score"] is None else f"{counts['mean_score']:.3f}"
        cost = f"unknown: {unpriced}" if counts["cost_usd"] is None else price(counts["cost_usd"])
        made = calls_text(counts["transitions"] - counts["cached"], counts["cached"])
        return [
            ("rollouts", f"{counts['rollouts']:,}"), ("  by status", by("statuses")), ("  by split", by("splits")),
            ("  scored", f"{counts['scored']:,}, mean score {mean}"), ("LM calls", made),
            ("  failed", f"{counts['errors']:,}"),
            ("unrecorded", unrecorded),
            ("prompt tokens", f"{counts['prompt_tokens']:,} (calls from the cache included)"),
            ("completion tokens", f"{counts['completion_tokens']:,} (calls from the cache included)"),
            ("cost", cost),
        ]  # fmt: skip


class CountRollouts(InExistingStore, OfRun):
    """Show counts, tokens and dollars of the recorded rollouts.

    `unrecorded` counts LM calls that were made but could not be recorded; it is unknown where assay cannot detect them.
    """

    def run(self) -> StoreStats:
        from assay.traces.store.counts import file_stats
        from assay.traces.store.location import store_address

        # A SQLite file is read without opening a `Store`, which loads SQLAlchemy.
        file = store_address(self.store).file
        counts = None if file is None else file_stats(file, self.run_id)
        if counts is None:
            with self.opened() as store:
                counts = store.stats(run_id=self.run_id)
        return StoreStats(counts=counts)


@dataclass(frozen=True, kw_only=True, repr=False)
class RatingReport(Report):
    """Rollouts that were rated.

    Attributes:
        rated: the ratings by id of the rollout.
    """

    rated: dict[str, float]

    def lines(self) -> Iterator[str]:
        yield f"{counted(len(self.rated), 'rollouts')} rated"


class RateRollouts(InExistingStore, OfRun):
    """Rate one rollout from 0 to 1. Without ROLLOUT_ID, ask for a rating of each rollout that has none.

    An export of training data uses the rating in place of the rubric's score. Therefore rollouts of the sealed splits
    gate and test take none, and neither do verdicts of judges and running rollouts.

    Raises:
        ConfigError: the rollout takes no rating.
    """

    rollout_id: Annotated[str | None, Flag(key=False)] = field(default=None, kw_only=False)
    """Id of the rollout, or its first characters."""

    rating: Annotated[Share | None, Flag(key=False)] = field(default=None, kw_only=False)
    """Rating from 0 to 1."""

    limit: Positive = 20
    """Maximum number of rollouts to ask about."""

    def check(self) -> None:
        from assay.jobs.project_file import is_of_project

        if self.rollout_id is None:
            return
        if self.rating is None:
            raise ConfigError("must be given, from 0 to 1: assay traces rate ROLLOUT 0.8", field="rating")
        for name in self.changed("run_id", "limit"):
            if not is_of_project(name, getattr(self, name)):
                raise ConfigError("would have no effect on the rating of one rollout", field=name)

    def run(self) -> RatingReport:
        from assay.traces.records import store_rating

        with self.opened() as store:
            if self.rollout_id is None or self.rating is None:
                return RatingReport(rated=self._ask(store))
            rollout = store.rollout(self.rollout_id)
            store_rating(store, rollout, self.rating)
        return RatingReport(rated={rollout.id: self.rating})

    def _ask(self, store: "Store") -> dict[str, float]:
        """Asks for ratings on the terminal. Returns the ratings by rollout id."""
        from assay.support.terminal import ask, echo
        from assay.traces.records import store_rating, why_not_rated
        from assay.traces.store.listing import check_run

        check_run(store, self.run_id)
        unrated = (r for r in store.rollouts(run_id=self.run_id, limit=None) if r.human_rating is None)
        ended = [r for r in unrated if r.status in ("done", "failed") and why_not_rated(r) is None]
        rated: dict[str, float] = {}
        for number, rollout in enumerate(waiting := ended[: self.limit], 1):
            output = rollout.error if rollout.prediction is None else json_text(rollout.prediction)
            echo(f"\n[{number} of {len(waiting)}] {json_text(rollout.inputs)}\n  -> {output}", err=True)
            answer = ask("rating 0 to 1 (Enter: skip, q: quit): ")
            if answer is None or answer == "q":
                break
            if answer and (value := _rating(answer)) is not None:
                store_rating(store, rollout, value)
                rated[rollout.id] = value
        return rated


def _rating(text: str) -> float | None:
    """A rating; None, with a message, if the text is not a number from 0 to 1."""
    from assay.support.terminal import echo

    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if 0 <= value <= 1:
        return value
    echo(f"{text!r} is not a number from 0 to 1; the rollout was not rated", err=True)
    return None


@dataclass(frozen=True, kw_only=True, repr=False)
class ClosingReport(Report):
    """Rollouts that a killed gateway left open.

    Attributes:
        done: number that ended with their answer.
        error: number that ended without one.
        running: number that were not ended, because they had an LM call since.
    """

    done: int
    error: int
    running: int

    def lines(self) -> Iterator[str]:
        yield f"{counted(self.done, 'rollouts')} ended with their answer, {self.error} without one"
        if self.running:
            yield (
                f"{counted(self.running, 'rollouts')} still running: they had a call less than `idle_minutes` ago. "
                "A running gateway ends them itself (assay serve --idle-s, or when it is stopped); if it was killed, "
                "`idle_minutes` 0 ends them now"
            )


class CloseRollouts(InExistingStore):
    """End the rollouts that a killed gateway left open. Only ended rollouts are scored and exported.

    A running gateway ends its rollouts itself.
    """

    idle_minutes: Annotated[float, Ge(0)] = 60.0
    """End the rollouts whose last LM call is at least this many minutes ago."""

    def run(self) -> ClosingReport:
        from assay.traces.gateway.sessions import close_abandoned

        with self.opened() as store:
            return ClosingReport(**close_abandoned(store, idle_s=60 * self.idle_minutes))


class ImportRollouts(InStore):
    """Import FILE: OpenTelemetry spans (GenAI conventions), or an export of Langfuse or MLflow."""

    kind: Annotated[Literal["otlp", "langfuse", "mlflow"], Flag(key=False)] = field(kw_only=False)
    """Format of the file."""

    file: Annotated[str | Path, Flag(key=False)] = field(kw_only=False)
    """File to import."""

    score: Annotated[str | None, Flag(metavar="NAME")] = None
    """Name of the score to import if a trace has several. Of several without a name none becomes the rollout's score:
    all are stored as verdicts. Ratings by people, such as Langfuse's annotations, are the human rating and count
    apart."""

    def run(self) -> ImportReport:
        from assay.traces.importers import import_traces
        from assay.traces.store import Store

        with Store(self.store) as store:
            return import_traces(store, self.kind, self.file, score=self.score)


class ExportRollouts(InExistingStore, OfProgram):
    """Export rollouts as OpenTelemetry spans (GenAI conventions) to FILE, or send them to an OTLP/HTTP endpoint.

    FILE has JSON lines, or protobuf if its name ends with .pb; assay traces import otlp reads both. Rollouts of the
    gate and test splits and of tenants, and those without consent, are left out.

    Raises:
        ConfigError: the file exists, or there is no endpoint.
        DataError: there is no run `run_id`.
        NotSent: the endpoint did not take a request; those before it were sent.
    """

    kind: Annotated[Literal["otlp"], Flag(key=False)] = field(kw_only=False)
    """Format of the file."""

    file: Annotated[str | Path | None, Flag(key=False)] = field(default=None, kw_only=False)
    """File to write; by default the rollouts are sent to the endpoint."""

    tenants: Annotated[Sequence[str], Flag(name="--tenant", metavar="NAME")] = ()
    """Also rollouts of this tenant; repeatable."""

    content: bool = True
    """With inputs, outputs and messages; otherwise only names, counts, times, costs and scores."""

    endpoint: Annotated[str | None, Flag(metavar="URL")] = None
    """OTLP/HTTP address, to which /v1/traces is added; by default $OTEL_EXPORTER_OTLP_ENDPOINT."""

    def check(self) -> None:
        if self.file is not None and self.endpoint is not None:
            raise ConfigError("would have no effect with a file", field="endpoint")

    def run(self) -> TracesExportReport:
        from assay.traces.otlp.exporter import export_traces
        from assay.traces.store.listing import check_run

        with self.opened() as store:
            check_run(store, self.run_id)
            ids = (rollout.id for rollout in self.found(store) if rollout.ended_at is not None)
            file = None if self.file is None else Path(self.file)
            return export_traces(
                store, ids, file=file, endpoint=self.endpoint, content=self.content, tenants=tuple(self.tenants)
            )


@dataclass(frozen=True, kw_only=True, repr=False)
class ErasureReport(Report):
    """What was erased of a person, and what holds their data still.

    Attributes:
        subject: the person.
        removed: number of rollouts, with those of no data subject in which a tool recalled facts about the person.
        facts_removed: what agents remembered from them or of the person.
        prompts_emptied: other calls that showed one of their tasks.
        cached_answers_removed: answers to these, and those that repeat a text of the person.
        unowned_answers_removed: cached answers without a recorded request; all of these are removed, because their
            owner is unknown.
        unowned_calls_removed: calls of rollouts that an earlier erasure removed while they ran.
        running: number of the rollouts that had not ended: processes that run may write more of them. Repeat the
            erasure once they have ended.
        quoting_facts: ids of other rollouts that quote such a fact.
        naming_facts: numbers of remembered facts about others that have the person's name; they are not changed.
        made_from_them: paths of what was made of the person's data: artifacts, exports, pools, data sets, reports,
            adapters and trainings, and what was made of these. Delete or remake them.
        runs_on_them: jobs that ran on one of these.
        versions: registered versions made from them, see `assay.deployment.deployments.versions_of_erased`.
        emptied: `rows` (number by table) and `files` in which a text of the person was replaced, see
            `assay.traces.store.erasure`.
        holding: files outside of `.assay`, other than pages of `--report`, and indexed documents that hold such a
            text; they are not changed.
        not_searched: `short_texts` (number of texts of the person that are too short), `shared_texts` (that others
            wrote too), `tasks_without_texts` (whose inputs nothing has), `files`, `free_pages` (true if another process
            kept the database from being compacted), `models` (folders of models that were trained, and may hold
            merged adapters), `other_machines` (true if the store is on a server: the response cache and the files of
            `.assay` on other machines, and rows that wait there).
    """

    subject: str
    removed: int
    facts_removed: int
    prompts_emptied: int
    cached_answers_removed: int
    unowned_answers_removed: int
    unowned_calls_removed: int
    running: int
    quoting_facts: list[str]
    naming_facts: list[int]
    made_from_them: list[str]
    runs_on_them: list[str]
    versions: list[dict[str, Any]]
    emptied: dict[str, Any]
    holding: list[str]
    not_searched: dict[str, Any]

    def lines(self) -> Iterator[str]:
        yield f"{counted(self.removed, 'rollouts')} of {self.subject!r} removed"
        yield (
            f"{counted(self.facts_removed, 'remembered facts')} and "
            f"{counted(self.cached_answers_removed, 'cached answers')} removed; "
            f"{counted(self.prompts_emptied, 'prompts')} of other rollouts that contained their tasks emptied"
        )
        if self.unowned_answers_removed:
            answers = counted(self.unowned_answers_removed, "cached answers")
            yield f"{answers} without a recorded request removed: whose they are is unknown"
        if self.unowned_calls_removed:
            calls = counted(self.unowned_calls_removed, "LM calls")
            yield f"{calls} removed that were recorded after an earlier erasure of their rollout"
        yield from (f"quotes a remembered fact about them: rollout {rollout}" for rollout in self.quoting_facts)
        yield from (f"has their name, and is kept: fact {fact} about another person" for fact in self.naming_facts)
        yield from (f"made from them before: {path}" for path in self.made_from_them)
        yield from (f"ran on what was made from them: {run}" for run in self.runs_on_them)
        rows = [f"{count:,} of {table}" for table, count in self.emptied["rows"].items()]
        yield from (f"repeated their texts, which were erased: {place}" for place in (*rows, *self.emptied["files"]))
        yield from (f"holds a text of theirs, and is not changed: {path}" for path in self.holding)
        yield from self._unsearched()
        for row in self.versions:
            aliases = f" ({', '.join(row['aliases'])})" if row["aliases"] else ""
            rolled_back = f"; its deployment {row['deployment']} is rolled back" if row["deployment"] else ""
            yield f"{row['version']}{aliases}: {'retired' if row['retired'] else 'holds their data'}{rolled_back}"

    def _unsearched(self) -> Iterator[str]:
        left = self.not_searched
        if left["short_texts"] or left["shared_texts"]:
            short, shared = left["short_texts"], left["shared_texts"]
            yield f"not searched: {short:,} of their texts that are too short, {shared:,} that others wrote too"
        if left["tasks_without_texts"]:
            tasks = counted(left["tasks_without_texts"], "tasks")
            yield f"not searched: the texts of {tasks} whose inputs are not stored: never run, or erased before"
        yield from (f"not searched: {path}" for path in left["files"])
        for folder in left["models"]:
            yield f"not known of what it was made: the model {folder}, which a training started from"
        if left["other_machines"]:
            yield "not searched: `.assay` on other machines, with its response cache and rows that wait for the store"

    @property
    def is_unknown(self) -> bool:
        """Whether nothing of the person was there."""
        counts = (
            self.removed, self.unowned_calls_removed, self.facts_removed, self.prompts_emptied,
            self.cached_answers_removed,
        )  # fmt: skip
        lists = (self.quoting_facts, self.naming_facts, self.made_from_them, self.runs_on_them, self.versions)
        texts = (*self.emptied.values(), self.holding, self.not_searched["tasks_without_texts"])
        return not any((*counts, *lists, *texts))

    def warnings(self) -> Iterator[str]:
        if self.is_unknown:
            yield f"WARNING: the store has nothing of {self.subject!r}. Check the name, and `tenant` if it was given"
        if self.running:
            rollouts = counted(self.running, "rollouts")
            yield f"WARNING: {rollouts} had not ended: repeat this once no process writes more of them"
        if self.not_searched["free_pages"]:
            yield "WARNING: the database is in use, so its free pages were not removed: repeat this later"
        for version in (row["version"] for row in self.versions if row["is_champion"]):
            yield (
                f"WARNING: {version} is the champion and stays in production with data of the erased person. Deploy a "
                "version without it, or set the alias champion"
            )


class ForgetSubject(InExistingStore):
    """Delete all rollouts of the data subject SUBJECT and what agents remember of them (facts of a memory), and list
    the exports and artifacts made from them, and rollouts and facts of others that quote or name them.

    `versions='retire'` also takes the versions made from them out of use. A champion stays in production: deploy
    another.

    Raises:
        CacheError: the response cache could not be written.
    """

    subject: Annotated[str, Flag(key=False)] = field(kw_only=False)
    """Name of the person."""

    tenant: Annotated[str | None, Flag(metavar="NAME", key=False)] = None
    """Erase only what is of this tenant. What was made from the person's data is named for all tenants."""

    versions: Literal["name", "retire"] = "name"
    """Versions of agents that hold the person's data: name lists them; retire takes them out of all aliases but
    champion and out of deployments, permanently."""

    def run(self) -> ErasureReport:
        import functools

        from assay.deployment.deployments import Deployments, versions_of_erased
        from assay.jobs.erasure import demonstrated_inputs, erase_answers, erase_files, files_of_jobs, lineage_of
        from assay.traces.records import subject_digests
        from assay.traces.store.erasure import erase_subject
        from assay.traces.store.location import home_of

        home, digests = home_of(self.store), subject_digests(self.subject)
        with self.opened() as store:
            inputs_of = functools.partial(demonstrated_inputs, store, home)
            erased = erase_subject(store, self.subject, tenant=self.tenant, inputs_of=inputs_of)
            made = lineage_of(store, home, digests)
            files = erase_files(store, home, erased.texts, [*store.artifacts(), *files_of_jobs(store)])
            holding = versions_of_erased(
                Deployments(store.engine), digests, made.paths, made.adapters, policy=self.versions
            )
        had_data = bool(erased.removed or erased.tasks or erased.prompts)
        requests = [request for request, _, _ in erased.calls]
        answers, unowned = erase_answers(home, requests, erased.texts) if had_data else (0, 0)
        return ErasureReport(
            subject=self.subject, removed=erased.removed, facts_removed=erased.facts, prompts_emptied=erased.prompts,
            cached_answers_removed=answers, unowned_answers_removed=unowned,
            unowned_calls_removed=erased.unowned, running=erased.running, quoting_facts=erased.quoting,
            naming_facts=erased.naming, made_from_them=made.paths, runs_on_them=made.runs, versions=holding,
            emptied={"rows": dict(erased.emptied), "files": files.emptied},
            holding=[*files.holding, *erased.documents],
            not_searched={
                "short_texts": erased.texts.short, "shared_texts": erased.texts.shared,
                "tasks_without_texts": erased.unread, "files": files.unread, "free_pages": erased.compacted is False,
                "models": made.unknown, "other_machines": store.address.file is None,
            },
        )  # fmt: skip


list_rollouts = function_of(ListRollouts, "list_rollouts")
show_rollout = function_of(ShowRollout, "show_rollout")
count_rollouts = function_of(CountRollouts, "count_rollouts")
rate_rollouts = function_of(RateRollouts, "rate_rollouts")
close_rollouts = function_of(CloseRollouts, "close_rollouts")
import_rollouts = function_of(ImportRollouts, "import_rollouts")
export_rollouts = function_of(ExportRollouts, "export_rollouts")
forget_subject = function_of(ForgetSubject, "forget_subject")
