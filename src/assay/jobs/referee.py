"""The referee of a coding agent that improves the texts of an agent: what it may see, and when a text is promoted.

The optimizer sees val: scores and failures. Gate and test stay sealed; a submission is refused, or gets one bit from a
look at gate by the rule of `assay.evaluation.adaptive`. State is what the log of the folder has, so a referee that was
killed continues where it was. Does not speak MCP: `assay.commands.referee` does.
"""

import functools
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from inspect import cleandoc
from typing import Any, ClassVar, TypeVar

from assay.datasets import Task
from assay.datasets.keys import overlap
from assay.datasets.memorised import memorised
from assay.errors import AssayError, BudgetExceeded, ConfigError, ModelError
from assay.evaluation import Evaluation, Gain, Progress, RecordedProgram, evaluate, paired_gain
from assay.evaluation.adaptive import MOST_PROMOTIONS, AdaptiveGate, passes_screen
from assay.evaluation.evaluation import finished_runs
from assay.evaluation.session import Measured
from assay.jobs.groups import AgentServing, ProgramJob
from assay.jobs.job import Job, open_job
from assay.jobs.referee_folder import LookLedger, RefereeFolder, decoys_of, digest_of_texts
from assay.models.meter import Usage
from assay.optimizers.budget import forecast_pair
from assay.optimizers.prompts.proposals import InstructionCheck
from assay.programs.foreign_agent import TextAgent
from assay.programs.isolation import copied
from assay.programs.runners import runner_of
from assay.programs.texts import TextFiles
from assay.rubrics import Rubric
from assay.rubrics.scoring import ScoredRun
from assay.support.numbers import counted, signed
from assay.support.values import json_value, value_text

Texts = Mapping[str, str]
F = TypeVar("F", bound=Callable[..., dict[str, Any]])

_COPIED = 0.1  # share of a text's word runs in tasks from which it is refused
_MOST_FAILURES = 20
_USED_UP = "used up: the gate has no look left"
_RESERVED = 1.25  # calls that are reserved for a run of gate or test, as a part of those that preflight measured
# Words that a text has to say to whoever grades the answers, and not to whoever gives them.
_TO_JUDGE = re.compile(
    r"\b(?:judges?|graders?|evaluators?|rubrics?|reward model|full marks|(?:high|full|maximum|perfect) scores?"
    r"|score (?:it|this)|(?:ignore|disregard) (?:all |the |any )?(?:previous|other|above) instructions)\b",
    re.IGNORECASE,
)


class RefereeJob(AgentServing, ProgramJob):
    """Referee."""

    kind: ClassVar[str] = "referee"


@dataclass
class State:
    """What the log says happened so far.

    Attributes:
        champion: digest of the promoted texts; of the agent's own ones before any promotion.
        looked: answer of the look at a submission, by its digest.
        submissions: all of them, in their order, as the report has them.
    """

    champion: str
    looked: dict[str, bool] = field(default_factory=dict)
    submissions: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, events: Sequence[Mapping[str, Any]], champion: str) -> "State":
        state = cls(champion)
        for event in events:
            state.add(event)
        return state

    def add(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "submit":
            row = {name: value for name, value in event.items() if name != "event"}
            self.submissions.append(row)
            if row["look"] is not None:
                self.looked[row["texts"]] = row["promoted"]
            if row["promoted"]:
                self.champion = row["texts"]


def _one_at_a_time(tool: F) -> F:
    """Tools of several clients run one after another: a look depends on all answers before it."""

    @functools.wraps(tool)
    def call(self: "Referee", *arguments: Any, **values: Any) -> dict[str, Any]:
        with self.lock:
            return tool(self, *arguments, **values)

    return call  # type: ignore[return-value]


class Referee:
    """An opened referee. Its tools are thread-safe; each returns a JSON object."""

    def __init__(self, folder: RefereeFolder, job: Job) -> None:
        self.folder, self.job = folder, job
        self.originals = dict(folder.manifest.originals)
        self.ledger = LookLedger(folder.manifest.id, folder.manifest.gate)
        self.state = State.of(folder.events(), folder.keep_texts(self.originals))
        self.lock = threading.Lock()
        self.decoys = decoys_of(job.splits.val)
        self.check = InstructionCheck(self.agent, job.session.lm)
        self.opened_elsewhere = 0  # how often other referees of this user have opened the test tasks
        self.champions = dict[tuple[str, str], Evaluation]()  # of this process, by digest of the texts and split
        if folder.manifest.measured is not None:
            job.session.measured = Measured(**folder.manifest.measured)
            job.session.meter.hold(**self.later)

    @property
    def agent(self) -> TextAgent:
        """The agent with its own texts."""
        agent: TextAgent = self.job.recorded.program
        return agent

    @property
    def champion(self) -> dict[str, str]:
        return self.folder.texts_of(self.state.champion)

    @property
    def submissions(self) -> list[dict[str, Any]]:
        """All submissions so far, in their order."""
        return self.state.submissions

    @property
    def gate(self) -> AdaptiveGate:
        """The looks so far at any of the gate tasks, also those of other referees of this user."""
        return AdaptiveGate(looks=self.folder.manifest.looks, answers=self.ledger.answers())

    @property
    def later(self) -> dict[str, Usage]:
        """What looks and test are expected to take at most, by phase."""
        pair = forecast_pair(self.job.recorded.program, self.job.session)
        sizes = self.job.splits.sizes()

        def of(runs: float) -> Usage:
            return Usage(
                calls=math.ceil(runs * _RESERVED * pair.calls / 2),
                prompt_tokens=math.ceil(runs * pair.tokens / 2), cost_usd=runs * pair.cost_usd / 2,
            )  # fmt: skip

        return {"gate": of(sizes["gate"] * (self.folder.manifest.looks + 1)), "test": of(2 * sizes["test"])}

    def check_caps(self) -> None:
        """Raises `ConfigError` if looks and test leave nothing of the cap on calls for val."""
        cap, reserved = self.job.session.meter.caps.calls, sum(usage.calls for usage in self.later.values())
        sizes = self.job.splits.sizes()
        least = reserved + math.ceil(self.later["test"].calls / sizes["test"]) * sizes["val"]
        if cap is not None and cap < least:
            raise ConfigError(
                f"must be at least {least:,}: {counted(self.folder.manifest.looks, 'looks')} at gate and the test may "
                f"take {reserved:,}, and two texts on val the rest. Or allow fewer `looks`, or smaller splits",
                field="max_calls",
            )

    # -- tools

    @_one_at_a_time
    def describe(self) -> dict[str, Any]:
        """The agent's texts, the rubric, the rules and the sizes."""
        sizes = self.job.splits.sizes()
        return {
            "agent": self.folder.manifest.agent,
            "texts": self.originals,
            "champion": self.champion,
            "rubric": _described(self.job.session.rubric),
            "val_tasks": sizes["val"],
            "gate_tasks": sizes["gate"],
            "rules": RULES.format(looks=self.folder.manifest.looks, promotions=MOST_PROMOTIONS),
            "longest_tokens": {name: self.check.limit_of(name) for name in self.originals},
        }

    @_one_at_a_time
    def budget(self) -> dict[str, Any]:
        """Calls on val, and looks. Calls of gate are not told: their number would say something about gate."""
        gate, session = self.gate, self.job.session
        outcomes = [row["outcome"] for row in self.state.submissions]
        left = self._calls_left()
        return {
            "calls": session.meter.of("val").calls, "calls_left": left,
            "looks": len(gate.answers), "looks_left": 0 if gate.used_up else gate.looks - len(gate.answers),
            "promotions": gate.promotions, "submissions": len(outcomes), "refusals": outcomes.count("refused"),
        }  # fmt: skip

    @_one_at_a_time
    def score(self, texts: Texts, n: int | None = None) -> dict[str, Any]:
        """Scores on the first `n` val tasks, by default on all, beside those of the champion on the same tasks."""
        return self._answered("score", texts, self._score, n)

    @_one_at_a_time
    def failures(self, texts: Texts, k: int = 5) -> dict[str, Any]:
        """The `k` val tasks with the lowest scores."""
        return self._answered("failures", texts, self._failures, k)

    @_one_at_a_time
    def submit(self, texts: Texts) -> dict[str, Any]:
        """Refused, no look, or a look: promoted or not."""
        given, why = self._complete(texts)
        if why is not None:
            return self._submitted("refused", "", why)
        digest, gate = self.folder.keep_texts(given), self.gate
        if digest in self.state.looked:
            return self._submitted("refused", digest, "repeated: these very texts have had a look")
        if given == self.champion:
            return self._submitted("refused", digest, "repeated: these texts are the champion's")
        if (why := self._lint(given)) is not None:
            return self._submitted("refused", digest, why)
        if gate.used_up:
            return self._submitted("refused", digest, _USED_UP)
        try:
            self.folder.verify(runs=True)
            before, after = self._pair(given, "val")
        except (BudgetExceeded, AssayError) as error:
            return self._submitted("refused", digest, f"not run: {error}")
        gain = paired_gain(before.scores, after.scores)
        if not passes_screen(_differences(before, after)):
            text = f"val shows no gain over the champion: {signed(gain.mean)} on {counted(gain.n, 'tasks')}"
            return self._submitted("no look", digest, text, gain=gain)
        return self._look(digest, given, gain)

    # -- what the tools do

    def _answered(
        self, tool: str, texts: Texts, answer: Callable[[dict[str, str], Any], dict[str, Any]], argument: Any
    ) -> dict[str, Any]:
        """The answer of a tool on val; a refusal where a cap or the model ends it."""
        given, why = self._complete(texts)
        try:
            result = {"refused": why} if why is not None else answer(given, argument)
        except (BudgetExceeded, AssayError) as error:
            result = {"refused": str(error)}
        digest = digest_of_texts(given)
        self.folder.log(tool, texts=digest, argument=argument, refused=result.get("refused"), score=result.get("score"))
        return result

    def _score(self, texts: dict[str, str], n: int | None) -> dict[str, Any]:
        tasks = self.job.splits.val
        if n is not None and n < 1:
            raise ConfigError(f"must be at least 1, not {n}", field="n")
        tasks = tasks[:n]
        before, after = self._pair(texts, "val", tasks)
        gain = paired_gain(before.scores, after.scores)
        return {
            "score": _number(after.mean), "champion": _number(before.mean), "gain": gain.to_dict(),
            "tasks": len(after), "unscored": after.unscored,
            "criteria": after.criteria(), "champion_criteria": before.criteria(),
            "passes_screen": len(tasks) == len(self.job.splits.val) and passes_screen(_differences(before, after)),
        }  # fmt: skip

    def _failures(self, texts: dict[str, str], k: int) -> dict[str, Any]:
        if not 1 <= k <= _MOST_FAILURES:
            raise ConfigError(f"must be from 1 to {_MOST_FAILURES}, not {k}", field="k")
        runs: dict[str, ScoredRun] = {}
        evaluation = self._run(texts, "val", runs=runs)
        worst = sorted((value, task_id) for task_id, value in evaluation.scores.items() if not math.isnan(value))
        tasks = {task.id: task for task in self.job.splits.val}
        return {
            "score": _number(evaluation.mean),
            "failures": [_shown(tasks[task_id], runs[task_id]) for value, task_id in worst[:k] if value < 1],
        }

    def _look(self, digest: str, texts: dict[str, str], gain: Gain) -> dict[str, Any]:
        number = self.ledger.begin(self.folder.manifest.looks)
        # another referee may have looked at these tasks meanwhile
        gate = AdaptiveGate(looks=self.folder.manifest.looks, answers=self.ledger.answers()[: number - 1])
        if gate.used_up:
            return self._submitted("refused", digest, _USED_UP)
        level = gate.level
        self.folder.log("look", texts=digest, look=number, level=level)
        try:
            before, after = self._pair(texts, "gate")
        except (BudgetExceeded, AssayError) as error:
            # the reason may quote a task of gate: it is for the person who opened the referee alone
            self.folder.log("interrupted", texts=digest, look=number, reason=str(error))
            return self._submitted("refused", digest, "not run: gate could not be run to its end; the look is counted")
        promoted = gate.look(_differences(before, after))
        self.ledger.answer(number, promoted)
        row = self._submitted(
            "look", digest, "promoted" if promoted else "gate does not show a gain", gain=gain, look=number,
            promoted=promoted, level=level,
        )  # fmt: skip
        return {name: value for name, value in row.items() if name != "val_gain"}

    def _submitted(
        self, outcome: str, digest: str, reason: str, *, gain: Gain | None = None, look: int | None = None,
        promoted: bool = False, level: float | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Logs a submission; returns what the optimizer is told."""
        flags = _addressing(self.folder.texts_of(digest), self.originals) if digest else []
        event = self.folder.log(
            "submit", texts=digest, outcome=outcome, reason=reason, look=look, promoted=promoted, level=level,
            val_gain=None if gain is None else gain.to_dict(), flags=flags,
        )  # fmt: skip
        self.state.add(event)
        gate = self.gate
        return {
            "outcome": outcome, "reason": reason, "look": look, "promoted": promoted,
            "looks_left": 0 if gate.used_up else gate.looks - len(gate.answers),
            "val_gain": None if gain is None else gain.to_dict(),
        }  # fmt: skip

    def _complete(self, texts: Texts) -> tuple[dict[str, str], str | None]:
        """All texts, those that are not given as the champion has them; and why they are refused."""
        unknown = sorted(set(texts) - set(self.originals))
        if unknown:
            return {}, f"unknown text {unknown[0]!r}: the texts are {', '.join(self.originals)}"
        # as DSPy keeps an instruction, so that the text of the patch is the one that was sent
        kept = {
            n: self.originals[n] if t.strip() == self.originals[n] else cleandoc(t).strip() for n, t in texts.items()
        }
        return {**self.champion, **kept}, None

    def _lint(self, texts: dict[str, str]) -> str | None:
        """Why texts are refused, as `rule: reason`. Depends on what the optimizer may see alone, never on gate."""
        seen = [*self.job.splits.train, *self.job.splits.val]
        quoted = [" ".join(map(value_text, (*t.inputs.values(), *t.expected.values()))) for t in seen]
        for name, text in texts.items():
            before = self.originals[name]
            if (why := self.check.why(text, before, most_tokens=self.check.limit_of(name))) is not None:
                return f"{why} ({name})"
            if (share := overlap(text, quoted, before=before)) >= _COPIED:
                return f"copied: {share:.0%} of the word sequences of {name} are in tasks"
        whole, own = "\n".join(texts.values()), "\n".join(self.originals.values())
        parts = {"decoys": self.decoys, "val": self.job.splits.val, "train": self.job.splits.train}
        counts = {name: len(memorised(whole, tasks, before=own)) for name, tasks in parts.items()}
        if not (most := max(counts.values())):
            return None
        if counts["decoys"] == most > counts["val"]:
            return (
                f"decoys: it answers {counted(most, 'tasks')} as a file in the referee's folder does, which is a decoy"
            )
        split = max(("val", "train"), key=counts.__getitem__)
        return f"copied: it answers {counted(counts[split], f'{split} tasks')} by a rare word next to the answer"

    def _calls_left(self) -> int | None:
        """LM calls that are left for val; None without a cap."""
        meter = self.job.session.meter
        if meter.caps.calls is None:
            return None
        reserved = sum(max(0, usage.calls - meter.of(phase).calls) for phase, usage in self.later.items())
        return max(0, meter.caps.calls - meter.usage.calls - reserved)

    def _pair(self, texts: Texts, split: str, tasks: Sequence[Task] | None = None) -> tuple[Evaluation, Evaluation]:
        """The scores of the champion and of texts on a split, or on some of its tasks.

        Those of a champion on a whole split are read from the store once, unless a task has none and is run again.
        """
        key = self.state.champion, split
        if (before := self.champions.get(key)) is None:
            before = self._run(self.champion, split, tasks)
            if len(before) == self.job.splits.sizes()[split] and not before.unscored:
                self.champions[key] = before
        elif tasks is not None:
            before = before.only([task.id for task in tasks])
        return before, self._run(texts, split, tasks)

    def _run(
        self, texts: Texts, split: str, tasks: Sequence[Task] | None = None, *, runs: dict[str, ScoredRun] | None = None
    ) -> Evaluation:
        """The scores of texts on a split. Tasks that were run before, also by an earlier process, are not run again.

        Args:
            runs: receives the runs by task id.
        Raises:
            BudgetExceeded: a cap ended it; finished runs are in the store.
            ModelError: no task could be scored.
        """
        job, evaluation = self.job, Evaluation()
        parts = {"val": job.splits.val, "gate": job.splits.gate}
        tasks = (job.splits.unseal() if split == "test" else parts[split]) if tasks is None else tasks
        recorded: RecordedProgram = job.recorded.around(with_texts(self.agent, texts))
        job.store.flush()
        known = finished_runs(recorded, split)
        with job.session.phase(split):
            evaluate(recorded, tasks, job.session, name=split, into=evaluation, known=known)
        if evaluation.why_unscored is not None:
            raise ModelError(f"none of the {len(evaluation)} {split} tasks could be scored: {evaluation.why_unscored}")
        if runs is not None:
            job.store.flush()
            runs |= {task_id: run for (task_id, sample), run in finished_runs(recorded, split).items() if not sample}
        return evaluation

    # -- the end

    def tested(self) -> tuple[Evaluation | None, Evaluation | None, Gain | None]:
        """The agent's own texts and the champion on the sealed test; not opened if nothing was promoted."""
        if self.champion == self.originals:
            return None, None, None
        self.folder.verify(runs=True)
        self.opened_elsewhere = self.ledger.open_test([task.key for task in self.job.splits.parts()["test"]])
        before, after = (self._run(side, "test") for side in (self.originals, self.champion))
        return before, after, paired_gain(before.scores, after.scores)


RULES = """Improve the agent's texts. You see val tasks only, with `score` and `failures`; gate and test are sealed.
`submit` answers refused, no look, or look k: promoted or not. A submission is refused if it loses a placeholder or a
code block, is longer than `longest_tokens`, copies tasks, or lists words of tasks with their answers. It gets a look at
gate only if all val tasks show a gain over the champion. There are {looks} looks and at most {promotions} promotions in
all, and each promotion makes the next one harder: submit few texts that you believe in, and save looks for the last
ones. Scores of gate are never told."""


def _differences(before: Evaluation, after: Evaluation) -> list[float]:
    """Paired differences of the tasks that are scored before. What is not scored after counts in the bound as the
    worst that it can be, so that a text cannot remove the tasks that it fails on."""
    scores = after.scores
    return [
        (0.0 if math.isnan(scores.get(key, math.nan)) else scores[key]) - score
        for key, score in before.scores.items()
        if not math.isnan(score)
    ]


def _addressing(texts: Texts, originals: Texts) -> list[str]:
    """Words of new texts that address whoever grades the answers, for the report."""
    return sorted(
        {
            match[0].casefold()
            for name, text in texts.items()
            for match in _TO_JUDGE.finditer(text)
            if match[0].casefold() not in originals[name].casefold()
        }
    )


def _described(rubric: Rubric) -> dict[str, Any]:
    return {
        "name": rubric.name,
        "criteria": [
            {
                "name": criterion.name, "weight": criterion.weight, "scope": criterion.scope,
                "judge": None if criterion.judge is None else criterion.judge.text or criterion.judge.use,
                "check": criterion.source or None,
            }
            for criterion in rubric.criteria
        ],
    }  # fmt: skip


def _shown(task: Task, run: ScoredRun) -> dict[str, Any]:
    """A val task as the optimizer sees it."""
    result = run.scored
    return {
        "task": task.id, "score": _number(result.value),
        "inputs": json_value(dict(task.inputs), placeholders=True),
        "expected": json_value(dict(task.expected), placeholders=True),
        "answer": run.rollout.prediction,
        "feedback": result.feedback or "; ".join(f"{v.criterion}: {v.reason}" for v in result.verdicts if v.reason),
        "failed": result.failed,
    }  # fmt: skip


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


@contextmanager
def opened_referee(folder: RefereeFolder, *, progress: Progress) -> Iterator[Referee]:
    """The referee of a folder, whose job is held while it is open. The working directory is that of the running agent.

    Raises:
        ConfigError: another process holds it.
        ArtifactError: a copy was changed.
    """
    folder.verify()
    config = RefereeJob(**{"program": folder.manifest.agent, **folder.manifest.job})
    with chdir(folder.run_anew()), open_job(
        config, program=agent_of(folder), rubric=folder.rubric, progress=progress, store=folder.store, resume=True,
        need=("val", "gate", "test"),
    ) as job:  # fmt: skip
        job.status = "stopped"  # until it is closed
        yield Referee(folder, job)


# -- The agent with given texts.


def agent_of(folder: RefereeFolder) -> TextAgent:
    """The agent of a referee with its own texts. It must be made in the folder in which it runs."""
    manifest = folder.manifest
    agent = TextAgent(
        manifest.agent, manifest.texts, manifest.delivery, roles=manifest.roles, runner=runner_of(manifest.agent)
    )
    agent.host.files = TextFiles(list(manifest.originals))
    return agent


def with_texts(agent: TextAgent, texts: Texts) -> TextAgent:
    """The agent with other texts."""
    changed: TextAgent = copied(agent)
    for name, predictor in changed.named_predictors():
        predictor.signature = predictor.signature.with_instructions(texts[name])
    return changed
