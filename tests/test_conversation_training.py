"""The guided conversations of `benchmarks/claims/conversation_training.py`. Training takes minutes: not tested here."""

import json
from collections import Counter
from pathlib import Path

import pytest

import assay
from assay.programs import Converse
from assay.testing.fakes import scripted_lm
from assay.traces import Store
from assay.traces.export.settings import Gates

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_the_scripted_agent_completes_a_conversation_with_a_correction_and_a_delay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from claims.conversation_training import DATA, guided, kind_of

    assay.collect(
        Converse(prompt_format="lean"),
        lm=scripted_lm(guided),
        n=1,
        rubric="converse",
        data=DATA.format(changes=1, seed=90),
        sizes={"train": 1},
        preflight=False,
        store=tmp_path / "a.db",
        threads=1,
    )
    with Store(tmp_path / "a.db") as store:
        assert [rollout.score for rollout in store.rollouts()] == [1]
    assay.export("sft", tmp_path / "rows", store=tmp_path / "a.db", gates=Gates(min_clean=0))
    rows = [json.loads(line) for line in (tmp_path / "rows" / "data.jsonl").read_text().splitlines()]
    kinds = Counter(kind_of(row) for row in rows)
    assert kinds.keys() == {"note", "note another", "choose", "ask"}
    assert kinds["note another"] == 2  # a correction of another field, and a message without a value
