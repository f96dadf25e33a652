"""What assay does with the programs of `dspy_programs`: each step compares its count of calls with the server's."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import litellm
from prompt_server import PromptServer

import assay

FOLDER = Path(__file__).parent / "dspy_programs"
# Name of each program, and what its class or object is called.
PROGRAMS: dict[str, str] = {
    "hops": "Program",
    "tools": "Program",
    "structured": "Program",
    "dialogue": "Program",
    "picture": "Program",
    "concurrent": "Program",
    "streaming_reply": "Program",
    "own_models": "Program",
    "react_v2": "program",
    "refined": "Program",
    "reasoned": "Program",
}
# More of them, each with one optimizer.
OTHERS = {
    "recursive": ("program", "auto"),
    "own_engine": ("Program", "simba"),
    "own_lm": ("Program", "mipro"),
    "sound": ("Program", "gepa"),
    "paper": ("program", "auto"),
    "tagged": ("Program", "auto"),
    "native_tools": ("Program", "gepa"),
    "written_code": ("Program", "mipro"),
}
MODELS = {"native_tools": "openai/gpt-4o-mini"}  # one that litellm knows to call functions
# Settings that keep each search small.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "auto": {"max_search_calls": 60, "demos": 2},
    "mipro": {
        "optimizer_settings": {"num_trials": 2, "auto": None, "num_candidates": 2, "minibatch": False},
        "demos": 2,
    },
    "gepa": {"optimizer_settings": {"max_metric_calls": 40}},
    "simba": {"optimizer_settings": {"bsize": 4, "max_steps": 1, "num_candidates": 2, "max_demos": 1}},
}
_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="

_MEDIA = {  # field of a program's tasks, MIME type, content
    "picture": ("image", "image/png", _PIXEL),
    "sound": ("recording", "audio/wav", "UklGRgAAAABXQVZF"),
    "paper": ("paper", "application/pdf", "JVBERi0xLjQ="),
}
_NO_REWARD = ("recursive",)  # whose answer is what its code computes
KINDS = ("sft", "grpo", "transitions")
_SIZES = {"train": 8, "val": 6, "gate": 4, "test": 4}


@dataclass
class Place:
    """A folder with a program, its tasks and a rubric, and the server of its models."""

    folder: Path
    name: str
    server: PromptServer

    @property
    def program(self) -> str:
        return f"{self.folder / self.name}.py:{PROGRAMS.get(self.name) or OTHERS[self.name][0]}"

    @property
    def store(self) -> Path:
        return self.folder / "assay.db"

    @property
    def job(self) -> dict[str, Any]:
        return {
            "rubric": str(self.folder / "rubric.yaml"),
            "data": str(self.folder / "tasks.jsonl"),
            "model": MODELS.get(self.name, "openai/main"),
            "api_base": self.server.url,
            "price": "1,2",
            "store": self.store,
        }


def laid_out(folder: Path, name: str, server: PromptServer) -> Place:
    for model in ("planner", "checker", "critic"):  # those that a program brings along have a price too
        litellm.register_model({f"openai/{model}": {"input_cost_per_token": 1e-6, "output_cost_per_token": 2e-6}})
    folder.mkdir()
    shutil.copy(FOLDER / f"{name}.py", folder)
    (folder / "rubric.yaml").write_text("name: sums\ncriteria:\n- {name: right, check: exact}\n")
    lines = [json.dumps({**_row(name, number), **_expected(name, number)}) for number in range(20, 80)]
    (folder / "tasks.jsonl").write_text("\n".join(lines))
    return Place(folder, name, server)


def _row(name: str, number: int) -> dict[str, Any]:
    row: dict[str, Any] = {"question": f"What is {number} + 1?"}
    if name == "dialogue":
        row["history"] = {"messages": [{"question": "Do you add numbers?", "answer": "Yes."}]}
    if name in _MEDIA:
        field, kind, content = _MEDIA[name]
        row[field] = f"data:{kind};base64,{content}"
    return row


def _expected(name: str, number: int) -> dict[str, Any]:
    if name != "structured":
        return {"answer": str(number + 1)}
    terms = [{"value": value, "sign": "plus"} for value in (number, 1)]
    return {"sum": {"terms": terms, "total": number + 1}}


def _stored(store: Path, run: str = "%") -> tuple[int, float]:
    """LM calls in the store, by default of all runs, and what they cost."""
    if not store.exists():
        return 0, 0.0
    query = (
        "select count(*), coalesce(sum(cost_usd), 0) from transitions "
        "join rollouts on rollouts.id = rollout_id where run_id like ?"
    )
    with closing(sqlite3.connect(store)) as connection:
        count, cost = connection.execute(query, [run]).fetchone()
    return count, cost


def _counted(place: Place, work: Any) -> dict[str, Any]:
    """The report of a job, whose calls are those that the server saw and, with the cached ones, those in the store."""
    sent, (stored, _) = place.server.total, _stored(place.store)
    report: dict[str, Any] = work().to_dict()
    assert report["unrecorded"] == (None if place.name == "recursive" else 0)  # its interpreter may call models too
    assert report["calls"] == place.server.total - sent
    assert report["calls"] + report["cached"] + report["repeated_calls"] == _stored(place.store)[0] - stored
    assert report["stopped"] is None
    return report


def evaluates(place: Place) -> None:
    report = _counted(place, lambda: assay.evaluate(place.program, sizes={"val": 6}, **place.job))
    assert report["tasks"] == 6
    assert 0 < report["result"]["score"] <= 1
    assert report["cost_usd"] is None if report["unrecorded"] is None else report["cost_usd"] > 0


def stops_at_a_cap(place: Place, cap: int = 5) -> None:
    before = place.server.total
    report = assay.evaluate(
        place.program, sizes={"val": 6}, max_calls=cap, preflight=False, cache=False, threads=4, **place.job
    ).to_dict()
    assert report["calls"] == place.server.total - before <= cap


def compiles(place: Place, optimizer: str) -> Path:
    """Artifact of the compiled program."""
    out = place.folder / f"by_{optimizer}"
    options = {**OPTIMIZERS[optimizer], **place.job}
    report = _counted(
        place, lambda: assay.compile(place.program, optimizer=optimizer, sizes=_SIZES, seed=1, out=out, **options)
    )
    assert not report["failed"]
    assert report["search_calls"] > 0
    return Path(report["artifact"])


def runs_elsewhere(place: Place, artifact: Path, other: Path) -> None:
    """Runs a copy of the artifact in another process, where the program's own file does not exist."""
    other.mkdir()
    shutil.copytree(artifact, other / "program")
    (other / "rows.jsonl").write_text("\n".join(json.dumps(_row(place.name, number)) for number in (7, 8)))
    source = place.folder / f"{place.name}.py"
    hidden = source.rename(source.with_suffix(".away"))
    before = place.server.total
    try:
        command = [sys.executable, "-m", "assay", "run", "program", "--file", "rows.jsonl", "--trust"]
        done = subprocess.run(
            [*command, "--store", "assay.db", "--api-base", place.server.url],
            cwd=other, env=dict(os.environ), capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        hidden.rename(source)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    answers = [int(row["sum"]["total"] if "sum" in row else row["answer"]) for row in rows]
    assert [answer - number in (1, 2) for answer, number in zip(answers, (7, 8), strict=True)] == [True, True]
    assert _stored(other / "assay.db")[0] == place.server.total - before > 0


def collects(place: Place) -> str:
    """Id of the run."""
    report = _counted(
        place, lambda: assay.collect(place.program, sizes={"train": 6}, n=3, preflight=False, **place.job)
    )
    assert report["rollouts"] == 18
    return str(report["run"])


def exports(place: Place, run: str, trained: Path) -> None:
    """SFT, GRPO and transitions of a collected run for the model in `trained`, without a request to the server."""
    before, (calls, _) = place.server.total, _stored(place.store, run)
    more = {"sft": {"model": str(trained)}, "grpo": {"model": str(trained), "rubric": place.job["rubric"]}}
    kinds = [kind for kind in KINDS if kind != "grpo" or place.name not in _NO_REWARD]
    rows = {
        kind: assay.export(kind, place.folder / kind, store=place.store, runs=[run], **more.get(kind, {})).rows
        for kind in kinds
    }
    assert place.server.total == before
    assert min(rows.values()) > 0
    assert rows["transitions"] == calls
