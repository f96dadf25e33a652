"""`assay tune` on programs that run on the embedded model: tuned against default parameters on the sealed test split,
by seed.

    python benchmarks/tune.py [--tasks math_qa newest] [--seeds 0 1 2] [--trials 16]

`math_qa` is the shipped agent on sums, compiled first (or the artifact of `--artifact`), since the plain one scores
next to nothing on this model under any parameters. `newest` reads a Debian changelog of up to 1,500 tokens, entry by
entry, oldest first, and is asked for the version of the newest entry; the changelogs are those of this machine
(/usr/share/doc).
"""

import argparse
import gzip
import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import dspy

import assay
from assay.cli import Console

HEAD = re.compile(r"^\S+ \(([^)\s]+)\) .*; urgency=\w+", re.MULTILINE)
RUBRIC = "name: newest\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:exact', with: {field: version}}\n"


class Newest(assay.Agent):
    """The version of a changelog's last entry; what is over `context_length` is left out from the oldest entry on."""

    input_names = ("entries",)

    def __init__(self, parameters: Any = None, prompt_format: str = "json") -> None:
        super().__init__(parameters, prompt_format)
        fields = {
            "entries": (str, dspy.InputField(desc="oldest first")),
            "version": (str, dspy.OutputField(pattern=r"^[0-9A-Za-z.+~:-]{1,40}$")),
        }
        self.read = dspy.Predict(dspy.Signature(fields, "Give the version of the last entry."))

    def solve(self, **inputs: Any) -> dspy.Prediction:
        window = inputs["entries"].split("\n\n\n")
        return self.read(**self.fit_context(self.read, self.read.signature, inputs, window, "entries", keep=1))


def changelogs(folder: Path, tokens: int = 1500) -> list[dict[str, Any]]:
    """Changelogs with more than one entry, cut to their newest `tokens` (a token has about three characters here)."""
    rows: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*/changelog.Debian.gz")):
        text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")[: 3 * tokens]
        starts = [match.start() for match in HEAD.finditer(text)]
        entries = [text[start:end].strip() for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
        whole = "\n\n\n".join(reversed([re.sub(r"\n\s*\n", "\n", entry) for entry in entries]))
        if len(entries) > 1 and whole not in rows:
            rows[whole] = {"inputs": {"entries": whole}, "expected": {"version": HEAD.search(entries[0])[1]}}  # type: ignore[index]
    return list(rows.values())


SUMS = "arithmetic:terms=2-3&digits=2-3&size=600"


def compiled(folder: Path) -> str:
    """An artifact of `math_qa`, compiled as the demo does."""
    report = assay.compile(
        "math_qa",
        rubric="math_qa",
        data=SUMS,
        parameters={"temperature": 0.1},
        max_search_calls=140,
        sizes={"gate": 10, "test": 10},
        store=folder / "c.db",
        out=folder / "math_qa",
        progress=Console(),
    )
    return str(report.artifact)


def tuned(task: str, seed: int, trials: int, folder: Path, artifact: str | None) -> dict[str, Any]:
    if task == "math_qa":
        sizes = {"val": 16, "gate": 24, "test": 48}
        program: Any = {"program": artifact or compiled(folder), "rubric": "math_qa", "data": SUMS}
    else:
        sizes = {"val": 10, "gate": 16, "test": 30}
        rows = changelogs(Path("/usr/share/doc"))
        random.Random(seed).shuffle(rows)
        (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "r.yaml").write_text(RUBRIC)
        program = {
            "prompt_format": "lean",
            "program": f"{__file__}:Newest",
            "rubric": str(folder / "r.yaml"),
            "data": str(folder / "d.jsonl"),
            "salt": f"seed {seed}",
        }
    report = assay.tune(
        **program,
        trials=trials,
        objectives=("score", "tokens"),
        seed=seed,
        sizes=sizes,
        store=folder / "a.db",
        progress=Console(),
    ).to_dict()
    test, fields = report["test"], ("score", "tokens_per_task", "n")
    return {
        "task": task,
        "seed": seed,
        "best": report["best"],
        "gain": test["gain"],
        "tokens": test["tokens"],
        "gate": report["gate"],
        "replaces": report["replaces"],
        **{side: test[side] and {key: test[side][key] for key in fields} for side in ("default", "tuned")},
        "metrics": {side: test[side] and test[side]["metrics"] for side in ("default", "tuned")},
        "importance": report["importance"],
        "calls": report["calls"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["math_qa", "newest"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--artifact", help="A compiled math_qa.")
    arguments = parser.parse_args()
    for task in arguments.tasks:
        for seed in arguments.seeds:
            with tempfile.TemporaryDirectory() as folder:
                print(json.dumps(tuned(task, seed, arguments.trials, Path(folder), arguments.artifact)), flush=True)


if __name__ == "__main__":
    main()
