"""Data subjects of prompts: exports, erasure, the three privacy gate states."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from export_rows import LOOSE, rows
from shown_tasks import job as job, question, task

import assay
from assay.commands.traces import forget_subject
from assay.errors import DataError
from assay.models.cache import ResponseCache
from assay.traces import Store
from assay.traces.export.settings import Selection

BOTH = Selection(tenants=("north", "south"))


def exported_rows(where: str, **options: Any) -> tuple[list[dict[str, Any]], set[int]]:
    """Rows of an export, and the customers that their prompts show."""
    report = assay.export("transitions", "out", store=where, gates=LOOSE, privacy="off", **options)
    written = rows(report.path)
    text = "\n".join(json.dumps(row["input"]) for row in written)
    return written, {
        at
        for at in range(20)
        if question(at) in text or f"notes on house number {at}\\n" in text or f'house number {at}"' in text
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bool", "none", "unused"])
def test_exports_of_a_tenant_show_no_task_of_another_for_any_columns(job: dict[str, Any], kind: str) -> None:
    tasks = [json.loads(line) for line in Path("d.jsonl").read_text().splitlines()]
    for at, row in enumerate(tasks):
        row["inputs"]["extra"] = {"bool": at % 2 == 0, "none": None, "unused": f"customer-{at}-id"}[kind]
        row["metadata"]["consent"] = "yes"
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tasks))
    inputs = {"bool": "question, extra: bool", "none": "question, extra", "unused": "question"}[kind]
    Path("e.py").write_text(
        "import dspy\n\nclass E(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        self.ask = dspy.Predict('{inputs} -> answer')\n\n"
        "    def forward(self, **inputs):\n"
        "        return self.ask(**{name: inputs[name] for name in self.ask.signature.input_fields})\n"
    )
    made = assay.compile("e.py:E", optimizer="labeled", out="a", preflight=False, gate=False, **job)
    assay.collect(str(made.artifact), n=1, preflight=False, **job)
    assert json.loads((made.artifact / "manifest.json").read_text())["shown"]["tasks"]
    exported, customers = exported_rows(job["store"], selection=Selection(tenants=("north",)))
    assert exported
    assert all(at % 2 == 0 for at in customers)


def test_exports_of_a_tenant_show_no_tasks_of_others_or_without_consent(job: dict[str, Any]) -> None:
    made = assay.compile("p.py:One", optimizer="labeled", out="a", **job)
    assay.collect(str(made.artifact), n=1, **job)
    written, customers = exported_rows(job["store"], selection=Selection(tenants=("north",)))
    assert written
    assert customers <= {at for at in range(20) if at % 2 == 0 and at % 3}
    left_out = json.loads(Path("out/manifest.json").read_text())["left_out"]
    assert any(reason.startswith("calls whose prompt shows") for reason in left_out)


def test_an_erased_person_is_in_no_prompt_cache_or_later_export(job: dict[str, Any]) -> None:
    made = assay.compile("p.py:One", optimizer="labeled", out="a", gate=False, **job)
    shown = json.loads((made.artifact / "manifest.json").read_text())["shown"]["tasks"]
    at = next(at for at in range(12) if task(at) in shown)
    cache = Path(".assay/cache/responses.db")
    erased = forget_subject(f" person  {at}", store=job["store"]).to_dict()
    assert str(made.artifact) in erased["made_from_them"]
    assert erased["prompts_emptied"] > 0
    assert erased["cached_answers_removed"] > 0
    with Store(job["store"]) as store:
        for rollout in store.rollouts():
            assert all(question(at) not in json.dumps(call.request) for call in store.rollout(rollout.id).transitions)
    assert cache.is_file()
    assert forget_subject(f"Person {at}", store=job["store"]).to_dict()["cached_answers_removed"] == 0
    assay.collect(str(made.artifact), n=1, **job)  # the artifact still shows them
    try:
        _, customers = exported_rows(job["store"], selection=BOTH)
    except DataError:
        customers = set()  # every call showed them
    assert at not in customers


def test_cached_answers_of_unknown_requests_are_erased_with_any_person(job: dict[str, Any]) -> None:
    """Whose data such a request had is unknown."""
    assay.collect("p.py:One", n=1, **job)
    with contextlib.closing(ResponseCache(Path(".assay/cache/responses.db"))) as cache:
        cache.put("ab" * 32, {"response": {}})
        assert forget_subject("nobody", store=job["store"]).to_dict()["unowned_answers_removed"] == 0
        assert cache.get("ab" * 32) is not None
        next(at for at in range(12) if forget_subject(f"Person {at}", store=job["store"]).to_dict()["removed"])
    with contextlib.closing(ResponseCache(Path(".assay/cache/responses.db"))) as cache:
        assert cache.get("ab" * 32) is None
