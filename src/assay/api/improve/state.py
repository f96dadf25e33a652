"""State of an improvement: what is stored for resuming, and what the caps leave. Does not run steps."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from assay.api.improve.caps import ImprovePlan, Turn
from assay.api.improve.checks import CAPS, remaining_caps, spent_in
from assay.api.improve.report import ImproveReport, finished_report, write_json
from assay.api.improve.steps import STATE, adapter_names, check_name, start_model_of
from assay.errors import ConfigError
from assay.evaluation import Progress
from assay.models import Caps
from assay.models.meter import Usage
from assay.optimizers.finetuning.run_folder import remove_training
from assay.optimizers.finetuning.settings import settings_from
from assay.runs.finished import FinishedRun
from assay.runs.opening import home_of, pinned
from assay.support.formats import check_format
from assay.support.job_folders import claim_folder, remove_folder
from assay.support.names import place_in
from assay.support.settings import Settings, settings_of
from assay.support.values import json_value
from assay.traces.records import new_id

__all__ = ["ImprovementState"]

T = TypeVar("T", bound=Settings)
_FORMAT = 3


@dataclass
class ImprovementState:
    """`report` holds the best program and model so far."""

    program: str
    rubric: str | Path
    data: str
    name: str
    folder: Path
    store: str | Path | None
    progress: Progress
    options: dict[str, Any]
    rollouts: int
    sft: dict[str, Any]
    grpo: dict[str, Any]
    retention: list[str]
    monitor: str | Path | None
    report: ImproveReport = field(init=False)
    checked: bool = False  # the preflight is done
    candidate: tuple[str, str] | None = None  # program and model made by the current step, until its gate has decided
    plan: ImprovePlan | None = None  # None before the preflight
    part: str = ""  # id of the current part
    opens_as: str = ""  # job that test openings are counted for; both sides of the comparison count once

    def begin(self, order: list[str], resume: bool) -> ImproveReport | None:
        """Reads the state to resume from, or writes a new one. Returns the report of a finished improvement."""
        job = {
            "format": _FORMAT, "program": self.program, "rubric": str(self.rubric), "data": self.data, "order": order,
            "options": self.options,
            "rollouts": self.rollouts, "sft": self.sft, "grpo": self.grpo, "retention": self.retention,
            "monitor": self.monitor,
        }  # fmt: skip
        # without the caps, which may be raised on resume
        job["options"] = {key: value for key, value in self.options.items() if key not in CAPS}
        job = json_value(job, placeholders=True)
        state_file = self.folder / STATE
        self.opens_as = f"improve-{self.name}-{new_id()[:12]}"
        if resume and not state_file.is_file() and (done := finished_report(self._report_file, job)) is not None:
            return done
        if resume and state_file.is_file():  # without a state there is nothing to resume, and a new one begins
            state = json.loads(state_file.read_text(encoding="utf-8"))
            check_format(
                f"the improvement {self.name!r}", state["job"]["format"], _FORMAT, remake="take another name",
                error=ConfigError,
            )  # fmt: skip
            if state["job"] != job:
                raise ConfigError(
                    f"the improvement {self.name!r} was begun with other settings: resume with the same, or take "
                    "another name"
                )
            self.job, self.report = (
                job,
                ImproveReport(
                    None,
                    state["program"],
                    state["model"],
                    state["steps"],
                    notes=state["notes"],
                    data=state["data"],
                ),
            )
            self.opens_as, self.checked = state["opens_as"], state["checked"]
            self.candidate = tuple(state["made"]) if state["made"] else None
            self.plan = ImprovePlan.of(state["plan"]) if state["plan"] else None
            return ImproveReport.of(stored) if (stored := self._ended.report(self.progress)) is not None else None
        check_name(self.name, order, self.folder)
        self.job, self.report = job, ImproveReport(None, self.program, self._start_model())
        for adapter in adapter_names(self.name, order):
            # an abandoned training of an earlier improvement with the same name
            remove_training(adapter)
        claim_folder(self.folder, self._job)
        self._keep()
        return None

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Makes runs opened inside parts of this improvement: interrupted ones resume, finished ones are replayed."""
        before, self.part = self.part, f"{len(self.report.steps)}.{name}"
        try:
            with pinned(f"{self._runs}.{self.part}"):
                yield
        finally:
            self.part = before

    @property
    def _job(self) -> str:
        """The id by which its folder is its own."""
        return f"improvement {self.name}"

    @property
    def _runs(self) -> str:
        """Common prefix of the ids of its runs."""
        return f"improve-{self.opens_as.rpartition('-')[2]}"

    def keep_report(self) -> None:
        """Writes the report. `resume` returns it if the process was killed before printing it or no cap was raised."""
        if self.report.stopped is not None:
            self._ended.keep(self.report.to_dict())
        else:
            write_json(self._report_file, {"job": self.job, "report": self.report.to_dict()})
            remove_folder(self.folder, self._job)

    @property
    def _caps(self) -> Caps:
        return Caps(
            calls=self.options.get("max_calls"),
            tokens=self.options.get("max_tokens"),
            cost_usd=self.options.get("max_cost_usd"),
        )

    @property
    def _ended(self) -> FinishedRun:
        """Report of an improvement that ended at a cap."""
        return FinishedRun(self.folder, caps=self._caps, about=self.job)

    @property
    def _report_file(self) -> Path:
        return place_in(self.folder.parent, self.name, ending=".json")

    def _settings(self, kind: type[T], values: Mapping[str, Any], argument: str) -> T:
        return settings_from(
            kind, {"model": self.report.model, "seed": self.options.get("seed", 0), **values}, argument
        )

    def _start_model(self) -> str:
        return start_model_of(self.program, self.options.get("model"))

    def _keep(self) -> None:
        state = {
            "job": self.job,
            "program": self.report.program,
            "model": self.report.model,
            "steps": self.report.steps,
            "notes": self.report.notes,
            "data": self.report.data,
            "opens_as": self.opens_as,
            "checked": self.checked,
            "made": self.candidate,
            "plan": asdict(self.plan) if self.plan is not None else None,
        }
        write_json(self.folder / STATE, state)

    def _capped(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with the caps reduced to what the current part may use; see `remaining_caps`."""
        if not self._caps.any:
            return dict(options)
        spent, turn = self._spent(), self._turn()
        reserved, least = dict[str, float](), dict[str, float]()
        if self.plan is not None and turn is not None:
            gate = self.part.endswith(".gate")
            reserved = self.plan.amounts(turn.after if gate else turn.reserved)
            least = {} if gate else self.plan.amounts(self.plan.steps[len(self.report.steps)].least)
        return remaining_caps(options, spent, reserved=reserved, least=least)

    def _options_for(self, kind: type[Settings]) -> dict[str, Any]:
        """Options for a step, with the remaining caps; only those that its settings class has."""
        return {name: value for name, value in self._capped(self.options).items() if name in settings_of(kind)}

    def _turn(self) -> Turn | None:
        """What the current step may use of the caps; None before the preflight and after the last step."""
        at = len(self.report.steps)
        if self.plan is None or at >= len(self.plan.steps) or self.part.endswith(".test"):
            return None
        return self.plan.turn(
            at, self._caps, self.plan.remaining(self._caps, self._spent()), worked=self.part.endswith(".gate")
        )

    def _spent(self) -> Usage:
        """Usage of all parts except the current one."""
        return spent_in(home_of(self.store) / "runs", self._runs, but=self.part)
