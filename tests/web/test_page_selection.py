"""Rollouts of the page that are added to a dataset, or downloaded as training data."""

import asyncio
import json
from pathlib import Path

import pytest
from pages import ROLLOUT, Browser, Scans, browse, posted, rollout_of_sums

from assay.optimizers.finetuning.data import read_sft
from assay.traces import Store
from assay.traces.records import subject_digest
from assay.web.rendering import DOWNLOADS

EXPORT = "/rollouts/export"


def filled(store: Store) -> None:
    """Stores ten rollouts: of one the score is low, one is of the test split, one of a tenant, one of a person."""
    for number in range(10):
        fields = {3: {"score": 0.25}, 4: {"split": "test"}, 5: {"tenant": "north"}, 6: {"data_subject": "ann"}}
        rollout_of_sums(store, number, **fields.get(number, {}))
    store.flush()


def downloaded(store: Store, path: str, **fields: str) -> tuple[int, str, dict[str, str]]:
    """Status, text and headers of a download."""
    answer = posted(store, path, **fields)
    return answer.status, asyncio.run(answer.text()), dict(answer.headers)


def test_the_filtered_rollouts_are_downloaded_as_rows_of_an_export(store: Store, tmp_path: Path) -> None:
    filled(store)
    status, text, headers = downloaded(store, EXPORT, kind="sft")
    assert status == 200, text
    rows = [json.loads(line) for line in text.splitlines()]
    assert 3 <= len(rows) <= 7  # not the low one, not the test split and what the salt seals, not the tenant's
    assert {tuple(message["role"] for message in row["prompt"]) for row in rows} == {("system", "user")}
    assert headers["Content-Disposition"].startswith('attachment; filename="assay-sft-')
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "no-store" in headers["Cache-Control"]
    (tmp_path / "rows.jsonl").write_text(text)
    data = read_sft(tmp_path / "rows.jsonl", min_quality=0.5, eval_fraction=0.2, seed=0)
    assert len(data.train) + len(data.held_out) == len(rows)


def test_only_what_the_filters_leave_is_downloaded(store: Store) -> None:
    filled(store)
    status, text, _ = downloaded(store, f"{EXPORT}?least=0.1&most=0.5", kind="transitions", min_clean="0")
    assert status in (200, 400)  # the salt may seal the one task
    if status == 200:
        assert {json.loads(line)["rollout"] for line in text.splitlines()} == {f"{3:032x}"}
        assert json.loads(text.splitlines()[0])["input"]["dialect"] == "chat"  # JSON, not text that holds JSON
    status, text, _ = downloaded(store, f"{EXPORT}?text=nowhere", kind="sft")
    assert (status, "nothing to download" in text) == (400, True)


def test_erasure_finds_a_download(store: Store) -> None:
    filled(store)
    assert downloaded(store, EXPORT, kind="transitions", min_clean="0")[0] == 200
    names = store.artifacts_of(subject_digest("ann"))
    assert [name.startswith("downloaded: assay-transitions-") for name in names] in ([True], [])  # [] if it is sealed


@pytest.mark.parametrize("kind", DOWNLOADS)
def test_a_download_has_no_data_of_sealed_tasks_or_tenants(store: Store, kind: str) -> None:
    filled(store)
    status, text, _ = downloaded(store, EXPORT, kind=kind, min_clean="0")
    assert (status == 200) == (kind != "preferences")  # of preferences there are no pairs
    assert not any(f'"{question} + 1"' in text for question in (4, 5))


def test_invalid_fields_and_a_form_without_its_token_are_refused(store: Store, tmp_path: Path) -> None:
    filled(store)
    for fields in ({"kind": "grpo"}, {"kind": ""}, {"kind": "sft", "min_quality": "2"}):
        assert downloaded(store, EXPORT, **fields)[0] == 400
    for path in (EXPORT, f"/rollouts/{ROLLOUT}/dataset"):
        assert downloaded(store, path, kind="sft", dataset="mine", csrf="no")[0] == 403
    assert not list(tmp_path.glob("datasets/*"))


def test_a_rollout_is_added_to_a_dataset(store: Store, tmp_path: Path) -> None:
    filled(store)

    async def visit(browser: Browser) -> tuple[str, str]:
        with Scans(store) as scans:
            data = {"csrf": browser.access.csrf, "dataset": "hard ones"}
            refused = await browser.send("POST", f"/rollouts/{ROLLOUT}/dataset", data=data)
            data["dataset"] = "hard-ones"
            headers = {"HX-Request": "true"}
            added = await browser.send("POST", f"/rollouts/{ROLLOUT}/dataset", data=data, headers=headers)
        assert refused.status == 400
        assert scans == []
        return await added.text(), (await browser.get(f"/rollouts/{4:032x}"))[1]

    part, sealed = browse(store, visit, where=tmp_path / "page.db")
    file = tmp_path / "datasets" / "hard-ones.jsonl"
    assert f"<bdi>{file}</bdi> has 1 task" in part
    assert 'value="hard-ones"' in part  # of the next one
    assert json.loads(file.read_text())["inputs"] == {"question": "How much is 2 + 1?"}
    assert "Not to be added" in sealed
