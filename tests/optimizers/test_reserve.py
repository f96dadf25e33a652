"""Caps reserve a part for gate and test; both end once decided; what is too small is said before the start."""

import hashlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

import adding
import pytest
from adding import adds, compiled, row

import assay
from assay.commands.compile import Compile
from assay.errors import BudgetExceeded, ConfigError
from assay.jobs.planning import plan_of
from assay.models import Caps, Meter
from assay.models.meter import Usage
from assay.optimizers.budget import ReportPlan
from assay.testing import scripted_lm
from rigs.command_line import assay_command
from rigs.progress import Lines


@pytest.fixture(autouse=True)
def project(own_folder: Path) -> None:
    adding.write(map(row, range(500)))


def gaining(gain: float) -> Any:
    """A model that is right on half of the tasks, and on `gain` more where demonstrations show how."""

    def answer(request: Any) -> str:
        number = int((request.messages[-1].text or "").split("number ")[1].split(".")[0])
        drawn = int(hashlib.sha256(str(number).encode()).hexdigest(), 16) % 1000 / 1000
        right = drawn < 0.5 + gain * (len(request.messages) > 4)
        return json.dumps({"answer": str(number + 2 if right else number)})

    return scripted_lm(answer)


def wavering() -> Any:
    """A model that is right on two answers of five without a demonstration, on all with one."""
    turns = itertools.count()

    def answer(request: Any) -> str:
        numbers = re.findall(r"number (\d+)", request.messages[-1].text or "")
        if not numbers:  # a teleprompter asks for instructions
            return json.dumps(dict.fromkeys(request.config.response_format["schema"]["properties"], "Add two."))
        right = len(request.messages) > 2 or next(turns) % 5 > 2
        return json.dumps({"answer": str(int(numbers[-1]) + 2 * right)})

    return scripted_lm(answer)


# -- caps


@pytest.mark.slow
def test_cap_of_250_calls_decides_the_gate_and_fills_the_test_table() -> None:
    lm = gaining(0.5)
    data = compiled("auto", lm=lm, max_calls=250).to_dict()
    assert lm.scripted.calls == data["calls"] <= 250
    assert data["stopped"] is None
    assert data["replaces"]
    for side in ("baseline", "compiled"):
        assert data["test"][side]["score"] is not None
        # half of the cap, 2 calls a pair, 2 splits: 31 tasks, fewer where the gain is decided before
        assert data["test"][side]["n"] >= 20
    assert data["test"]["gain"]["n"] == data["test"]["compiled"]["n"]


@pytest.mark.slow
def test_cap_of_250_calls_leaves_a_small_gain_undecided_and_the_test_sealed() -> None:
    lm = gaining(0.15)
    data = compiled("auto", lm=lm, max_calls=250).to_dict()
    assert lm.scripted.calls == data["calls"] <= 250
    assert data["stopped"] is None
    assert data["gate"]["n"] >= 25  # half of the cap, 2 calls a pair, 2 splits: 31 tasks
    assert not data["replaces"]
    assert data["test"] == {"baseline": None, "compiled": None, "gain": None}


@pytest.mark.slow
def test_a_cap_on_tokens_reserves_gate_and_test() -> None:
    data = compiled("auto", max_tokens=3000).to_dict()  # 15 a call
    assert data["tokens"] <= 3000 + 15
    assert data["test"]["gain"]["n"] >= 10


def test_the_estimate_assigns_calls_above_the_search_cap_to_gate_and_test() -> None:
    progress = Lines()
    data = compiled("auto", max_calls=150, max_search_calls=30, early_stop=False, progress=progress).to_dict()
    estimate, gate = (
        int(match[1])
        for match in (re.search(pattern, progress.text) for pattern in (r"estimate: (\d+) calls", r"gate: up to (\d+)"))
        if match
    )
    assert data["stopped"] is None
    assert 0.9 * data["calls"] <= estimate <= 150
    assert data["gate"]["n"] - 2 <= gate
    assert data["search_calls"] >= 20


@pytest.mark.slow
def test_an_optimizer_with_its_own_loop_stops_before_the_reserve() -> None:
    data = compiled("bootstrap-search", max_calls=200).to_dict()
    assert data["search_calls"] <= 100  # half of the cap is reserved
    assert (data["winner"], data["stopped"]) == ("bootstrap-search", None)
    assert data["gate"]["n"] >= 10
    assert data["test"]["compiled"]["n"] >= 10


def test_bootstrap_stopped_by_the_reserve_uses_its_collected_demonstrations() -> None:
    data = compiled("bootstrap", lm=wavering(), max_calls=120).to_dict()
    assert data["winner"].startswith("bootstrap")
    assert data["gate"]["n"] >= 5
    assert data["test"]["compiled"]["n"] >= 5
    assert data["calls"] > 60  # the part that was kept is used


@pytest.mark.slow
def test_simba_stopped_by_a_cap_returns_its_best_candidate() -> None:
    settings = {"max_steps": 8, "bsize": 4}
    data = compiled("simba", max_search_calls=60, lm=wavering(), optimizer_settings=settings).to_dict()
    assert data["winner"] == "simba, cut short"
    assert any("its best so far competes" in note for note in data["notes"])


@pytest.mark.slow
def test_a_cap_too_small_for_a_decision_is_reported_and_the_job_resumes() -> None:
    progress = Lines()
    data = compiled("auto", max_calls=12, progress=progress, store="a.db").to_dict()
    assert data["calls"] <= 12
    assert "leave" in data["stopped"]
    assert "the caps leave" in progress.text
    resumed = compiled("auto", max_calls=400, resume=True, store="a.db").to_dict()
    assert resumed["stopped"] is None
    assert resumed["replaces"]


def test_too_few_calls_for_a_proposal_are_reported_before_the_search() -> None:
    progress = Lines()
    data = compiled("gepa", max_calls=30, progress=progress).to_dict()
    (note,) = [note for note in data["notes"] if "too few for one proposal of gepa" in note]
    needed = int(re.findall(r"it needs about (\d+)", note)[0])
    assert needed > 15
    assert f"- {note}\n" in (Path(data["artifact"]) / "report.md").read_text()
    assert "too few for one proposal" in progress.text
    assert not any("nothing beat" in note for note in data["notes"])
    more = compiled("gepa", max_calls=2 * needed + 4, store="other.db").to_dict()
    assert not any("too few" in note for note in more["notes"])


@pytest.mark.slow
def test_tune_refuses_caps_below_two_trials() -> None:
    lm = scripted_lm(adds)
    job: dict[str, Any] = {"rubric": "r.yaml", "data": "data.jsonl", "lm": lm, "trials": 3, "threads": 1}
    with pytest.raises(
        ConfigError, match=r"two trials of \d+ val tasks take about \d+\. Raise max_calls to"
    ) as refused:
        assay.tune("mine.py:Mine", max_calls=60, **job)
    assert lm.scripted.calls <= 2  # the preflight's
    enough = int(str(refused.value).split("Raise max_calls to ")[1].split()[0])
    assert assay.tune("mine.py:Mine", max_calls=enough, **job).trials >= 2


def test_reserves_match_hand_calculation() -> None:
    meter = Meter(Caps(calls=10))
    meter.hold(gate=Usage(calls=2), test=Usage(calls=3))

    def take(phase: str) -> int:
        count = 0
        with meter.during(phase):
            try:
                while True:
                    sent = meter.reserve()
                    meter.settle(sent, prompt_tokens=1, completion_tokens=1, cost_usd=0.0, failed=False)
                    count += 1
            except BudgetExceeded:
                return count

    assert [take(phase) for phase in ("search", "gate", "test")] == [5, 2, 3]
    inside = Meter(Caps(search_calls=10), {"search": Usage(calls=6)})
    with inside.during("search"), inside.aside(Usage(calls=4)):
        assert inside.search_calls_left() == 6
        with pytest.raises(BudgetExceeded, match="the rest is reserved for the comparison on val"):
            inside.check()
    with inside.during("search"):
        inside.check()


# -- the end of gate and test


@pytest.mark.slow
def test_gate_and_test_end_at_their_decision() -> None:
    first, second = (compiled(early_stop=stops).to_dict() for stops in (True, False))
    assert first["replaces"]
    assert second["replaces"]
    assert first["gate"]["n"] < 50 < second["gate"]["n"]
    assert first["test"]["gain"]["n"] < 50 < second["test"]["gain"]["n"]
    assert first["calls"] < second["calls"] / 1.4
    assert any(note.startswith("gate ended after") for note in first["notes"])
    assert first["test"]["gain"]["low"] <= second["test"]["gain"]["mean"] <= first["test"]["gain"]["high"]


@pytest.mark.slow
def test_a_default_compile_without_a_gain_ends_for_futility() -> None:
    """Gate and test (101 and 119 tasks) are evaluated after each fifth of their tasks.

    The fourth evaluation stops at the latest: a difference of 0.1 is then unlikely to become significant.
    """
    lm = gaining(0.0)
    data = compiled("auto", lm=lm).to_dict()
    assert lm.scripted.calls == data["calls"]
    assert data["search_calls"] <= 300
    assert data["calls"] - data["search_calls"] <= 2 * (84 + 96) + 5  # and the preflight


@pytest.mark.slow
def test_a_set_split_size_is_used_and_the_difference_determines_the_others() -> None:
    wide = compiled(difference=0.4, early_stop=False).to_dict()
    fixed = compiled(difference=0.4, early_stop=False, sizes={"gate": 60}).to_dict()
    assert wide["gate"]["n"] == 20  # ((1.96 + 0.84) * 0.5 / 0.4)^2 = 12.3 is below the least of 20
    assert (fixed["gate"]["n"], fixed["test"]["gain"]["n"]) == (60, 20)


# -- what is too small


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "options", "said"),
    [
        (
            assay.compile,
            {"optimizer": "labeled", "sizes": {"gate": 1, "test": 1, "val": 1}},
            "too few tasks for a decision: val has 1 task, gate has 1 task, test has 1 task",
        ),
        (assay.tune, {"trials": 1, "sizes": {"gate": 2}}, "too few tasks for a decision: gate has 2 tasks"),
        (assay.parameter_impact, {"levels": 2, "sizes": {"val": 3}}, "val has 3 tasks"),
    ],
)
def test_splits_too_small_for_a_decision_are_reported_before_the_first_call(
    job: Any, options: dict[str, Any], said: str
) -> None:
    adding.write(map(row, range(40)))
    progress, before = Lines(), list[str]()

    def script(request: Any) -> str:
        before.extend(() if before else progress.lines)
        return adds(request)

    options = {"rubric": "r.yaml", "data": "data.jsonl", "prompt_format": "json", "threads": 1, **options}
    report = job("mine.py:Mine", lm=scripted_lm(script), progress=progress, **options)
    assert any(said in line for line in before), before
    assert any(said in note for note in report.to_dict()["notes"])


def test_a_plan_says_what_gain_the_gate_can_show_and_which_size_the_data_does_not_fill() -> None:
    job = {"rubric": "r.yaml", "data": "data.jsonl", "lm": scripted_lm(adds)}
    lines = list(plan_of(Compile("mine.py:Mine", **job, sizes={"val": 8}, gate_size=300)).lines())
    assert any("show a gain of" in line for line in lines)
    assert [line for line in lines if "its size" in line] == [
        "warning: gate has 101 tasks, fewer than its size of 300: the data has no more for it"
    ]


def test_a_gate_that_hardly_shows_any_gain_is_a_warning() -> None:
    lines = {gate: ReportPlan(gate=gate, test=30, pair=Usage()).detectable_gain for gate in (5, 6, 7, 8)}
    assert {gate: line.startswith("warning: ") for gate, line in lines.items()} == {5: True, 6: True, 7: True, 8: False}
    assert "Add tasks" in lines[7]
    assert "caps" in ReportPlan(gate=7, test=30, pair=Usage(), capped=True).detectable_gain


# -- prices


def test_an_unknown_price_is_null_and_never_zero() -> None:
    lm = scripted_lm(adds)
    complete = lm.recording.backend.complete
    lm.recording.backend.complete = lambda request: (complete(request)[0], None)
    data = compiled(max_calls=100, lm=lm).to_dict()
    assert data["cost_usd"] is None
    assert data["test"]["baseline"]["cost_usd"] is None
    assert "$0.0000" not in (Path(data["artifact"]) / "report.md").read_text()
    assert assay_command("traces", "stats", "--json").report["cost_usd"] is None
