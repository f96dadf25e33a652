"""A store with a finished compile: its rollouts, its report, and the files of its artifact."""

import json
from pathlib import Path
from typing import Any

from pages import NOW, rollout_of_sums

from assay.traces import Store, Verdict

HOSTILE = "<script>alert(1)</script>\u202e\x07"
GRADES = {"before": [0.0, 0.0, 0.0, 1.0, 1.0, 1.0], "after": [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]}


def put_compile(
    store: Store, folder: Path, *, text: str = "", replaces: bool = True, run_id: str = "run-1",
) -> dict[str, Any]:  # fmt: skip
    """Stores a run with two candidates and six tasks in gate and test. Returns its report.

    Args:
        folder: of the store; the run's folder and the artifact are written there.
        text: added to names, instructions and demonstrations.
    """
    store.put_run(run_id, kind="compile", config={"program": "sums.py:Sums"}, status="done", started_at=NOW)
    number = 1_000  # those before are of other runs
    for phase, split in (("search", "val"), ("gate", "gate"), ("test", "test")):
        for side, version in (("before", "v1"), ("after", "v2")):
            for task, grade in enumerate(GRADES[side]):
                number += 1
                verdicts = [
                    Verdict(criterion="right", grade=grade, weight=2.0), Verdict(criterion="short", grade=1.0, weight=1)
                ]  # fmt: skip
                rollout_of_sums(
                    store, number, run_id=run_id, task_id=f"{split}-{task}", task_type=f"kind-{task % 2}", phase=phase,
                    split=split, program_version=version, parameters={"temperature": 0.1}, score=grade,
                    verdicts=verdicts,
                )  # fmt: skip
    report = compile_report(folder / "artifact", text, replaces)
    store.put_state(run_id, {"report": report})
    store.flush()
    for place, content in (
        (folder / "artifact" / "program.json", {"kind": "program", "state": {"answer": {"demos": demos(text)}}}),
        (folder / "artifact" / "manifest.json", {"shown": {"by_demo": [["a" * 64], []]}}),
    ):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(content))
    return report


def demos(text: str) -> list[dict[str, str]]:
    return [{"question": f"one{text}", "answer": "1"}, {"question": "two", "answer": "2"}]


def compile_report(artifact: Path, text: str, replaces: bool) -> dict[str, Any]:
    """As `CompileReport.to_dict()`."""
    candidates = [
        {"name": name, "version": version, "n": 6, "val_score": score, "expected": score, "dropped": "",
         "settings": {"adapter": adapter, "parameters": {"temperature": 0.1}}, "instructions": {"answer": instruction}}
        for name, version, score, adapter, instruction in (
            ("baseline", "v1", 0.5, "json", "Add the numbers."),
            (f"two demonstrations{text}", "v2", 0.833, "lean", f"Add the numbers.\nAnswer with digits{text}."),
        )
    ]  # fmt: skip
    gain = {"mean": 0.333, "low": 0.1 if replaces else -0.2, "high": 0.6, "n": 6}
    sides = {
        name: {"score": score, "interval": [0.1, 0.9], "n": 6, "unscored": 0, "criteria": {}, "task_types": {}}
        for name, score in (("baseline", 0.5), ("compiled", 0.833))
    }
    return {
        "artifact": str(artifact), "winner": candidates[1]["name"], "candidates": candidates, "gate": gain,
        "replaces": replaces, "test": {**sides, "gain": gain}, "notes": [], "stopped": None,
        "test_openings": {"this_job": 1, "this_store": 3},
    }  # fmt: skip
