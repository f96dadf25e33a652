"""Reports of trainings: their JSON, the lines for people, and the page."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from assay.errors import AssayError
from assay.optimizers.finetuning.settings import PolicySettings, SFTSettings
from assay.support.numbers import counted, figure
from assay.support.report import OBJECT, Report, Table
from assay.support.values import json_value


@dataclass(repr=False)
class TrainingReport(Report):
    """What the reports of all trainings have. A report grows while the training runs.

    Attributes:
        name: the model to serve; None for a base model that is not embedded, where `path` is PEFT's folder.
        validation: `[program][mode]` has `before`, `after` and their paired `gain` on tasks that were used neither for
            training nor for model selection.
        test_openings: by program, see `assay.traces.store.sealing.Openings`.
        agreement: share of prompts, in [0, 1], that torch and the served GGUF continue with the same greedy text.
    """

    name: str | None
    path: Path
    config: PolicySettings | SFTSettings  # a mapping in a report that was read from the store
    steps: int = 0
    best_step: int | None = None
    agreement: float | None = None
    stopped: str | None = None
    alarms: list[str] = field(default_factory=list)
    validation: dict[str, dict[str, Any]] = field(default_factory=dict)
    test_openings: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def summary(self, data: Mapping[str, Any]) -> Iterator[str | Table]:
        """The lines of this kind of training."""
        raise NotImplementedError

    def lines(self) -> Iterator[str | Table]:
        from assay.reports.markdown import curriculum_lines
        from assay.reports.training import in_numbers
        from assay.traces.store.sealing import openings_line

        data = self.to_dict()
        for title, modes in data["validation"].items():
            rows = [list(row) for row in in_numbers(modes)]
            yield Table(
                title=f"{title}: sealed tasks, {next(iter(modes.values()))['before']['n']}", rows=rows,
                header=("", "before", "after", "gain, paired 95 %"),
                strong=[row[0] for row in rows if row[0].endswith(": score")],
            )  # fmt: skip
            if openings := data["test_openings"].get(title):
                yield openings_line(openings)
        yield from self.summary(data)
        if data["agreement"] is not None:
            same = f"{100 * data['agreement']:.0f} % of the prompts"
            yield f"llama.cpp, which serves it, writes the same greedy text as torch for {same}"
        yield from (f"{count} left out: {reason}" for reason, count in data["left_out"].items())
        yield from curriculum_lines(data.get("curriculum"))
        stopped = [data["stopped"]] if data["stopped"] else []
        yield from (f"note: {note}" for note in dict.fromkeys([*data["notes"], *data["alarms"], *stopped]))
        if data.get("report"):
            yield f"report: {data['report']}"
        yield str(data["path"])
        if data["name"]:
            yield f"In any command: `model` {data['name']}"

    def write_page(self, path: str | Path, *, store: str | Path | None = None) -> Path:
        """Writes the report as one HTML file, with the tasks of the store's evaluations before and after.

        Raises:
            ConfigError: the file cannot be written.
        """
        from assay.reports.training import compared_runs, trained_tasks, write_training
        from assay.traces import Store

        data, tasks = self.to_dict(), []
        if data["validation"]:  # a training on an export has none, and then the store is not needed
            with Store(store) as opened:
                tasks = trained_tasks(opened, data["validation"])
                opened.put_report(path, *compared_runs(data["validation"]))
        return write_training(Path(path), data, tasks=tasks)


@dataclass
class RowStats:
    """Counts and times of a source of rows. `left_out` counts rollouts and calls not trained on, by reason."""

    rollouts: int = 0
    calls: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, Any]] = field(default_factory=list)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the counts of a stored report or checkpoint."""
        self.rollouts, self.calls, self.samples = state["rollouts"], state["calls"], state["samples"]
        self.seconds, self.left_out = dict(state["seconds"]), Counter(state["left_out"])

    @property
    def counts(self) -> tuple[int, int, dict[str, int]]:
        return self.rollouts, self.calls, dict(self.left_out)

    def set_sum(self, counts: Sequence[tuple[int, int, dict[str, int]]]) -> None:
        """Replaces the counts by the sums of those of all processes."""
        self.rollouts, self.calls = sum(each[0] for each in counts), sum(each[1] for each in counts)
        self.left_out = sum((Counter(each[2]) for each in counts), Counter())

    def spend(self, activity: str, seconds: float) -> None:
        self.seconds[activity] = self.seconds.get(activity, 0.0) + seconds


@dataclass(repr=False)
class PolicyReport(TrainingReport):
    """Result of `train_policy`. `curves[name][step]` are the logged values; the counts of `row_stats` are JSON keys."""

    curves: dict[str, dict[int, float]] = field(default_factory=dict)
    converged: bool | None = None
    row_stats: RowStats = field(default_factory=RowStats, metadata=OBJECT)
    report: Path | None = None
    curriculum: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), **json_value(self.row_stats)}

    @classmethod
    def read(cls, stored: Mapping[str, Any], objects: Mapping[str, Any] | None = None) -> Self:
        counts = RowStats()
        counts.restore(stored)
        return super().read(stored, {**(objects or {}), "row_stats": counts})

    def summary(self, data: Mapping[str, Any]) -> Iterator[str]:
        from assay.reports.training import constant_reward

        seconds = ", ".join(f"{name} {value:.0f} s" for name, value in data["seconds"].items())
        made = f"{counted(data['steps'], 'steps')}, {counted(data['rollouts'], 'rollouts')}, {data['calls']} calls"
        yield f"{made} trained on ({seconds}); weights of step {data['best_step']}"
        if (reward := constant_reward(self.curves)) is not None:
            yield f"nothing was learned: every rollout had the reward {figure(reward)}"
            return
        words = {None: "too few steps to decide whether it converged", True: "converged", False: "not converged"}
        yield f"{words[self.converged]}: the mean reward of the last ten steps, compared with that of the ten before"

    def write_own_page(self) -> None:
        """Writes the HTML page next to the adapter. A note says so if the charts cannot be drawn."""
        from assay.models.lora import list_adapters
        from assay.reports.training import of_other_seeds, write_training

        try:
            content = self.to_dict()
            reports = of_other_seeds(content, (adapter.made for adapter in list_adapters()))
            self.report = write_training(self.path / "training.html", content, reports)
        except AssayError as error:
            self.notes.append(f"no page was written: {error}")


@dataclass(kw_only=True, repr=False)
class SFTReport(TrainingReport):
    """Result of `train_sft`.

    `loss` and `held_out_loss` are mean negative log-likelihoods per completion token, by step. `validation` and
    `test_openings` are those of a program before and after, where `assay.train_sft` was given one.
    """

    rows: int
    held_out_rows: int
    tasks: int
    left_out: Mapping[str, int]
    loss: dict[int, float] = field(default_factory=dict)
    held_out_loss: dict[int, float] = field(default_factory=dict)

    def summary(self, data: Mapping[str, Any]) -> Iterator[str | Table]:
        rows = []
        for step in sorted(self.held_out_loss) or sorted(self.loss)[:: max(1, len(self.loss) // 8)]:
            nearest = max((at for at in self.loss if at <= step), default=None)
            held_out = f"{self.held_out_loss[step]:.3f}" if step in self.held_out_loss else ""
            rows.append((str(step), "" if nearest is None else f"{self.loss[nearest]:.3f}", held_out))
        title = "mean loss of a completion's token"
        yield Table(title=title, rows=rows, header=("step", "loss", "held out"), strong=[str(self.best_step)])
        yield (
            f"{counted(self.rows, 'rows')} trained on, {self.held_out_rows} held out, of "
            f"{counted(self.tasks, 'tasks')}; {counted(self.steps, 'steps')}, the best is {self.best_step}"
        )
