"""The folder of a referee: copies of the agent, rubric and data with their hashes, a log, and the store of its runs.

It is outside of the workspace that the optimizer sees. The looks at a gate are also written to a file of the user, so
that a new referee on the same tasks continues their count. Runs nothing and calls no model.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from assay.datasets import Task
from assay.datasets.keys import IDENTIFYING, folded_text
from assay.errors import ArtifactError, ConfigError, DataError
from assay.evaluation.session import Measured
from assay.programs.copies import LEFT_OUT, LINKED, VERSION_CONTROL, copy_folder
from assay.programs.runners import command_of, named_callable
from assay.programs.texts import TextFiles, patch_of
from assay.sources.artifact_files import read_json
from assay.sources.trust import trust_file
from assay.support.numbers import counted
from assay.support.places import write_whole
from assay.support.values import json_text, json_value, value_text

FORMAT = 1
MANIFEST, LOG, DATA, STORE, DECOYS = "referee.json", "log.jsonl", "data.jsonl", "assay.db", "gate.jsonl"
_AGENT, _RUNNING, _RUBRIC, _SUBMISSIONS = "agent", "running", "rubric", "submissions"
_MOST_READ = 200_000_000  # bytes of one file of the workspace that is searched, such as a store
_PROBE = 200  # characters of a task that are searched for
_NAMED = 5  # files that a message lists
_DECOYS = 50


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a referee was opened with.

    Attributes:
        id: of the referee, in the list of looks.
        agent: as it was given, in `folder`, whose copy is run.
        texts: of the agent: `name`, `text` and `is_value`, as `assay.programs.foreign_agent.TextAgent` takes them.
        delivery: how the agent gets new texts, as of `TextAgent`.
        roles: of the requests in which each text was found; null without a preflight.
        job: settings of the job, by name.
        gate: keys of the gate tasks.
        files: sha256 of each copied file, by its path in the folder.
        sources: sha256 of the files in the workspace that were copied, by path, to say at the end what changed there.
        measured: calls and tokens of one run, see `assay.evaluation.session.Measured`.
        notes: what is not protected, and other remarks for the report.
    """

    id: str
    agent: str
    folder: str
    workspace: str
    texts: Sequence[Mapping[str, Any]]
    delivery: str
    job: Mapping[str, Any]
    looks: int
    gate: Sequence[str]
    files: Mapping[str, str]
    sources: Mapping[str, str]
    measured: Mapping[str, Any] | None = None
    roles: Mapping[str, Sequence[str]] | None = None
    notes: Sequence[str] = ()
    opened_at: float = field(default_factory=time.time)
    format: int = FORMAT

    @property
    def originals(self) -> dict[str, str]:
        """The agent's own texts by name."""
        return {text["name"]: text["text"] for text in self.texts}


class RefereeFolder:
    """The folder of an opened referee.

    Raises:
        ConfigError: there is no referee in the folder.
        ArtifactError: its manifest cannot be read or has another format.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(os.path.abspath(path))
        if not (self.path / MANIFEST).is_file():
            raise ConfigError(f"{path} is not the folder of a referee: `assay referee open` makes one")
        content = read_json(self.path / MANIFEST, self.path)
        if content.get("format") != FORMAT:
            raise ArtifactError(f"{path} has the format {content.get('format')!r}; this version reads {FORMAT}")
        self.manifest = Manifest(**content)

    @property
    def store(self) -> Path:
        return self.path / STORE

    @property
    def copies(self) -> Path:
        """The copied agent."""
        return self.path / _AGENT

    @property
    def running(self) -> Path:
        """The copy of `copies` in which the agent runs, and may write files."""
        return self.path / _RUNNING

    def run_anew(self) -> Path:
        """Makes `running`, in place of that of an earlier process."""
        if self.running.is_symlink():
            self.running.unlink()
        shutil.rmtree(self.running, ignore_errors=True)
        copy_folder(self.copies, self.running)
        return self.running

    @property
    def rubric(self) -> str:
        return str(self.manifest.job["rubric"])

    def verify(self, *, runs: bool = False) -> None:
        """Raises `ArtifactError` if a copied file was changed, added or removed since the referee was opened.

        Args:
            runs: also if the agent runs with another file; files that it writes beside its own are not looked at.
        """
        found, before = hashes_of_copies(self.path), self.manifest.files
        changed = sorted(place for place in {*found, *before} if found.get(place) != before.get(place))
        for place, sha in before.items() if runs else ():
            file = self.running / Path(place).relative_to(_AGENT) if place.startswith(f"{_AGENT}/") else None
            if file is not None and (not file.is_file() or hash_of(file) != sha):
                changed.append(file.relative_to(self.path).as_posix())
        if changed:
            raise ArtifactError(
                f"the referee's copies were changed after it was opened: {', '.join(changed[:_NAMED])}. What it would "
                "measure is not valid: open a new referee in a place that the optimizer cannot write to"
            )

    def changed_sources(self) -> list[str]:
        """Files of the workspace that were copied and have changed there since, such as an edited rubric."""
        return [path for path, sha in self.manifest.sources.items() if not Path(path).is_file() or hash_of(path) != sha]

    def tried(self, measured: Measured | None, roles: Mapping[str, Sequence[str]] | None) -> None:
        """Stores what a run of the agent uses, and where its texts are in its requests."""
        notes = [*self.manifest.notes, *(measured.warnings if measured else ())]
        values = None if measured is None else {**asdict(measured), "warnings": list(measured.warnings)}
        self.manifest = replace(self.manifest, measured=values, roles=roles, notes=notes)
        write_manifest(self.path, self.manifest)

    def log(self, event: str, **values: Any) -> dict[str, Any]:
        """Appends an event to the log, on the disk when this returns."""
        row = {"at": time.time(), "event": event, **json_value(values, placeholders=True)}
        _append(self.path / LOG, row)
        return row

    def events(self) -> list[dict[str, Any]]:
        """The events in their order. A line that was cut off by a kill is left out."""
        return list(_rows(self.path / LOG))

    def keep_texts(self, texts: Mapping[str, str]) -> str:
        """Stores the texts of a submission; returns their digest."""
        digest = digest_of_texts(texts)
        place = self.path / _SUBMISSIONS / f"{digest}.json"
        place.parent.mkdir(exist_ok=True)
        if not place.exists():
            write_whole(place, json.dumps(dict(texts), ensure_ascii=False, indent=1))
        return digest

    def patch(self, texts: Mapping[str, str]) -> str:
        """The changes of the agent's files that new texts make, as `git apply` takes them in the agent's folder."""
        names = {name: f"{self.copies}/{name}" for name in texts}
        files = TextFiles(list(names.values())).with_texts({names[name]: text for name, text in texts.items()})
        here = Path(self.manifest.folder)
        place = here if here.is_dir() else self.copies
        with chdir(place):  # to which paths are relative where there is no repository
            return patch_of([replace(file, path=place / file.path.relative_to(self.copies)) for file in files])

    def texts_of(self, digest: str) -> dict[str, str]:
        """The texts of a submission. Raises `ArtifactError` if they were changed since."""
        texts = dict(read_json(self.path / _SUBMISSIONS / f"{digest}.json", self.path))
        if digest_of_texts(texts) != digest:
            raise ArtifactError(f"{self.path / _SUBMISSIONS}: the texts {digest} were changed after their submission")
        return texts


def digest_of_texts(texts: Mapping[str, str]) -> str:
    """12 hex digits that identify texts by name."""
    return hashlib.sha256(json_text(dict(texts), sort_keys=True).encode("utf-8", "replace")).hexdigest()[:12]


def write_manifest(path: Path, manifest: Manifest) -> None:
    write_whole(
        path / MANIFEST, json.dumps(json_value(vars(manifest), placeholders=True), ensure_ascii=False, indent=1)
    )


def hashes_of_copies(path: Path) -> dict[str, str]:
    """sha256 of each copied file, by its path in the folder."""
    return {place: hash_of(path / place) for place in _files_in(path, (_AGENT, _RUBRIC, DATA, DECOYS))}


def hash_of(path: str | Path) -> str:
    """sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files_in(path: Path, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        place = path / name
        found = [place] if place.is_file() else _walked(place, LINKED | LEFT_OUT)
        yield from (file.relative_to(path).as_posix() for file in found)


def _walked(folder: Path, without: Collection[str]) -> Iterator[Path]:
    """The files below a folder, without folders of these names; links to folders are not followed."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in without)
        yield from (Path(root) / name for name in sorted(names))


def _append(path: Path, row: Mapping[str, Any]) -> None:
    with open(path, "ab") as file:
        file.write(json_text(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


# -- Copies.


def copy_agent(agent: str, place: Path, *, without: Sequence[Path]) -> tuple[dict[str, str], list[str]]:
    """Copies the working directory, from which the agent is run, without `without`.

    Installed packages in it (`node_modules`, `.venv`) are linked.

    Returns:
        sha256 of the copied files by path, and the folders that are linked.
    Raises:
        ConfigError: the agent is a name of an installed module, or its files are too large.
    """
    here = Path.cwd().resolve()
    if named_callable(agent):
        file = Path(agent.rpartition(":")[0])
        if file.suffix != ".py" or not file.is_file():
            raise ConfigError(
                f"`agent={agent!r}` must be a file to be copied: write path/file.py:FUNCTION, or a command"
            )
        if not file.resolve().is_relative_to(here):
            raise ConfigError(f"`agent={agent!r}` is outside of {here}: run this command in the folder of the agent")
    elif own := [word for word in command_of(agent) if _is_in(here, word)]:
        raise ConfigError(f"{own[0]} would be run itself, and not its copy: write it relative to {here}", field="agent")
    linked = copy_folder(here, place, without={path.resolve() for path in without})
    files = {
        str(here / path.relative_to(place)): hash_of(path)
        for path in _walked(place, LINKED | LEFT_OUT)
        if path.is_file()
    }
    return files, [str(folder) for folder in linked]


def _is_in(folder: Path, word: str) -> bool:
    """Whether a word of a command is an absolute path in a folder, other than of installed packages."""
    path = Path(word)
    return path.is_absolute() and path.is_relative_to(folder) and not set(path.parts) & LINKED


def copy_rubric(files: Mapping[str, bytes], folder: Path) -> str:
    """Writes a rubric with all files that it names; returns its path."""
    for name, content in files.items():
        target = folder / _RUBRIC / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return str(folder / _RUBRIC / next(iter(files)))


def write_data(folder: Path, parts: Mapping[str, Sequence[Task]]) -> None:
    """Writes the tasks with their splits."""
    with open(folder / DATA, "w", encoding="utf-8") as file:
        for split, tasks in parts.items():
            for task in tasks:
                row = {
                    "id": task.id, "task_type": task.task_type, "inputs": dict(task.inputs),
                    "expected": {name: {"$null": True} if v is None else v for name, v in task.expected.items()},
                    "metadata": dict(task.metadata), "split": split,
                }  # fmt: skip
                file.write(json_text(json_value(row)) + "\n")


def write_decoys(folder: Path, tasks: Sequence[Task]) -> None:
    """Writes a file that looks like the gate tasks: val tasks with answers of other tasks, which are wrong.

    Nobody who plays by the rules reads it. A text that answers these tasks shows that it was read.
    """
    rows = decoys_of(tasks)
    text = "".join(json_text(json_value({"inputs": dict(t.inputs), **dict(t.expected)})) + "\n" for t in rows)
    (folder / DECOYS).write_text(text, encoding="utf-8")


def decoys_of(tasks: Sequence[Task]) -> list[Task]:
    """The decoys of val tasks: each has the answer of a task half of them away; none if all answers are the same."""
    decoys, tasks = list[Task](), tasks[:_DECOYS]
    for at, task in enumerate(tasks):
        far = at + len(tasks) // 2
        others = (*tasks, *tasks)[far : far + len(tasks)]  # a table of right answers has none of them nearby
        other = next((one for one in others if dict(one.expected) != dict(task.expected)), None)
        if other is not None:
            decoys.append(replace(task, expected=dict(other.expected)))
    return decoys


# -- Sealed tasks in the workspace.


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a search of the workspace for sealed tasks found.

    Attributes:
        found: files that have the text of a sealed task.
        unread: files that were not read: too large, or not readable.
        short: number of sealed tasks whose text is too short to be searched for.
    """

    found: Sequence[str]
    unread: Sequence[str]
    short: int


def find_sealed(workspace: Path, tasks: Sequence[Task], *, allowed: Sequence[Task]) -> Search:
    """Searches the files below a folder for the text of sealed tasks, also in databases and in the folders `.assay`.
    Installed packages and version control are not searched.

    Args:
        allowed: tasks that may be there; text that they share with a sealed task is not searched for.
    """
    others = "\n".join(folded_text(value_text(value)) for task in allowed for value in task.inputs.values())
    probes, short = set[bytes](), 0
    for task in tasks:
        probe = max((part for value in task.inputs.values() for part in _parts(value_text(value))), key=len, default="")
        if len(probe) < IDENTIFYING or probe in others:
            short += 1
        else:
            probes.add(probe.encode("utf-8", "replace"))
    found, unread = list[str](), list[str]()
    for file in _walked(workspace, LINKED | VERSION_CONTROL) if probes else ():
        try:
            content = file.read_bytes() if file.is_file() and file.stat().st_size <= _MOST_READ else None
        except OSError:
            content = None
        if content is None:
            unread.append(str(file))
            continue
        text = folded_text(content.decode("utf-8", "replace")).encode("utf-8", "replace")
        if any(probe in text for probe in probes):
            found.append(str(file))
    return Search(found=found, unread=unread, short=short)


def _parts(text: str) -> list[str]:
    """Parts of a text that stand in any file that holds it, whatever it escapes."""
    parts = [text]
    for mark in ("\n", '"', "\\", "'", "&", "<", ">"):
        parts = [piece for part in parts for piece in part.split(mark)]
    return [folded_text(part)[:_PROBE].strip() for part in parts]


def require_sealed(search: Search, workspace: Path) -> list[str]:
    """Notes for the report on what the search could not see.

    Raises:
        DataError: a sealed task is in the workspace.
    """
    if search.found:
        more = f" and {len(search.found) - _NAMED} more" if len(search.found) > _NAMED else ""
        raise DataError(
            f"tasks of gate or test are in {workspace}, which the optimizer can read: "
            f"{', '.join(search.found[:_NAMED])}{more}. Move these files out of it (the referee keeps its own copy of "
            "the data), or name the optimizer's folder with `workspace`"
        )
    notes = []
    if search.short:
        notes.append(
            f"{counted(search.short, 'sealed tasks')} have no text of their own that is long enough to search for in "
            "the workspace"
        )
    if search.unread:
        notes.append(f"{counted(len(search.unread), 'files')} of the workspace were not searched: {search.unread[0]}")
    if any((workspace / name).exists() for name in VERSION_CONTROL):
        notes.append("the history of version control in the workspace was not searched: it is compressed")
    if packages := sorted(name for name in LINKED if (workspace / name).exists()):
        notes.append(f"installed packages in the workspace were not searched: {', '.join(packages)}")
    return notes


# -- Looks at gates, by the user.


def looks_file() -> Path:
    """`looks.jsonl` next to the list of trusted files."""
    return trust_file().with_name("looks.jsonl")


class LookLedger:
    """The looks at gates that share a task, by all referees of this user.

    A look that was begun and has no answer counts as one that did not promote.

    Args:
        referee: id of the referee that looks.
        gate: keys of its gate tasks.
    """

    def __init__(self, referee: str, gate: Sequence[str]) -> None:
        self.referee, self.gate = referee, sorted(set(gate))

    def answers(self) -> list[bool]:
        """Of the looks so far, in the order in which they were begun."""
        return [bool(row.get("promoted")) for row in self._looks()]

    def looks(self) -> int | None:
        """The number of looks that the first of them was opened with; None without one."""
        return next((int(row["looks"]) for row in self._looks()), None)

    def begin(self, looks: int) -> int:
        """Counts a look; returns its number."""
        path = looks_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            number = len(self._looks()) + 1
            _append(
                path,
                {"referee": self.referee, "look": number, "looks": looks, "gate": self.gate, "at": time.time()},
            )
        return number

    def answer(self, number: int, promoted: bool) -> None:
        """Stores the answer of a look."""
        _append(looks_file(), {"referee": self.referee, "look": number, "promoted": promoted, "at": time.time()})

    def open_test(self, test: Sequence[str]) -> int:
        """Counts an opening of test tasks; returns how often other referees of this user have opened any of them."""
        rows, known = list(_rows(looks_file())), set(test)
        others = {row["referee"] for row in rows if known & set(row.get("test") or ())} - {self.referee}
        looks_file().parent.mkdir(parents=True, exist_ok=True)
        _append(looks_file(), {"referee": self.referee, "test": sorted(known), "at": time.time()})
        return len(others)

    def _looks(self) -> list[dict[str, Any]]:
        known, looks = set(self.gate), dict[tuple[str, int], dict[str, Any]]()
        for row in _rows(looks_file()):
            key = str(row.get("referee")), int(row.get("look") or 0)
            if "gate" in row and known & set(row["gate"]):
                looks[key] = row
            elif "promoted" in row and key in looks:
                looks[key] = {**looks[key], "promoted": row["promoted"]}
        return list(looks.values())
