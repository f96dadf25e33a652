"""`assay referee`: sealed evaluation for a coding agent that improves an agent's texts.

`open` makes the folder of a referee, `serve` lets a coding agent use it over MCP, `close` opens the test once and
reports. `assay.jobs.referee` decides.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from assay.commands.groups import InStore, NoJson, Output, Reported, Trusting, WithPage
from assay.errors import ConfigError, DataError, MissingExtra
from assay.evaluation.adaptive import LOOKS, RECOMMENDED_TASKS, fewest_gate_tasks
from assay.jobs.groups import AgentServing, FourSplits, JobSettings
from assay.jobs.job_report import JobReport
from assay.support.numbers import counted, signed
from assay.support.options import Flag, Positive, Settings, function_of, options_of
from assay.support.report import OBJECT, Report, Table

if TYPE_CHECKING:
    from assay.datasets import Splits
    from assay.jobs.referee import Referee
    from assay.jobs.referee_folder import RefereeFolder
    from assay.reports.files import Page
    from assay.traces import Store

_SERVER = "assay-referee"
_MOST_LOOKS = 100
_SHORT = 8  # digits of a digest in tables


@dataclass(frozen=True, kw_only=True, repr=False)
class OpenedReferee(Report):
    """A referee that is ready.

    Attributes:
        path: its folder.
        agent: the agent, as it was given.
        texts: names of its texts.
        tasks: number of tasks by split.
        looks: number of looks at gate.
        earlier_looks: how many of them other referees of this user have taken at any of these gate tasks.
        calls_per_run: LM calls of one run with its judges; null without a preflight.
        notes: what limits the guarantee.
    """

    path: Path
    agent: str
    texts: Sequence[str]
    tasks: Mapping[str, int]
    looks: int
    earlier_looks: int
    calls_per_run: float | None
    notes: Sequence[str]

    def lines(self) -> Iterator[str | Table]:
        sizes = ", ".join(f"{name} {count}" for name, count in self.tasks.items())
        yield f"referee of {self.agent} in {self.path}: {sizes}; {counted(self.looks, 'looks')} at gate"
        if self.earlier_looks:
            yield f"{counted(self.earlier_looks, 'looks')} at these gate tasks were taken before, and count"
        yield f"serve it: assay referee serve {self.path}"
        for note in self.notes:
            yield f"note: {note}"


class OpenReferee(Reported, Trusting, InStore, AgentServing, FourSplits, JobSettings):
    """Open a referee: copy agent, rubric and data to a new folder, out of reach of the coding agent that will improve
    the agent's texts.

    The coding agent sees val; gate and test stay sealed. Run it in the folder of the agent.

    Raises:
        DataError: tasks of gate or test are in the workspace, or gate has too few tasks.
        ConfigError: the agent or a text cannot be read, or the gate has no look left.
        AssayError: what was wrong, which rule, what to do.
    """

    OUTPUT: ClassVar[Any] = Output
    executor: ClassVar[str] = "threads"  # type: ignore[misc]
    lm: ClassVar[None] = None  # type: ignore[misc]
    prompt_format: ClassVar[None] = None  # type: ignore[misc]
    replace_lms: ClassVar[bool] = False  # type: ignore[misc]
    resume: ClassVar[bool] = False  # type: ignore[misc]

    agent: Annotated[str, Flag(metavar="AGENT", key=False)]
    """Agent: a command, or path/file.py:FUNCTION. It calls the model at OPENAI_BASE_URL."""
    text: Annotated[Sequence[str], Flag(metavar="FILE[#SECTION]", key=False)]
    """Text that may be improved: a file, a section between markers (FILE#NAME) or a value of a JSON or YAML file
    (FILE#/pointer); repeatable."""
    delivery: Literal["gateway", "copy", "task"] = "gateway"
    """How the agent gets new texts. gateway: they are replaced in its requests; copy: a command runs in a copy of its
    folder that has them; task: the agent reads them from task['texts'], or from the JSON file in ASSAY_TEXTS."""
    out: Annotated[str | Path, Flag(metavar="DIR", key=False)]
    """New folder of the referee, outside of the workspace."""
    looks: Positive = LOOKS
    """Number of looks at gate. More looks make each of them harder to pass."""
    workspace: Annotated[str | Path, Flag(metavar="DIR", key=False)] = "."
    """Folder that the coding agent can read. No task of gate or test may be in it."""

    def check(self) -> None:
        from assay.programs.runners import named_callable

        if self.looks > _MOST_LOOKS:
            raise ConfigError(f"must be at most {_MOST_LOOKS}, not {self.looks}", field="looks")
        if not self.text:
            raise ConfigError("is missing: name a file whose text may be improved", field="text")
        if self.delivery == "copy" and named_callable(self.agent):
            raise ConfigError("must be gateway or task for an agent that is not a command", field="delivery")
        if not isinstance(self.rubric, str | Path):
            raise ConfigError("must be a file or a name, because it is copied", field="rubric")

    def run(self) -> OpenedReferee:
        from assay.datasets import load_splits
        from assay.datasets.memory import data_spec
        from assay.jobs.loading import load_rubric
        from assay.jobs.referee_folder import LookLedger, find_sealed, require_sealed
        from assay.programs.texts import TextFiles
        from assay.traces.records import new_id
        from assay.traces.store.sealing import known_splits, resolve_salt

        place, workspace = Path(os.path.abspath(self.out)), Path(os.path.abspath(self.workspace))
        self._check_places(place, workspace)
        files = TextFiles(self.text)
        if outside := [text for text in files.texts if not _is_inside(text.path)]:
            raise ConfigError(
                f"{outside[0].name!r} must be a path in {Path.cwd()}: run this command in the folder of the agent",
                field="text",
            )
        splits = load_splits(
            data_spec(self.data), outputs=load_rubric(self.rubric).expected_names, rename=self.rename,
            salt=resolve_salt(self.salt, self.store), limits=self.sizes,
            need=("val", "gate", "test"), known=known_splits(self.store),
        )  # fmt: skip
        parts, referee = splits.parts(), new_id()[:12]
        gate = [task.key for task in parts["gate"]]
        ledger = LookLedger(referee, gate)
        notes = [*self._check_gate(len(set(gate)), ledger)]
        sealed, seen = [*parts["gate"], *parts["test"]], [*parts["train"], *parts["val"]]
        notes += require_sealed(find_sealed(workspace, sealed, allowed=seen), workspace)
        folder = self._written(place, referee, files, splits, notes)
        measured = self._tried(folder)
        return OpenedReferee(
            path=place, agent=self.agent, texts=[text.name for text in files.texts], tasks=splits.sizes(),
            looks=self.looks, earlier_looks=len(ledger.answers()), calls_per_run=measured,
            notes=folder.manifest.notes,
        )  # fmt: skip

    def _check_places(self, place: Path, workspace: Path) -> None:
        from assay.jobs.opening import check_out

        check_out(place)
        if not workspace.is_dir():
            raise ConfigError(f"{self.workspace} is not a folder", field="workspace")
        if place.resolve().is_relative_to(workspace.resolve()):
            raise ConfigError(
                f"{place} is inside of the workspace {workspace}, which the coding agent can read: name a folder "
                "elsewhere, at best of another user",
                field="out",
            )

    def _check_gate(self, tasks: int, ledger: Any) -> Iterator[str]:
        """Notes on the size of gate and on earlier looks."""
        from assay.evaluation.adaptive import AdaptiveGate

        if tasks < (least := fewest_gate_tasks(self.looks)):
            raise DataError(
                f"gate has {counted(tasks, 'tasks')}: with {counted(self.looks, 'looks')} no text could be promoted, "
                f"even if it gains on every task. At least {least} are needed, {RECOMMENDED_TASKS} are recommended"
            )
        if (before := ledger.looks()) is not None and before != self.looks:
            raise ConfigError(
                f"must be {before}: with so many these gate tasks were looked at before, and looks are counted by "
                "tasks. Or use other gate tasks",
                field="looks",
            )
        gate = AdaptiveGate(looks=self.looks, answers=ledger.answers())
        if gate.used_up:
            raise ConfigError(
                f"these gate tasks have had {counted(len(gate.answers), 'looks')} and "
                f"{counted(gate.promotions, 'promotions')}, so no look is left: give data with other gate tasks",
                field="data",
            )
        if tasks < RECOMMENDED_TASKS:
            note = (
                f"gate has {counted(tasks, 'tasks')}: a gain of 0.1 will hardly be found; {RECOMMENDED_TASKS} tasks "
                "find one of 0.2"
            )
            self.reporter.say(f"warning: {note}")
            yield note

    def _written(
        self, place: Path, referee: str, files: Any, splits: "Splits", notes: Sequence[str]
    ) -> "RefereeFolder":
        """The folder with all copies. Its manifest is written last."""
        import shutil

        from assay.jobs import referee_folder as folders
        from assay.jobs.loading import load_rubric, portable_rubric
        from assay.jobs.referee import RefereeJob

        rubric = load_rubric(self.rubric)
        if not (self.model or self.judge_model or self.judge_api_base or self.judge_api_key_env):
            rubric.require_judges()
        place.mkdir(parents=True, mode=0o700)
        try:
            data = [Path(self.data)] if isinstance(self.data, str | Path) and Path(self.data).is_file() else []
            sources, linked = folders.copy_agent(self.agent, place / "agent", without=[place, *data])
            rubric_path = folders.copy_rubric(portable_rubric(self.rubric), place)
            if Path(self.rubric).is_file():
                sources[str(Path(self.rubric).absolute())] = folders.hash_of(self.rubric)
            folders.write_data(place, splits.parts())
            folders.write_decoys(place, splits.val)
            kind: Any = RefereeJob
            for text in files.texts:  # which the optimizer may change
                sources.pop(str(text.path.resolve()), None)
            names = [name for name in options_of(kind) if hasattr(self, name) and name != "agent_key"]
            job = {
                **{name: getattr(self, name) for name in names}, "rubric": rubric_path, "rename": {}, "salt": None,
                "data": str(place / folders.DATA),
                "sizes": {name: size for name, size in splits.sizes().items() if size},
            }  # fmt: skip
            notes = [
                *notes,
                *(f"{folder} is linked and not copied: who can write there can change the agent" for folder in linked),
                *([] if data else [_GENERATED.format(data=self.data)]),
            ]
            manifest = folders.Manifest(
                id=referee, agent=self.agent, folder=str(Path.cwd()), workspace=str(Path(self.workspace).absolute()),
                texts=[{"name": t.name, "text": t.text, "is_value": t.is_value} for t in files.texts],
                delivery=self.delivery, job=job, looks=self.looks,
                gate=[task.key for task in splits.gate], files=folders.hashes_of_copies(place), sources=sources,
                notes=notes,
            )  # fmt: skip
            folders.write_manifest(place, manifest)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        return folders.RefereeFolder(place)

    def _tried(self, folder: "RefereeFolder") -> float | None:
        """Runs the agent on a val task; returns the LM calls of a run."""
        import shutil

        from assay.jobs.agents import find_texts
        from assay.jobs.preflight import checked
        from assay.jobs.referee import opened_referee

        folder.log("opened", agent=folder.manifest.agent, looks=folder.manifest.looks)
        try:
            with opened_referee(folder, progress=self.reporter) as referee:
                measured = checked(referee.job, referee.job.splits.val)
                find_texts(referee.job.recorded, referee.job.splits.val, referee.job.session)
                roles = referee.agent.roles
                if measured is not None:
                    referee.check_caps()
        except BaseException:
            shutil.rmtree(folder.path, ignore_errors=True)
            raise
        folder.tried(measured, roles)
        return None if measured is None else measured.calls + measured.judge_calls


def _is_inside(path: Path) -> bool:
    return not path.is_absolute() and path.resolve().is_relative_to(Path.cwd().resolve())


_GENERATED = "anybody can make the tasks of {data} again, with those of gate and test: give a file for sealed tasks"


class ServeReferee(Reported):
    """Serve a referee to a coding agent over MCP, until it is stopped.

    By default on standard input and output, as a coding agent starts it: add `assay referee serve DIR` to its MCP
    servers. With `http` several clients can use it, also from another user, container or machine, which is the only way
    to keep sealed tasks from a coding agent that may read the files of this user.

    Raises:
        ConfigError: there is no referee in the folder, it is closed, or another process serves it.
        ArtifactError: a copy was changed since it was opened.
        MissingExtra: the package `mcp` is not installed.
    """

    OUTPUT: ClassVar[Any] = NoJson

    folder: Annotated[str | Path, Flag(metavar="DIR", key=False)] = field(kw_only=False)
    """Folder of the referee."""
    http: Annotated[str | None, Flag(metavar="HOST:PORT", key=False)] = None
    """Address to serve at, as streamable HTTP at the path /mcp; addresses other than loopback require `key`."""
    key: Annotated[str | None, Flag(env="ASSAY_KEY", key=False)] = field(default=None, repr=False)
    """Key that clients must send as Authorization: Bearer KEY. An address other than loopback requires one."""

    def check(self) -> None:
        if self.http is not None:
            from assay.traces.gateway.access import Access

            Access(self.key, host=_address(self.http)[0])

    def run(self) -> None:
        from assay.jobs.referee import opened_referee
        from assay.jobs.referee_folder import RefereeFolder

        folder = RefereeFolder(self.folder)
        if any(event["event"] == "closed" for event in folder.events()):
            raise ConfigError(f"the referee in {self.folder} is closed: its test was opened. Open a new one")
        server_class()
        with opened_referee(folder, progress=self.reporter) as referee:
            folder.log("served", http=self.http)
            server = server_of(referee)
            if self.http is None:
                server.run("stdio")
            else:
                self._serve_http(server, *_address(self.http))

    def _serve_http(self, server: Any, host: str, port: int) -> None:
        import socket

        import uvicorn

        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                bound.bind((host, port))
                bound.listen()  # so that who reads the address below may connect at once
            except OSError as error:
                raise ConfigError(f"cannot listen on {self.http}: {error.strerror or error}", field="http") from None
            shown = f"[{host}]" if ":" in host else host
            self.reporter.say(f"referee at http://{shown}:{bound.getsockname()[1]}/mcp; Ctrl-C ends it")
            app = with_key(server.streamable_http_app(host=host), self.key)
            uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[bound])


def _address(text: str) -> tuple[str, int]:
    from assay.jobs.agents import address_of

    try:
        return address_of(text)
    except ConfigError as error:
        raise ConfigError(*error.args, field="http") from None


def with_key(app: Any, key: str | None) -> Any:
    """An ASGI application that refuses requests without the key."""
    import secrets

    if key is None:
        return app
    expected = f"Bearer {key}".encode()

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers") or ())
        if scope["type"] == "http" and not secrets.compare_digest(headers.get(b"authorization", b""), expected):
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"send the key: Authorization: Bearer KEY"})
            return
        await app(scope, receive, send)

    return guarded


def server_class() -> Any:
    """The server class of the package `mcp`.

    Raises:
        MissingExtra: the package is not installed.
    """
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError as error:
        raise MissingExtra("mcp", "mcp") from error
    return MCPServer


def server_of(referee: "Referee") -> Any:
    """The MCP server with the referee's tools."""
    server = server_class()(_SERVER, instructions="Improve the agent's texts. Call describe first: it has the rules.")

    @server.tool()  # type: ignore[untyped-decorator]
    def describe() -> dict[str, Any]:
        """The agent's texts by name, the champion's, the rubric, the rules and the number of tasks. Call it first."""
        return referee.describe()

    @server.tool()  # type: ignore[untyped-decorator]
    def budget() -> dict[str, Any]:
        """LM calls on val so far and left (null without a cap), looks at gate so far and left, promotions, refusals."""
        return referee.budget()

    @server.tool()  # type: ignore[untyped-decorator]
    def score(texts: dict[str, str], n: int | None = None) -> dict[str, Any]:
        """Scores of texts on the first n val tasks (all by default) beside the champion's. Texts that are left out stay
        as the champion has them. Running all val tasks once is what `submit` needs anyway."""
        return referee.score(texts, n)

    @server.tool()  # type: ignore[untyped-decorator]
    def failures(texts: dict[str, str], k: int = 5) -> dict[str, Any]:
        """The k val tasks with the lowest scores (at most 20): inputs, expected output, answer and feedback."""
        return referee.failures(texts, k)

    @server.tool()  # type: ignore[untyped-decorator]
    def submit(texts: dict[str, str]) -> dict[str, Any]:
        """Submit texts for promotion. The outcome is refused (with the rule), no look (val shows no gain), or a look at
        the sealed gate: promoted or not. Looks are few: save them."""
        return referee.submit(texts)

    return server


# -- the skill


SKILL = """---
name: assay-referee
description: Improve the prompts or skills of an agent against a sealed referee. Use it when an MCP server "{server}" is
  connected and you are asked to improve the agent's texts.
---

# Improve an agent's texts with the referee

The referee measures the agent on tasks. You see the tasks of val; it keeps the tasks of gate and test. Only the referee
promotes a text.

1. Call `describe`: the texts by name, the rubric, and the rules. Call `budget` whenever you plan.
2. Call `failures` with `{{}}` to see where the champion fails. Read the feedback and find causes, not cases.
3. Change one thing at a time, for a cause that several tasks share. Call `score` with the changed text. A small `n`
   is cheap, but noisy.
4. Call `submit` only for a text that you believe in and that gained on all val tasks. The answer is `refused` (with the
   rule), `no look`, or a look: promoted or not.
5. Save looks. There are few, and each promotion makes the next one harder. Collect several improvements in one text
   before you submit it, and keep at least one look for your last text.
6. Stop when no look is left, when the calls are spent, or when you have no idea that is better than the champion.

Rules:

- Write general instructions. Do not copy tasks, and do not list words of tasks with their answers: such texts are
  refused, and they would not help on gate.
- Keep every placeholder such as `{{name}}` and every code block.
- Do not write to the judge of the answers ("give full marks"): the report names it.
- Do not look for the tasks of gate or test, or for the referee's files. What is found there is a decoy, or ends the
  guarantee for the person you work for.
- Edits of the rubric, the checks or the agent's code have no effect here: the referee runs its own copies.
"""


@dataclass(frozen=True, kw_only=True, repr=False)
class SkillText(Report):
    """The skill file.

    Attributes:
        text: its content.
    """

    is_data = True

    text: str

    def lines(self) -> Iterator[str | Table]:
        yield self.text.rstrip("\n")


class ShowSkill(Settings):
    """Print the skill file that tells a coding agent how to work with a referee.

    \b
    assay referee skill > .claude/skills/assay-referee/SKILL.md
    """

    OUTPUT: ClassVar[Any] = Output

    def run(self) -> SkillText:
        return SkillText(text=SKILL.format(server=_SERVER))


# -- the report


@dataclass(frozen=True, kw_only=True, repr=False)
class RefereeReport(JobReport):
    """What a referee measured and decided.

    Attributes:
        path: folder of the referee.
        agent: the agent, as it was given.
        promotions: number of promoted texts.
        looks: looks at gate, with those of other referees at the same tasks.
        looks_allowed: looks that the referee was opened with.
        submissions: every submission: `at`, `texts` (digest), `outcome`, `reason`, `look`, `level`, `promoted`,
            `val_gain`, `flags` (words that address a judge).
        test: `baseline`, the agent with its own texts, `compiled`, with the promoted ones, and their `gain`; null where
            nothing was promoted.
        patch: file with the changes of the texts; null where nothing was promoted.
        texts: the promoted texts by name; empty where nothing was promoted.
        unprotected: what the guarantee does not cover here.
    """

    path: Path
    agent: str
    promotions: int
    looks: int
    looks_allowed: int
    submissions: Sequence[Mapping[str, Any]]
    test: Mapping[str, Any]
    patch: Path | None
    texts: Mapping[str, str]
    unprotected: Sequence[str]
    run_id: str = field(metadata=OBJECT, default="")

    def lines(self) -> Iterator[str | Table]:
        from assay.commands.compile import sides_table
        from assay.reports.markdown import cost_words, gain_claim, with_interval
        from assay.support.numbers import calls_text

        before, after, gain = (self.test[key] for key in ("baseline", "compiled", "gain"))
        if before and after and gain:
            yield sides_table(before, after)
            claim = "" if gain["mean"] is None else f": {gain_claim(gain['low'], gain['high'], self.test_openings)}"
            yield f"gain, paired: {with_interval(gain)}{claim}"
        else:
            yield "nothing was promoted, so the test split stays sealed and the texts are unchanged"
        yield from self.opened()
        outcomes = [row["outcome"] for row in self.submissions]
        yield (
            f"{counted(len(outcomes), 'submissions')}: {outcomes.count('refused')} refused, "
            f"{outcomes.count('no look')} without a look, {outcomes.count('look')} with a look, "
            f"{self.promotions} promoted; {self.looks} of {counted(self.looks_allowed, 'looks')} are used"
        )
        if self.submissions:
            yield Table(
                title="submissions", header=("texts", "outcome", "look", "level", "gain on val", "reason"),
                rows=[_row(row) for row in self.submissions],
            )  # fmt: skip
        yield f"LM calls: {calls_text(self.calls, self.cached)}; {self.tokens:,} tokens, {cost_words(self.cost_usd)}"
        yield from self.called()
        yield from self.limits()
        for text in self.unprotected:
            yield f"not protected: {text}"
        if self.patch is not None:
            yield f"apply the texts: git apply {self.patch}"

    def page_of(self, store: "Store") -> "Page":
        from assay.reports.files import Page, short_name

        facts = [("Agent", self.agent), ("Folder", str(self.path))]
        return Page(
            template="report.html", title=f"Referee of {short_name(self.agent)}", facts=facts, values={},
            runs=[self.run_id],
        )  # fmt: skip


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    gain = row["val_gain"]
    outcome = "promoted" if row["promoted"] else row["outcome"]
    flags = f"; it addresses a judge: {', '.join(row['flags'])}" if row["flags"] else ""
    return (
        row["texts"][:_SHORT] or "–", outcome, str(row["look"] or "–"),
        "–" if row["level"] is None else f"{row['level']:.2g}",
        "–" if gain is None or gain["mean"] is None else signed(gain["mean"]), f"{row['reason']}{flags}",
    )  # fmt: skip


class RefereeOutput(WithPage):
    """Output."""


class CloseReferee(Reported):
    """Close a referee: open the sealed test once, for the agent's own texts and the promoted ones, and report.

    Writes `report.json` and, where a text was promoted, `changes.patch` into the folder of the referee. A referee that
    is closed already gives its report again.

    Raises:
        ConfigError: there is no referee in the folder, or another process serves it.
        ArtifactError: a copy was changed since it was opened.
    """

    OUTPUT: ClassVar[Any] = RefereeOutput

    folder: Annotated[str | Path, Flag(metavar="DIR", key=False)] = field(kw_only=False)
    """Folder of the referee."""

    @property
    def store(self) -> Path:
        """The store with its runs."""
        from assay.jobs.referee_folder import STORE

        return Path(self.folder) / STORE

    def run(self) -> RefereeReport:
        import json

        from assay.jobs.referee import opened_referee
        from assay.jobs.referee_folder import RefereeFolder
        from assay.support.places import write_whole

        folder = RefereeFolder(self.folder)
        stored = next((event["report"] for event in folder.events() if event["event"] == "closed"), None)
        if stored is not None:
            self.reporter.say("this referee is closed: its report is given again, and nothing is run")
            return RefereeReport.read(stored, {"run_id": stored["run_id"]})
        with opened_referee(folder, progress=self.reporter) as referee:
            report = _closed(folder, referee)
            referee.job.status = "done"
            folder.log("closed", report={**report.to_dict(), "run_id": report.run_id})
        write_whole(folder.path / "report.json", json.dumps(report.to_dict(), ensure_ascii=False, indent=1))
        return report


def _closed(folder: "RefereeFolder", referee: "Referee") -> RefereeReport:
    """The report, after the one opening of the test."""
    from assay.jobs.agents import agent_notes
    from assay.jobs.referee_folder import find_sealed
    from assay.support.places import write_whole

    splits, workspace = referee.job.splits, Path(folder.manifest.workspace)
    search = find_sealed(workspace, splits.gate, allowed=[*splits.train, *splits.val]) if workspace.is_dir() else None
    before, after, gain = referee.tested()
    job, champion, changed = referee.job, referee.champion, referee.champion != referee.originals
    patch = None
    if changed:
        patch = folder.path / "changes.patch"
        write_whole(patch, folder.patch(champion))
    notes = [*folder.manifest.notes, *job.warnings, *agent_notes(job)]
    notes += [
        f"{path} was changed after the referee was opened; the referee ran its own copy"
        for path in folder.changed_sources()
    ]
    notes += [
        f"{path} has tasks of gate now: the agent wrote them there, or somebody else did. If the author of the texts "
        "has read them, the looks show no gain"
        for path in (search.found if search else ())
    ]
    if referee.opened_elsewhere:
        times = counted(referee.opened_elsewhere, "times")
        notes.append(f"other referees of this user have opened these test tasks {times} before")
    gate = referee.gate
    return RefereeReport(
        path=folder.path, agent=folder.manifest.agent, promotions=sum(row["promoted"] for row in referee.submissions),
        looks=len(gate.answers), looks_allowed=gate.looks, submissions=referee.submissions,
        test={
            "baseline": None if before is None else job.priced(before),
            "compiled": None if after is None else job.priced(after),
            "gain": None if gain is None else gain.to_dict(),
        },
        patch=patch, texts=champion if changed else {}, unprotected=list(UNPROTECTED), stopped=None, notes=notes,
        run_id=job.run_id, **job.spent(job.models()),
    )  # fmt: skip


UNPROTECTED = (
    "a process of the same user can read the memory and the files of the referee, and change its log: with standard "
    "input and output gate and test are sealed only if the coding agent does not look. Serve it with --http under "
    "another user, in a container or on another machine",
    "the list of looks is a file of this user, and can be removed by this user",
    "the agent runs its own code with the tasks of gate and test: its code is trusted not to pass them on",
)

open_referee = function_of(OpenReferee, "open_referee")
serve_referee = function_of(ServeReferee, "serve_referee")
show_skill = function_of(ShowSkill, "show_skill")
close_referee = function_of(CloseReferee, "close_referee")
