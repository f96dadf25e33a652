"""Contract of a prompt optimizer."""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dspy

from assay.commands.compile import CompileReport, compile as compile_program
from assay.rubrics import Criterion, NoGrade, Rubric
from assay.support.values import json_text
from assay.testing.contracts.base import Contract, require
from assay.testing.fakes import scripted_lm
from assay.traces import Rollout, Store

_SIZES = {"train": 10, "val": 6, "gate": 5, "test": 5}
_INSTRUCTION = "Add two to the number."
_ROWS = [{"question": f"What do you say to number {n}.", "answer": str(n + 2)} for n in range(60)]


class OptimizerContract(Contract):
    """Checks a prompt optimizer by name: `gepa`, or `package.module:Class` of a DSPy teleprompter.

    The optimizer runs inside `assay.compile` on a small task. The model is scripted: it solves a third of the tasks,
    and all of them if its prompt contains a demonstration or a better instruction.

    - The optimizer proposes a better program without an exception, and the result is evaluated on every test task.
    - The program that is passed in is not changed.
    - The search runs tasks of train and val only.
    - A cap on calls ends the search with a result and is not exceeded.
    - The same seed gives the same program (unless `deterministic = False`).
    - Tasks that cannot be scored (NaN) are counted as unscored; scores stay in [0, 1].
    """

    deterministic = True
    max_search_calls = 400

    def make(self) -> str:
        """Name of the optimizer, or its class path."""
        raise NotImplementedError(f"{type(self).__name__} must override make()")

    def settings(self) -> Mapping[str, Any]:
        """The optimizer's own settings (`optimizer_settings`)."""
        return {}

    def test_it_proposes_a_better_program_that_is_evaluated_on_every_test_task(self) -> None:
        with self._compiled() as (report, _):
            data = report.to_dict()
        self._require_a_better_program(data)
        compiled = data["test"]["compiled"]
        require(
            compiled["n"] == 5 and compiled["unscored"] == 0,
            f"the result on test is {compiled}, expected 5 scored tasks",
        )

    def test_the_program_that_is_passed_in_is_not_changed(self) -> None:
        program = dspy.Predict("question -> answer")
        before = _state(program)
        with self._compiled(program=program):
            require(_state(program) == before, f"the program {before} became {_state(program)}")

    def test_the_search_runs_tasks_of_train_and_val_only(self) -> None:
        with self._compiled() as (_, rollouts):
            # calls of the model that proposes instructions are rollouts without a task
            splits = {
                rollout.split
                for rollout in rollouts
                if rollout.phase == "search" and rollout.inputs.keys() == {"question"}
            }
        require(splits <= {"train", "val"}, f"the search ran tasks of the splits {sorted(map(str, splits))}")

    def test_a_cap_on_calls_ends_it_with_a_result(self) -> None:
        with self._compiled(max_search_calls=15) as (report, _):
            data = report.to_dict()
        require(data["search_calls"] <= 15, f"the search made {data['search_calls']} calls, the cap is 15")
        compiled = data["test"]["compiled"]  # so few calls may leave the program that was passed in: its test is sealed
        require(data["winner"] == "baseline" or compiled["n"] == 5, f"no result after the cap: {compiled}")

    def test_the_same_seed_gives_the_same_program(self) -> None:
        if not self.deterministic:
            return
        states = []
        for _ in range(2):
            with self._compiled(seed=3) as (report, _):
                states.append(_state(report.program))
        require(states[0] == states[1], f"two runs with one seed give {states[0]} and {states[1]}")

    def test_unscored_tasks_are_never_numbers(self) -> None:
        with self._compiled(check=_sometimes_unscored) as (report, _):
            data = report.to_dict()
        self._require_a_better_program(data)
        for name in ("baseline", "compiled"):
            result = data["test"][name]
            require(result is not None, f"there is no result for {name}: {data['notes']}")
            score = result["score"]
            require(score is None or 0 <= score <= 1, f"the score of {name} is {score!r}")

    @staticmethod
    def _require_a_better_program(data: Mapping[str, Any]) -> None:
        val = {candidate["name"]: candidate["val_score"] for candidate in data["candidates"]}
        require(len(val) > 1, f"no program was proposed: {data['notes']}")
        require(data["winner"] != "baseline", f"no proposed program is better on val than the one passed in: {val}")

    @contextmanager
    def _compiled(
        self, *, program: Any = None, check: Any = None, seed: int = 0, max_search_calls: int | None = None
    ) -> Iterator[tuple[CompileReport, list[Rollout]]]:
        """Report and rollouts of a compile. Its files are removed at the end of the context."""
        rubric = Rubric("contract", [Criterion(name="right", check=check or _right)])
        with tempfile.TemporaryDirectory() as folder, self.context():
            report = compile_program(
                program or dspy.Predict("question -> answer"),
                rubric=rubric,
                data=_ROWS,
                lm=scripted_lm(_answer),
                seed=seed,
                store=Path(folder) / ".assay" / "assay.db",
                optimizer=self.make(),
                gate=False,  # which a few tasks cannot pass
                optimizer_settings=dict(self.settings()),
                sizes=_SIZES,
                threads=1,
                max_search_calls=max_search_calls or self.max_search_calls,
            )
            with Store(Path(folder) / ".assay" / "assay.db") as store:
                rollouts = list(store.rollouts())
            yield report, rollouts


def _right(task: Any, prediction: Mapping[str, Any], rollout: Any) -> bool:
    return str(prediction.get("answer")) == task.expected["answer"]


def _sometimes_unscored(task: Any, prediction: Mapping[str, Any], rollout: Any) -> bool:
    if int(task.expected["answer"]) % 3 == 0:
        raise NoGrade("a third of the tasks cannot be scored")
    return _right(task, prediction, rollout)


def _answer(request: Any) -> str:
    """Adds two to every third number, and to all if the prompt contains a demonstration or the instruction to do so.

    A request with other output fields than `answer` gets that instruction as response.
    """
    prompt = request.messages[-1].text or ""
    schema = request.config.response_format["schema"]["properties"] if request.config.response_format else {}
    fields = list(schema) or re.findall(r"`\[\[ ## (\w+) ## \]\]`", prompt)
    values = dict.fromkeys((name for name in fields if name != "completed"), _INSTRUCTION)
    if set(values) == {"answer"} and (number := re.search(r"number (\d+)", prompt)):
        correct = len(request.messages) > 2 or _INSTRUCTION in str(request) or int(number[1]) % 3 == 0
        values["answer"] = str(int(number[1]) + 2 * correct)
    if schema:
        return json.dumps(values)
    if not values:
        return f"```\n{_INSTRUCTION}\n```"
    return "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in values.items()) + "\n\n[[ ## completed ## ]]"


def _state(program: Any) -> str:
    return json_text(program.dump_state(), sort_keys=True)
