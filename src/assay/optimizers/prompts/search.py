"""The candidates of one compile: the proposal of a named DSPy optimizer, or those of the `auto` search.

Does not open gate or test.
"""

import copy
import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from assay.datasets import Splits, Task
from assay.errors import AssayError, BudgetExceeded, ModelError, OptimizerError, Unscored
from assay.evaluation.evaluation import Evaluation, evaluate
from assay.evaluation.session import CONTINUES, RecordedProgram, Session
from assay.evaluation.statistics import lossless_tasks
from assay.models.meter import ignore
from assay.optimizers.budget import of_all
from assay.optimizers.prompts.candidates import (
    Candidate,
    SearchSpace,
    best_with_fewest_tokens,
    searched_program,
    with_models_of,
)
from assay.optimizers.prompts.config import CompileConfig
from assay.optimizers.prompts.demonstrations import Demonstration, explore
from assay.optimizers.prompts.given import title_of
from assay.optimizers.prompts.optimizer_inputs import Proposal
from assay.optimizers.prompts.proposals import InstructionCheck
from assay.optimizers.prompts.racing import OVERRIDDEN, AutoSearch
from assay.optimizers.prompts.teleprompters import auto_prompt_formats, named_val, propose
from assay.optimizers.prompts.thinking import fit, fits_thinking, refinement_in
from assay.programs import program_version
from assay.programs.compose import EnsembleProgram
from assay.rubrics.dspy_metric import example_fields
from assay.rubrics.scoring import ScoredRun
from assay.support.places import write_whole
from assay.support.values import json_text

_BOOTSTRAPPED = 4  # bootstrapped demonstrations that a named optimizer shows, as in DSPy
_EXPLORED = 24  # successful runs after which exploring ends
_QUOTED = 500  # characters of an optimizer's error that a note quotes; its traceback has the whole
_TRIED = 4  # tasks that a program must have run on to compete if its optimizer was interrupted


def _same(program: RecordedProgram, other: RecordedProgram) -> bool:
    return program_version(program.program, program.settings["adapter"]) == program_version(
        other.program, other.settings["adapter"]
    )


class PromptSearch:
    """Makes and evaluates candidates: one of a named optimizer, or many of `auto`."""

    def __init__(
        self, student: RecordedProgram, splits: Splits, session: Session, config: CompileConfig, folder: Path
    ) -> None:
        self.splits, self.session, self.config, self.folder = splits, session, config, folder
        self.student = searched_program(student)
        self.candidates: list[Candidate] = [Candidate("baseline", student)]
        self._chosen: Callable[[], Candidate] = self._highest
        self.explored: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.failed: str | None = None  # why the optimizer ended with an error
        self.val: list[Task] = splits.val
        self.instruction_check = InstructionCheck(self.student.program, session.lm)
        self.incumbent: Candidate | None = None  # the best program that the optimizer at work has evaluated so far
        # Programs that a teleprompter ran on single tasks, with their scores; by instructions and demonstrations.
        self._runs: dict[str, tuple[RecordedProgram, list[float]]] = {}

    def best(self) -> Candidate:
        """The best candidate on val; the baseline on ties and if nothing was evaluated."""
        return self._chosen()

    def _highest(self) -> Candidate:
        """The highest mean over the tasks that all evaluated candidates ran; the plain program on ties."""
        running = [c for c in self.candidates if len(c.evaluation)] or self.candidates[:1]
        common = set.intersection(*(set(c.evaluation.results) for c in running))

        def mean(candidate: Candidate) -> float:
            scores = [
                value for key, value in candidate.evaluation.scores.items() if key in common and not math.isnan(value)
            ]
            return sum(scores) / len(scores) if scores else -1.0

        return best_with_fewest_tokens(running, [mean(c) for c in running], self.config.token_margin)

    def fit_thinking(self, winner: Candidate, margin: float) -> Candidate:
        """The winner with the thinking policy, or the halting of a `Refine` program, that saves most tokens and is
        shown on val to keep the margin. These calls do not count towards `max_search_calls`.
        """
        program = winner.student.program
        if not fits_thinking(program) or (refinement_in(program) is None and self.session.only_own_models):
            if fits_thinking(self.candidates[0].student.program):  # otherwise the job has said so before it began
                self.notes.append(f"thinking_margin had no effect: {winner.name} takes no thinking policy")
            return winner
        if margin and len(self.val) < (needed := lossless_tasks(margin)):
            self.session.progress.say(
                f"warning: thinking_margin={margin:g} needs {needed} val tasks if no score changes, or more; "
                f"there are {len(self.val)}, so probably nothing is saved"
            )
        fitted = fit(winner.student, self.val, self.session, margin=margin)
        if isinstance(fitted, str):
            self.notes.append(fitted)
            return winner
        self.notes.append(fitted.note)
        self.candidates.append(Candidate(f"{winner.name}, {fitted.name}", fitted.program, fitted.evaluation))
        return self.candidates[-1]

    def run(self) -> None:
        if self.config.optimizer == "auto":
            self._auto()
        else:
            self._named(self.config.optimizer)

    def finish(self) -> None:
        """Writes the state.

        Raises:
            ModelError: no val task of the plain program could be scored, so no candidate can be compared.
        """
        self._save()
        baseline = self.candidates[0].evaluation
        if baseline.why_unscored is not None:
            raise ModelError(
                f"none of the {len(baseline)} val tasks could be scored: {baseline.why_unscored}. {CONTINUES}",
                flag="--resume",
            )

    def summaries(self) -> list[dict[str, Any]]:
        """The candidates as reports list them."""
        return [candidate.summary(self.candidates[0]) for candidate in self.candidates]

    def _save(self) -> None:
        """Writes the state for pages that show the search, also while it is in progress."""
        state = {"candidates": self.summaries(), "explored": self.explored, "notes": self.notes}
        write_whole(self.folder / "search.json", json_text(state, indent=1))

    def _named(self, name: str) -> None:
        val = self.val[: named_val(name, len(self.val), self.session, self.student)]
        baseline = self.candidates[0]
        evaluate(baseline.student, val, self.session, name="val: baseline", into=baseline.evaluation)
        proposal = Proposal(
            self.student,
            self.splits.train,
            val,
            self.session,
            self.config.threshold,
            min(_BOOTSTRAPPED, self.config.demos),
            self.config.demos,
            self.config.settings,
        )
        cut: BudgetExceeded | None = None
        try:
            with self.session.meter.aside(of_all(self.candidates[0].evaluation)):
                self._propose(title_of(name), proposal)
        except BudgetExceeded as cap:
            cut = cap
        for candidate in self.candidates[1:]:
            if not len(candidate.evaluation):
                evaluate(candidate.student, val, self.session, name=f"val: {candidate.name}", into=candidate.evaluation)
        if cut is not None:
            raise cut

    def keep_if_best(self, program: Any, result: Any) -> None:
        """Keeps the best program that a teleprompter evaluates: the one with most tasks, then the highest mean."""
        if not isinstance(program, RecordedProgram):
            return
        evaluation = Evaluation()
        for example, prediction, _ in result.results:
            task, run = self.session.tasks.find(*example_fields(example)), ScoredRun.of(prediction)
            if task is not None and run is not None and run.result is not None:
                evaluation.add_run(task, run)
        if not len(evaluation):  # the traced batches of GEPA: their predictions are pairs with traces
            return
        self.session.progress.say(
            f"  a program of {type(program.program).__name__}: {evaluation.mean:.3f} on {len(evaluation)} tasks"
        )
        best = self.incumbent
        if best is None or (len(evaluation), evaluation.mean) > (len(best.evaluation), best.mean):
            self.incumbent = Candidate("", copy.deepcopy(program), evaluation)

    def _propose(self, name: str, proposal: Proposal) -> None:
        self.incumbent = None
        try:
            with self._calls_bar(f"{name} proposes, LM calls"):
                proposed = propose(self.config.optimizer, proposal)
                self.notes += self.instruction_check.checked(proposed.program, self.student.program, self.splits.train)
            if _same(proposed, self.student):
                return
            self.candidates.append(Candidate(f"{name}, cut short" if proposal.cut else name, proposed))
            if proposal.cut is not None:
                raise proposal.cut
        except BudgetExceeded:
            self.notes.append(f"a cap ended {name} before it was done{self._add_best(name)}")
            raise
        except Exception as error:
            if isinstance(error, AssayError) and not isinstance(error, ModelError | OptimizerError | Unscored):
                raise  # a setting, a package, the store: the user has to correct it; it is not a failed proposal
            self._failed(name, error)
        finally:
            self.notes += proposal.notes

    def _add_best(self, name: str) -> str:
        """Adds the best program of an interrupted optimizer to the candidates, if there is one; returns text for a
        note."""
        if len(self.candidates) == 1 and (best := self.incumbent or self._tried_most()) is not None:
            best.name = f"{name}, cut short"
            self.candidates.append(best)
        return "; its best so far competes" if len(self.candidates) > 1 else ""

    def _failed(self, name: str, error: Exception) -> None:
        """Records the failure of an optimizer; the best program it evaluated before that competes.

        Raises:
            OptimizerError: no program has been evaluated, so there is nothing to report.
        """
        failure = f"{name} failed: {type(error).__name__}: {' '.join(str(error).split())[:_QUOTED]}"
        if not len(self.candidates[0].evaluation):
            raise OptimizerError(failure) from error
        with open(self.folder / "dspy.log", "a") as log:
            traceback.print_exception(error, file=log)
        self.failed = failure
        consequence = self._add_best(name) or "; continuing with the plain program only"
        self.notes.append(f"{failure}{consequence} (traceback: {self.folder / 'dspy.log'})")
        self.session.progress.say(f"warning: {failure}{consequence}")

    def record_run(self, program: Any, score: float) -> None:
        """Keeps the score of a run that a teleprompter makes on a single task, outside of an evaluation."""
        if isinstance(program, RecordedProgram):
            key = json_text([(p.signature.instructions, p.demos) for p in program.predictors()])
            self._runs.setdefault(key, (program, []))[1].append(score)

    def _tried_most(self) -> Candidate | None:
        """The best of the programs that a teleprompter ran on several tasks, not yet evaluated on val."""
        tried = [
            (sum(scores) / len(scores), program) for program, scores in self._runs.values() if len(scores) >= _TRIED
        ]
        for _, program in sorted(tried, key=lambda entry: -entry[0]):
            best = with_models_of(copy.deepcopy(program), self.student)  # a teleprompter sets its own
            if not _same(best, self.student):
                return Candidate("", best)
        return None

    @contextmanager
    def _calls_bar(self, name: str) -> Iterator[None]:
        """A progress bar of LM calls: a teleprompter does not report progress, but each of its calls passes the
        meter."""
        calls_left, meter = self.session.meter.search_calls_left(), self.session.meter
        with self.session.progress.bar(name, int(calls_left) if math.isfinite(calls_left) else None) as advance:
            meter.on_call = advance
            try:
                yield
            finally:
                meter.on_call = ignore

    def _auto(self) -> None:
        """Collects demonstrations from labels (no calls) or by exploring; then searches over candidates made of
        them."""
        calls_left = self.session.meter.search_calls_left()
        prompt_formats = auto_prompt_formats(self.student, calls_left)
        pool = self._labels()
        if not pool or not self._labels_suffice():
            explored, prompt_formats = self._explored(prompt_formats, calls_left)
            pool = explored or pool
        space = SearchSpace(self.student, pool, prompt_formats, most=self.config.demos, seed=self.session.seed)
        auto = AutoSearch(space, self.candidates[0], self.val, self.session, self.instruction_check, self._save)
        self.candidates, self._chosen = auto.candidates, lambda: auto.best(token_margin=self.config.token_margin)
        auto.run()
        self.notes.append(
            f"the search ended after {sum(len(c.evaluation) for c in self.candidates)} runs: {auto.stopped}"
        )
        self.notes += [*auto.overridden(), *auto.rejections()]

    def _labels(self) -> list[Demonstration]:
        """The expected outputs of the data as demonstrations; this needs no call. Empty where they are none."""
        names = self._labelled()
        return [Demonstration.of_label(task, names) for task in self.splits.train if task.expected and names]

    def _explored(
        self, prompt_formats: list[str | None], calls_left: float
    ) -> tuple[list[Demonstration], list[str | None]]:
        """Successful runs of the program's variants on train, and the prompt formats by success rate, best first."""
        session = self.session
        exploration = explore(
            self.student,
            self.splits.train,
            session,
            prompt_formats=prompt_formats,
            target=_EXPLORED,
            max_calls=0.25 * calls_left if math.isfinite(calls_left) else 10 * _EXPLORED,
            threshold=self.config.threshold,
        )
        self.explored = exploration.variants
        if exploration.overridden:
            self.notes.append(f"prompt formats were not varied: {OVERRIDDEN}")
            prompt_formats = prompt_formats[:1]
        first = exploration.prompt_format if exploration.teacher is not None else prompt_formats[0]
        session.progress.say(f"explored: {len(exploration.demonstrations)} successes to learn from")
        return exploration.demonstrations, [
            first,
            *(name for name in prompt_formats if name != first and not exploration.behind(name)),
        ]

    def _labelled(self) -> list[str]:
        """The predictors whose demonstrations can be labels: the only one of a program, or of each ensemble member,
        if it has all expected fields as outputs. Empty if there are others."""
        program, expected = self.student.program, set(self.splits.train[0].expected)
        predictors = program.named_predictors()
        members = program.members if isinstance(program, EnsembleProgram) else [program]
        single = all(len(member.predictors()) == 1 for member in members) and len(predictors) == len(members)
        fit = expected and all(expected <= set(predictor.signature.output_fields) for _, predictor in predictors)
        return [name for name, _ in predictors] if single and fit else []

    def _labels_suffice(self) -> bool:
        """Whether a task has all fields of a demonstration. A program that reasons first, or that looks something up
        and asks with it, also learns from runs of its own: a label has neither the thought nor what was found."""
        signature, task = self.student.program.predictors()[0].signature, self.splits.train[0]
        outputs, inputs = set(signature.output_fields), set(signature.input_fields)
        return outputs <= set(task.expected) and inputs <= set(task.inputs)
