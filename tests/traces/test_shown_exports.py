"""Data subjects of prompts: exports, erasure, the three privacy gate states."""

import json
from pathlib import Path
from typing import Any

import pytest
from shown_tasks import job as job, question, task

import assay
from assay.commands.traces import forget_subject
from assay.errors import ConfigError, DataError, MissingExtra
from assay.models.cache import ResponseCache
from assay.models.lora.adapters import find_adapter, keep_adapter
from assay.optimizers.finetuning.sft import SFTSettings, train_sft
from assay.traces import Store
from assay.traces.export.settings import GateReport, Gates, Selection, UngatedExport
from assay.traces.privacy import gazetteers as privacy_gazetteers

LOOSE = Gates(min_transitions=0, min_clean=0.0, min_task_types=0)
BOTH = Selection(tenants=("north", "south"))


def exported_rows(where: str, **options: Any) -> tuple[list[dict[str, Any]], set[int]]:
    """Rows of an export, and the customers that their prompts show."""
    report = assay.export("transitions", "out", store=where, gates=LOOSE, privacy="off", **options)
    rows = [json.loads(line) for line in (report.path / "data.jsonl").read_text().splitlines()]
    text = "\n".join(json.dumps(row["input"]) for row in rows)
    return rows, {
        at
        for at in range(20)
        if question(at) in text or f"notes on house number {at}\\n" in text or f'house number {at}"' in text
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bool", "none", "unused"])
def test_exports_of_a_tenant_show_no_task_of_another_for_any_columns(job: dict[str, Any], kind: str) -> None:
    rows = [json.loads(line) for line in Path("d.jsonl").read_text().splitlines()]
    for at, row in enumerate(rows):
        row["inputs"]["extra"] = {"bool": at % 2 == 0, "none": None, "unused": f"customer-{at}-id"}[kind]
        row["metadata"]["consent"] = "yes"
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    signature = (
        "question -> answer" if kind == "unused" else f"question, extra{': bool' if kind == 'bool' else ''} -> answer"
    )
    passed = "question=question" if kind == "unused" else "question=question, extra=extra"
    Path("e.py").write_text(
        "import dspy\n\nclass E(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        self.ask = dspy.Predict('{signature}')\n\n"
        f"    def forward(self, question, extra=None):\n        return self.ask({passed})\n"
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
    rows, customers = exported_rows(job["store"], selection=Selection(tenants=("north",)))
    allowed = {at for at in range(20) if at % 2 == 0 and at % 3}
    assert rows
    assert customers <= allowed
    assert all(int(row["task_type"] == "default") for row in rows)
    left_out = json.loads(Path("out/manifest.json").read_text())["left_out"]
    assert any(reason.startswith("calls whose prompt shows") for reason in left_out)


# -- erasure


def test_an_erased_person_is_in_no_prompt_cache_or_later_export(job: dict[str, Any]) -> None:
    made = assay.compile("p.py:One", optimizer="labeled", out="a", gate=False, **job)
    at = next(
        at
        for at in range(12)
        if task(at) in json.loads((made.artifact / "manifest.json").read_text())["shown"]["tasks"]
    )
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


# -- the gate


@pytest.mark.parametrize(
    ("required", "state", "passed"),
    [
        ("patterns", "patterns only", True),
        ("patterns", "verified", True),
        ("patterns", "failed", False),
        ("names", "patterns only", False),
        ("names", "verified", True),
        ("off", "failed", True),
    ],
)
def test_the_privacy_gate_has_three_states(required: str, state: str, passed: bool) -> None:
    report = GateReport(Gates(privacy=required), state=state)
    gate = next(gate for gate in report.to_list() if gate["gate"] == "privacy")
    assert (gate["value"], gate["passed"]) == (state, passed)
    assert ("warning" in gate) == (passed and state == "patterns only")


@pytest.mark.slow
def test_undetected_names_are_a_warning_by_default_and_an_error_if_required(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assay.collect("p.py:P", n=1, **job)
    options: dict[str, Any] = {"store": job["store"], "gates": LOOSE, "selection": BOTH}
    report = assay.export("transitions", "one", privacy="patterns", **options)
    gate = next(gate for gate in report.manifest["gates"] if gate["gate"] == "privacy")
    assert (gate["passed"], gate["value"]) == (True, "patterns only")
    assert "names were not detected" in gate["warning"]
    assert report.manifest["privacy"]["state"] == "patterns only"
    assert not report.manifest["privacy"]["verified"]
    with pytest.raises(UngatedExport, match="privacy is patterns only, required is verified"):
        assay.export(
            "transitions",
            "two",
            privacy="patterns",
            **{**options, "gates": Gates(min_transitions=0, min_clean=0, min_task_types=0, privacy="names")},
        )
    if privacy_gazetteers.available():  # the lists do not find all planted names
        with pytest.raises(UngatedExport):
            assay.export("transitions", "three", privacy="names", **options)
    monkeypatch.setattr("assay.traces.privacy.gazetteers.available", lambda: False)
    monkeypatch.setattr("assay.traces.privacy.names.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="privacy"):
        assay.export("transitions", "four", privacy="names", **options)
    with pytest.raises(ConfigError, match="privacy: must be one of patterns, names, off, not 'maybe'"):
        Gates(privacy="maybe")


def test_answers_of_unknown_requests_are_erased_with_a_person(job: dict[str, Any]) -> None:
    """As cached by versions that stored no requests: the data subjects are unknown."""
    assay.collect("p.py:One", n=1, **job)
    place = Path(".assay/cache/responses.db")
    cache = ResponseCache(place)
    cache.put("ab" * 32, {"response": {}})
    cache.close()
    assert forget_subject("nobody", store=job["store"]).to_dict()["unowned_answers_removed"] == 0
    at = next(at for at in range(12) if forget_subject(f"Person {at}", store=job["store"]).to_dict()["removed"])
    cache = ResponseCache(place)
    assert at >= 0
    assert cache.get("ab" * 32) is None
    cache.close()


@pytest.mark.slow
def test_erasure_names_adapters_trained_on_an_export_and_their_successors(
    small_embedded: str, job: dict[str, Any]
) -> None:
    assay.collect("p.py:One", n=1, **{**job, "sizes": {"train": 2}})
    report = assay.export("sft", "out", store=job["store"], selection=BOTH, gates=LOOSE, min_quality=0.0)
    trained = train_sft(
        report.path,
        "first",
        SFTSettings(model=small_embedded, lora_r=2, epochs=1, max_length=1024, eval_fraction=0.0, min_quality=0.0),
    )
    first = find_adapter("first")
    keep_adapter("after", trained.path, base="small", after=[first])  # as if trained on other data
    keep_adapter("apart", trained.path, base="small")
    named: list[str] = []
    for at in range(12):
        named += forget_subject(f"Person {at}", store=job["store"]).to_dict()["made_from_them"]
    assert set(named) == {str(report.path), str(first.path), str(find_adapter("after").path)}
