"""A store with a judge: its question, labels of two raters, verdicts, a compile with its card, audit and replay."""

from pathlib import Path
from typing import Any

from pages import NOW

from assay.judges.labels import Item, make_items
from assay.judges.quality.agreement import Answers, agreement, ceiling
from assay.judges.quality.card import reliability_card
from assay.judges.questions import Question, items_to_label, remember
from assay.rubrics import JudgeSpec
from assay.traces import Rollout, Store

SOURCE = "kind.yaml"
SCALE = ("rude", "neutral", "kind")
COUNT = 12
EARLIER = {"alarms": [], "mean_difference": -0.05, "cusum": 3.0, "psi": 0.1, "psi_limit": 0.4}  # a replay before


def put_question(
    store: Store, *, text: str = "Is it kind?", pairs: bool = False, scale: tuple[str, ...] = SCALE
) -> str:
    """Stores a question of a judge. Returns its key."""
    shows = ("task_input", "output_a", "output_b") if pairs else ("task_input", "output")
    spec = JudgeSpec(text=text, scale=scale, anchors={scale[-1]: "It shows care."})
    return remember(store, Question(spec=spec, shows=shows), SOURCE).key


def put_outputs(store: Store, *, text: str = "") -> list[Rollout]:
    """Stores two outputs of each of `COUNT` tasks, the first of them of the sealed test split."""
    rollouts = [
        Rollout(
            id=f"{10 * task + sample:032x}", run_id="run-1", task_id=f"t{task}", program="p", status="done",
            split="test" if task == 0 else "train", inputs={"question": f"q{task}{text}"},
            prediction={"answer": f"answer {sample} of {task}{text}"}, started_at=NOW + 10 * task + sample,
        )
        for task in range(COUNT)
        for sample in range(2)
    ]  # fmt: skip
    for rollout in rollouts:
        store.put_rollout(rollout)
    store.flush()
    return rollouts


def answers(items: list[Item]) -> Answers:
    """A judge that calls every third item rude and the others kind."""
    verdicts = ["rude" if at % 3 == 0 else "kind" for at in range(len(items))]
    masses = [{label: 0.8 if label == verdict else 0.1 for label in SCALE} for verdict in verdicts]
    return Answers(verdicts, [float(SCALE.index(verdict)) for verdict in verdicts], masses, [None] * len(items))


def judge_card(rows: list[dict[str, Any]], spec: JudgeSpec) -> dict[str, Any]:
    """The card of that judge on labels."""
    items = make_items([("r", row) for row in rows], labels=SCALE)
    verdicts = answers(items)
    return reliability_card(
        verdicts, items, spec, agreement=agreement(verdicts, items, spec), ceiling=ceiling(items, spec),
        objective="weighted_kappa",
    )  # fmt: skip


SPENT = {"calls": 9, "cached": 0, "repeated_calls": 0, "tokens": 90, "cost_usd": 0.0, "unrecorded": 0}
JUDGED: dict[str, Any] = {"coverage": 1.0, "undecided": {}}
SEALED: dict[str, Any] = {  # of a compile of a judge whose test was not opened
    "stopped": None,
    "notes": [],
    "test_openings": None,
    "data": {"near_duplicates": {"count": 0, "examples": []}},
    "unproven": None,
    "optimizer": "auto",
    "objective": "kappa",
    "winner": "bootstrap",
    "replaces": False,
    "gate": None,
    "sizes": {},
    "ceiling": None,
    "candidates": [],
    "search_calls": 9,
    "outcome": None,
    "test": dict.fromkeys(("baseline", "compiled", "gain", "accuracy_gain")),
}


def put_judge(store: Store, folder: Path, *, text: str = "") -> str:
    """Stores everything that the page of a judge shows. Returns the key of its question.

    Ann calls every item kind, Bob all but every fourth.

    Args:
        folder: of the store; the folders of runs are written there.
        text: added to the question and the outputs.
    """
    key = put_question(store, text=f"Is it kind?{text}")
    question = Question(spec=JudgeSpec(text=f"Is it kind?{text}", scale=SCALE))
    entries = list(items_to_label(put_outputs(store, text=text), question))
    for at, entry in enumerate(entries):
        for rater, label in (("ann", "kind"), ("bob", "kind" if at % 4 else "neutral")):
            store.put_label(
                key, entry.item_id, rater, label, fields=entry.fields, rationale=text, rollout_id=entry.rollout_id
            )
    rows = list(store.labels(key))
    card = judge_card(rows, question.spec)
    reports = {
        "judge compile": {
            **SPENT, **SEALED, "artifact": str(folder / "judge"), "card": card,
        },
        "judge audit": {
            **SPENT, **JUDGED, "judge": card.get("judge"), "biases": {}, "profile": "quality", "cases": {},
            "not_tried": [], "verdicts": 8, "unscored": 0,
            "passed": False, "pass_at": 0.8, "flip_alarms": ["praise changes 50% of the verdicts"], "notes": [],
            "attacks": {
                "empty": {"n": 4, "right": 4, "share": 1.0, "passed": True, "flip_rate": None, "wrong": []},
                "praise": {
                    "n": 4, "right": 1, "share": 0.25, "passed": False, "flip_rate": 0.5,
                    "wrong": [
                        {"output": f"Great{text}", "value": 0.9, "rule": "not above", "against": 0.1},
                        {"output": f"Superb{text}", "value": 0.8, "rule": "not above", "against": 0.1},
                    ],
                },
            },
        },
        "judge drift": {
            **SPENT, **JUDGED, "mean_square": None, "mean_square_error": None, "noise": 0.0, "flips": None,
            "alarms": ["verdicts shifted"], "changed": {"model": ["a", "b"]}, "n": 60, "lost": 0,
            "mean_difference": -0.3, "cusum": 9.0, "cusum_limit": 7.5, "psi": None, "psi_limit": None,
        },
    }  # fmt: skip
    before = {**reports["judge drift"], **EARLIER}
    runs = [(0, kind.replace(" ", "-"), kind, report) for kind, report in reports.items()]
    for days, run_id, kind, report in [*runs, (-7, "judge-drift-before", "judge drift", before)]:
        config = {"judge": SOURCE, "labels": "store"}
        store.put_run(run_id, kind=kind, config=config, status="done", started_at=NOW + 86_400 * days)
        remember(store, question, SOURCE, run_id=run_id)
        store.put_state(run_id, {"report": report})
    for at, (entry, verdict) in enumerate(zip(entries, answers([None] * len(entries)).verdicts, strict=True)):  # type: ignore[list-item]
        store.put_rollout(
            Rollout(
                id=f"{1_000 + at:032x}", run_id="judge-compile", task_id=entry.item_id, task_type="verdict",
                source="judge", program="assay.judges.pointwise:PointwiseJudge", split="val", status="done",
                inputs=dict(entry.fields), prediction={"verdict": verdict, "confidence": 0.8, "value": 0.5},
                started_at=NOW + 1_000 + at,
            )
        )  # fmt: skip
    store.flush()
    return key
