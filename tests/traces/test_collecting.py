"""Collecting: groups of rollouts, recording in process, interactions of one's own, ratings."""

import json
import math
from pathlib import Path
from typing import Any

import dspy
import pytest
import sqlalchemy as sa
from collected_answers import program as program

import assay
from assay.datasets.tasks import task_key
from assay.errors import ConfigError
from assay.jobs.recording import opened_store
from assay.testing import scripted_lm
from assay.traces import Store, ToolCall
from assay.traces.export.selection import consents
from assay.traces.export.settings import Gates
from assay.traces.store.sealing import store_splits
from assay.traces.store.tables import known_tasks
from rigs.command_line import assay_command


def answers(text: str = "7") -> Any:
    return scripted_lm(lambda request: json.dumps({"answer": text}))


def test_tasks_with_equal_prompts_get_independent_samples(tmp_path: Path) -> None:
    def blind(question: str) -> dspy.Prediction:
        return dspy.Predict("topic -> answer")(topic="any")

    numbers = iter(range(100))
    assay.collect(
        blind,
        rubric="math_qa",
        data=[{"question": f"{number}", "answer": "7"} for number in range(20)],
        lm=scripted_lm(lambda request: json.dumps({"answer": f"{next(numbers)}"})),
        n=2,
        sizes={"train": 3},
        store=tmp_path / "s.db",
        prompt_format="json",
    )
    with Store(tmp_path / "s.db") as store:
        rollouts = [rollout for rollout in store.rollouts() if rollout.phase == "collect"]
        answers_given = [store.rollout(rollout.id).transitions[0].output for rollout in rollouts]
    assert len(set(answers_given)) == len(answers_given) == 6  # 3 tasks, 2 samples


JOB: dict[str, Any] = {"rubric": "r.yaml", "data": "d.jsonl", "store": "s.db", "prompt_format": "json"}


def test_an_embedded_model_samples_from_its_full_distribution_on_request(program: str, small_embedded: str) -> None:
    job = {**JOB, "n": 1, "sizes": {"train": 1}, "cache": False, "preflight": False}
    for untruncated in (False, True):
        assay.collect(program, model=small_embedded, untruncated=untruncated, **job)
    with Store("s.db") as store:
        calls = [store.rollout(r.id).transitions[0] for r in store.rollouts() if r.phase == "collect"]
    assert sorted(str(call.request["config"].get("top_p")) for call in calls) == ["1.0", "None"]
    with pytest.raises(ConfigError, match="untruncated: would have no effect on scripted/model"):
        assay.collect(program, lm=answers(), untruncated=True, **job)


def test_a_collection_that_reached_its_cap_resumes_where_it_stopped(program: str) -> None:
    job = {**JOB, "n": 3, "sizes": {"train": 4}, "cache": False, "threads": 1}
    first = assay.collect(program, lm=answers(), max_calls=5, **job)
    assert first.stopped is not None
    assert first.rollouts in (4, 5)  # the rollout that was running when the cap was met may be only in the store
    again = assay.collect(program, lm=answers(), resume=True, **job)
    assert (again.stopped, again.rollouts) == (None, 12)
    assert again.kept_from_before in (4, 5)
    with Store("s.db") as store:
        completed = [(r.task_id, r.sample) for r in store.rollouts() if r.status == "done" and r.phase == "collect"]
    assert len(completed) == len(set(completed)) == 12


@pytest.mark.parametrize(
    ("options", "match"),
    [({"n": 0}, "n: must be"), ({"split": "test"}, "train, val"), ({"over": [{"speed": 1}]}, "speed")],
)
def test_invalid_settings_of_a_collection_are_refused(program: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        assay.collect(program, lm=answers(), **{**JOB, **options})


def test_recording_in_process_records_dspy_calls_and_reported_calls() -> None:
    stranger = dspy.LM("scripted/x", engine=answers("four").scripted, cache=False)  # a model that assay does not record
    with dspy.context(lm=stranger, adapter=dspy.JSONAdapter()):
        with assay.record({"question": "2 + 2"}, store="s.db", task_type="sums", data_subject="ann") as run:
            prediction = dspy.Predict("question -> answer")(question="2 + 2")
            tools = [ToolCall(name="f", arguments={}, result="1")]
            run.call([{"role": "user", "content": "sure?"}], "yes", model="other", tools=tools, reward=0.05)
            run.answer(prediction)
            run.reward(0.5)
        for value, t in ((math.nan, None), (2, None), (math.inf, 0), (1, 5)):
            with pytest.raises(ConfigError):
                run.reward(value, t=t)
    opened_store("s.db")[0].flush()
    with Store("s.db") as store:
        rollout = store.rollout(run.rollout.id)
    assert (rollout.score, rollout.task_type, rollout.data_subject, rollout.status) == (0.5, "sums", "ann", "done")
    assert rollout.prediction == {"answer": "four"}
    calls = [(t.model, t.output, t.step_rewards) for t in rollout.transitions]
    assert calls == [("scripted/x", '{"answer": "four"}', {}), ("other", "yes", {"posted": 0.05})]
    with (
        pytest.raises(ConfigError, match=r"no field .speed.\. Did you mean .seed."),
        assay.record("x", store="s.db", speed=1),
    ):
        pass


@pytest.mark.slow
def test_interactions_are_refused_one_by_one_with_the_reason() -> None:
    good = {"input": "2 + 2?", "output": "4", "rating": 0.9, "task_type": "sums"}
    refused: list[tuple[Any, str]] = [
        (good, "duplicate"),
        ({**good, "input": " "}, "empty"),
        ({**good, "output": 4}, ""),
        ({"input": "x"}, "missing"),
        ({**good, "input": "a", "rating": 1.2}, "between 0 and 1"),
        ({**good, "input": "b", "rating": math.nan}, ""),
        ("text", ""),
        ({**good, "input": "c", "colour": 1}, "colour"),
    ]
    with Store("s.db") as store:
        collector = assay.DataCollector(store)
        rows = [good, *(row for row, _ in refused), {**good, "input": "d", "rating": None}]
        report = collector.collect_interaction_data(rows)
        assert (len(report.kept), [at for at, _ in report.refused]) == (2, list(range(1, 9)))
        for (_, reason), (_, why) in zip(report.refused, refused, strict=True):
            assert why in reason
        assert len(collector.generate_synthetic_data(6, seed=3).kept) == 6
        assert collector.generate_synthetic_data(6, seed=3).kept == []  # the same again
        data = collector.prepare_training_data()
        assert (sum(data.task_distribution.values()), len(data.rows), data.left_out) == (7, 7, 1)
        assert data.rows[0]["completion"] == [{"role": "assistant", "content": "4"}]
        for wrong in (lambda: collector.filter_high_quality(2), lambda: collector.generate_synthetic_data(0)):
            with pytest.raises(ConfigError):
                wrong()
        store.flush()
        keys = [task_key(rollout.inputs) for rollout in store.rollouts()]
        store_splits(store, {"train": keys})  # else the hash seals some
        gates = Gates(min_transitions=1, min_clean=0.8, min_task_types=2)
        assert assay.export("sft", "out", store=store.url, gates=gates).rows == 7


@pytest.mark.slow
def test_rating_and_erasure_work_from_the_command_line() -> None:
    rows = [{"input": f"q{at}", "output": "a", "data_subject": "ann"} for at in range(3)]
    with Store(".assay/assay.db") as store:
        ids = assay.DataCollector(store).collect_interaction_data(rows).kept
    assert "RATING: must be given" in assay_command("traces", "rate", ids[0]).stderr
    assert assay_command("traces", "rate", ids[0], "1.5").code == 2
    assert assay_command("traces", "rate", ids[0], "0.5", "--json").report == {"rated": {ids[0]: 0.5}}
    rated = assay_command("traces", "rate", "--json", stdin="0.9\nrubbish\n")
    assert list(rated.report["rated"].values()) == [0.9]
    assert "not a number from 0 to 1" in rated.stderr
    erased = assay_command("traces", "forget", "ann", "--json").report
    assert (erased["subject"], erased["removed"], erased["not_searched"]["short_texts"]) == ("ann", 3, 3)
    assert {name for name, value in erased.items() if value} == {"subject", "removed", "emptied", "not_searched"}
    assert assay_command("traces", "stats", "--json").report["transitions"] == 0
    failed = assay_command("export", "sft", "--out", "o", "--json")
    assert (failed.code, "no rows for" in failed.stderr) == (2, True)


def test_consent_is_stored_the_same_from_every_source(program: str) -> None:
    given: list[tuple[Any, str | None]] = [
        (True, "yes"), (False, "no"), ("no", "no"), (1, "1"), (0.0, "0"), (None, None),
    ]  # fmt: skip
    stored = [consent for _, consent in given]
    interactions = [{"input": f"a{at}", "output": "b", "consent": consent} for at, (consent, _) in enumerate(given)]
    with Store("i.db") as store:
        ids = assay.DataCollector(store).collect_interaction_data(interactions).kept
        store.flush()
        assert [store.rollout(kept).consent for kept in ids] == stored
    rows = [
        {"question": f"q{at}", "answer": "7", "consent": consent, "split": "val"}
        for at, (consent, _) in enumerate(given)
    ]
    assay.evaluate(program, lm=answers(), preflight=False, salt="s", **{**JOB, "data": rows})
    with Store("s.db") as store:
        evaluated = {rollout.inputs["question"]: rollout.consent for rollout in store.rollouts()}
        assert evaluated == {f"q{at}": consent for at, consent in enumerate(stored)}
        with store.engine.connect() as connection:  # of demonstrations that show these tasks
            assert set(connection.execute(sa.select(known_tasks.c.consent)).scalars()) == set(stored)
    for consent, expected in given:
        with assay.record("a", store="r.db", consent=consent) as run:
            run.answer("b")
        assert run.rollout.consent == expected
        assert consents(expected or "") == (consent in (True, 1))
