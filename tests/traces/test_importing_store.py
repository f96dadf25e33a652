"""Imports into the store: repeated imports, traces in several files, scores and ratings."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from importing_rows import DATA, chat, lines, mark, observation, otlp, read, request, span

from assay.errors import DataError
from assay.traces import Rollout, Store
from assay.traces.importers import ImportReport, import_traces
from assay.traces.store.tables import metadata


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    url = str(tmp_path / "s.db")
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
        engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        metadata.drop_all(engine)
        engine.dispose()
    with Store(url) as opened:
        yield opened


def stored(opened: Store) -> list[Rollout]:
    opened.flush()
    return sorted((opened.rollout(row.id) for row in opened.rollouts()), key=lambda row: row.started_at)


def test_an_imported_trace_is_stored_as_it_was_read(store: Store) -> None:
    for kind, name in (("otlp", "otlp_openinference.jsonl"), ("mlflow", "mlflow_3.jsonl")):
        report = import_traces(store, kind, DATA / name)
        rollouts, skipped = read(kind, DATA / name)
        assert stored(store)[-2:] == rollouts
        assert report == ImportReport(
            run_id=rollouts[0].run_id, kind=kind, rollouts=2, transitions=3, tool_calls=2, rated=int(kind == "mlflow"),
            skipped=len(skipped),
            reasons=tuple(f"{skip.where}: {skip.reason} (trace {skip.trace})" for skip in skipped),
        )  # fmt: skip
    assert store.stats(run_id=report.run_id)["transitions"] == 3
    assert (report.run_id, "done") in store.runs("import")


def test_a_second_import_of_a_file_stores_nothing(store: Store) -> None:
    first = import_traces(store, "otlp", DATA / "otlp_openai_v2.jsonl")
    before = stored(store)
    second = import_traces(store, "otlp", DATA / "otlp_openai_v2.jsonl")
    assert (first.rollouts, first.unchanged, second.rollouts, second.unchanged) == (2, 0, 0, 2)
    assert (second.transitions, second.tool_calls) == (0, 0)
    assert stored(store) == before


def test_the_answer_of_a_trace_in_two_files_is_that_of_its_last_call(store: Store, tmp_path: Path) -> None:
    otlp(tmp_path, span(1), span(2, chat("a"), parent=1))
    import_traces(store, "otlp", tmp_path / "x.jsonl")
    otlp(tmp_path, span(3, chat("b"), parent=1, at=5))
    import_traces(store, "otlp", tmp_path / "x.jsonl")
    store.flush()
    (run,) = store.rollouts()
    assert run.prediction == {"output": "b"}


def test_new_scores_are_added_and_ratings_of_this_store_are_kept(store: Store, tmp_path: Path) -> None:
    call = observation(1, input="hi", output="ho")
    import_traces(store, "langfuse", lines(tmp_path / "1.jsonl", call))
    import_traces(store, "langfuse", lines(tmp_path / "2.jsonl", call, mark("ok", 0.5), mark("stars", 1, "ANNOTATION")))
    (run,) = stored(store)
    assert (run.score, run.rubric, run.human_rating) == (0.5, "imported:ok", 1.0)
    assert [v.criterion for v in run.verdicts] == ["ok", "stars"]
    assert import_traces(store, "langfuse", tmp_path / "2.jsonl").unchanged == 1
    import_traces(store, "langfuse", lines(tmp_path / "3.jsonl", call, mark("ok", 0.75)))
    (run,) = stored(store)
    assert (run.score, [v.grade for v in run.verdicts]) == (0.75, [0.5, 1.0, 0.75])
    run.score, run.rubric, run.human_rating = 0.25, "mine@1", 0.0
    store.put_rollout(run)
    import_traces(store, "langfuse", tmp_path / "2.jsonl")
    (run,) = stored(store)
    assert (run.score, run.rubric, run.human_rating) == (0.25, "mine@1", 0.0)


def test_the_report_keeps_the_first_reasons_and_counts_all(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", request(span(1, chat())), request(span(1, chat())), *["{broken\n"] * 30)
    with Store(tmp_path / "s.db") as store:
        report = import_traces(store, "otlp", path)
    assert (report.rollouts, report.skipped, report.duplicates, len(report.reasons)) == (1, 30, 1, 20)
    assert report.repeated == (f"{path}:2",)
    assert report.reasons[0].startswith(f"{path}:3: not JSON: ")
    assert report.to_dict()["reasons"] == list(report.reasons)


def test_a_file_without_rollouts_stores_nothing(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        with pytest.raises(DataError, match=r"no .*LM call"):
            import_traces(store, "otlp", lines(tmp_path / "x.jsonl", request(span(1))))
        with pytest.raises(DataError, match="kind='jaeger' must be one of otlp, langfuse, mlflow"):
            import_traces(store, "jaeger", DATA / "mlflow_2.json")
        assert (list(store.rollouts()), store.runs("import")) == ([], [])
