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
from assay.commands.traces import forget_subject
from assay.datasets.tasks import task_key
from assay.errors import ConfigError
from assay.runs.recording import opened_store
from assay.testing import scripted_lm
from assay.traces import Store, ToolCall
from assay.traces.export.selection import consents
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


def test_an_embedded_model_samples_from_its_full_distribution_on_request(program: str, small_embedded: str) -> None:
    job = {
        "rubric": "r.yaml",
        "data": "d.jsonl",
        "n": 1,
        "sizes": {"train": 1},
        "store": "s.db",
        "cache": False,
        "preflight": False,
    }
    for untruncated in (False, True):
        assay.collect(program, model=small_embedded, untruncated=untruncated, **job)
    with Store("s.db") as store:
        calls = [store.rollout(r.id).transitions[0] for r in store.rollouts() if r.phase == "collect"]
    assert sorted(str(call.request["config"].get("top_p")) for call in calls) == ["1.0", "None"]
    with pytest.raises(ConfigError, match="untruncated: would have no effect on scripted/model"):
        assay.collect(program, lm=answers(), untruncated=True, **job)


def test_a_collection_that_reached_its_cap_resumes_where_it_stopped(program: str) -> None:
    options: dict[str, Any] = {
        "rubric": "r.yaml",
        "data": "d.jsonl",
        "n": 3,
        "sizes": {"train": 4},
        "store": "s.db",
        "cache": False,
        "threads": 1,
        "prompt_format": "json",
    }
    first = assay.collect(program, lm=answers(), max_calls=5, **options)
    assert first.stopped is not None
    assert first.rollouts in (4, 5)  # the rollout that was running when the cap was met may be only in the store
    again = assay.collect(program, lm=answers(), resume=True, **options)
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
        assay.collect(program, rubric="r.yaml", data="d.jsonl", lm=answers(), store="s.db", **options)


def test_recording_in_process_records_dspy_calls_and_reported_calls() -> None:
    with dspy.context(
        lm=dspy.LM("scripted/x", engine=answers("four").scripted, cache=False), adapter=dspy.JSONAdapter()
    ):  # a model that assay does not record
        with assay.record({"question": "2 + 2"}, store="s.db", task_type="sums", data_subject="ann") as run:
            prediction = dspy.Predict("question -> answer")(question="2 + 2")
            run.call(
                [{"role": "user", "content": "sure?"}],
                "yes",
                model="other",
                tools=[ToolCall(name="f", arguments={}, result="1")],
                reward=0.05,
            )
            run.answer(prediction)
            run.reward(0.5)
        for value, t in ((math.nan, None), (2, None), (math.inf, 0), (1, 5)):
            with pytest.raises(ConfigError):
                run.reward(value, t=t)
    opened_store("s.db")[0].flush()
    with Store("s.db") as store:
        rollout = store.rollout(run.rollout.id)
    assert (rollout.score, rollout.task_type, rollout.data_subject, rollout.prediction, rollout.status) == (
        0.5,
        "sums",
        "ann",
        {"answer": "four"},
        "done",
    )
    assert [(t.model, t.output) for t in rollout.transitions] == [
        ("scripted/x", '{"answer": "four"}'),
        ("other", "yes"),
    ]
    assert rollout.transitions[1].step_rewards == {"posted": 0.05}
    with (
        pytest.raises(ConfigError, match=r"no field .speed.\. Did you mean .seed."),
        assay.record("x", store="s.db", speed=1),
    ):
        pass


@pytest.mark.slow
def test_interactions_are_refused_one_by_one_with_the_reason() -> None:
    with Store("s.db") as store:
        collector = assay.DataCollector(store)
        good = {"input": "2 + 2?", "output": "4", "rating": 0.9, "task_type": "sums"}
        rows = [
            good,
            good,
            {**good, "input": " "},
            {**good, "output": 4},
            {"input": "x"},
            {**good, "input": "a", "rating": 1.2},
            {**good, "input": "b", "rating": math.nan},
            "text",
            {**good, "input": "c", "colour": 1},
            {**good, "input": "d", "rating": None},
        ]
        report = collector.collect_interaction_data(rows)  # type: ignore[arg-type]
        assert len(report.kept) == 2
        reasons = dict(report.refused)
        assert list(reasons) == [1, 2, 3, 4, 5, 6, 7, 8]
        assert "duplicate" in reasons[1]
        assert "empty" in reasons[2]
        assert "missing" in reasons[4]
        assert "between 0 and 1" in reasons[5]
        made = collector.generate_synthetic_data(6, seed=3)
        assert len(made.kept) == 6
        assert collector.generate_synthetic_data(6, seed=3).kept == []  # the same again
        data = collector.prepare_training_data()
        assert sum(data.task_distribution.values()) == len(data.rows) == 7
        assert data.left_out == 1
        assert data.rows[0]["completion"] == [{"role": "assistant", "content": "4"}]
        with pytest.raises(ConfigError):
            collector.filter_high_quality(2)
        with pytest.raises(ConfigError):
            collector.generate_synthetic_data(0)
        store.flush()
        from assay.traces.export.settings import Gates

        store_splits(
            store, {"train": [task_key(rollout.inputs) for rollout in store.rollouts()]}
        )  # else the hash seals some
        report_ = assay.export(
            "sft", "out", store=store.url, gates=Gates(min_transitions=1, min_clean=0.8, min_task_types=2)
        )
        assert report_.rows == 7


def test_erasure_names_the_artifacts_made_from_a_persons_data(program: str) -> None:
    report = assay.compile(
        program,
        rubric="r.yaml",
        data="d.jsonl",
        lm=answers(),
        store=".assay/assay.db",
        optimizer="labeled",
        prompt_format="json",
        sizes={"gate": 2, "test": 2},
    )
    erased = forget_subject("ann", store=".assay/assay.db").to_dict()
    assert erased["removed"] > 0
    assert erased["made_from_them"] == [str(report.artifact)]


@pytest.mark.slow
def test_rating_and_erasure_work_from_the_command_line() -> None:
    with Store(".assay/assay.db") as store:
        collector = assay.DataCollector(store)
        ids = collector.collect_interaction_data(
            [{"input": f"q{at}", "output": "a", "data_subject": "ann"} for at in range(3)]
        ).kept
    assert "RATING: must be given" in assay_command("traces", "rate", ids[0]).stderr
    assert assay_command("traces", "rate", ids[0], "1.5").code == 2
    assert assay_command("traces", "rate", ids[0], "0.5", "--json").report == {"rated": {ids[0]: 0.5}}
    rated = assay_command("traces", "rate", "--json", stdin="0.9\nrubbish\n")
    assert list(rated.report["rated"].values()) == [0.9]
    assert "not a number from 0 to 1" in rated.stderr
    erased = assay_command("traces", "forget", "ann", "--json").report
    assert erased == {
        "subject": "ann",
        "removed": 3,
        "facts_removed": 0,
        "prompts_emptied": 0,
        "cached_answers_removed": 0,
        "unowned_answers_removed": 0,
        "quoting_facts": [],
        "naming_facts": [],
        "versions": [],
        "made_from_them": [],
        "runs_on_them": [],
        "emptied": {"rows": {}, "files": []},
        "holding": [],
        "not_searched": {
            "short_texts": 3,
            "shared_texts": 0,
            "tasks_without_texts": 0,
            "files": [],
            "free_pages": False,
            "models": [],
        },
    }
    assert assay_command("traces", "stats", "--json").report["transitions"] == 0
    failed = assay_command("export", "sft", "--out", "o", "--json")
    assert failed.code == 2
    assert "no rows for" in failed.stderr


@pytest.mark.parametrize(
    ("consent", "stored"), [(True, "yes"), (False, "no"), ("no", "no"), (1, "1"), (0.0, "0"), (None, None)]
)
def test_consent_is_stored_the_same_from_every_source(
    consent: Any, stored: str | None, tmp_path: Path, program: str
) -> None:
    with Store(tmp_path / "i.db") as store:
        assay.DataCollector(store).collect_interaction_data([{"input": "a", "output": "b", "consent": consent}])
        store.flush()
        assert [r.consent for r in store.rollouts()] == [stored]
    with assay.record("a", store=tmp_path / "r.db", consent=consent) as run:
        run.answer("b")
    assert run.rollout.consent == stored
    rows = [{"question": f"q{at}", "answer": "7", "consent": consent, "split": "val"} for at in range(2)]
    assay.evaluate(
        program, rubric="r.yaml", data=rows, lm=answers(), store=tmp_path / "e.db", preflight=False, salt="s"
    )
    with Store(tmp_path / "e.db") as store:
        assert {r.consent for r in store.rollouts()} == {stored}
        with store.engine.connect() as connection:  # of demonstrations that show these tasks
            assert set(connection.execute(sa.select(known_tasks.c.consent)).scalars()) == {stored}
    assert consents(stored or "") == (consent in (True, 1))
