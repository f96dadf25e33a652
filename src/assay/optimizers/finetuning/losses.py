"""Loss curves of supervised fine-tuning, the alarms they raise, and the end at a loss that is not finite."""

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from assay.reports.training_log import TrainingLog

_RISEN = 2  # consecutive evaluations above the lowest held-out loss before an alarm


@dataclass(kw_only=True)
class LossMonitor:
    """Collects the losses. Stops training at a signal or at a loss that is not finite.

    Attributes:
        loss, held_out: mean negative log-likelihood of a completion's token, by step.
        advance: called with the number of steps done.
        log: gets every loss and alarm as it comes.
        alarms: texts by name; each is raised once and names a remedy.
    """

    loss: dict[int, float]
    held_out: dict[int, float]
    stop: threading.Event
    advance: Callable[[int], Any]
    log: TrainingLog | None = None
    alarms: dict[str, str] = field(default_factory=dict)
    diverged: bool = False

    def callback(self) -> Any:
        """The callback for the trainer."""
        from transformers import TrainerCallback

        from assay.optimizers.finetuning.trl_trainer import over_ranks

        monitor = self

        class Callback(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                monitor.advance(state.global_step)
                if monitor.log is not None:
                    monitor.log.begin(state.max_steps)
                for logged in state.log_history:
                    monitor.record(logged)

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                monitor.advance(1)
                if any(over_ranks([monitor.stop.is_set()])):
                    control.should_save = control.should_training_stop = True

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
                monitor.record({**(logs or {}), "step": state.global_step})
                if monitor.diverged:
                    control.should_training_stop, control.should_save = True, False

        return Callback()

    def record(self, logged: Mapping[str, Any]) -> None:
        """Adds the losses of an entry of the trainer's log."""
        step, values = int(logged["step"]), {}
        for key, curve, name in (("loss", self.loss, "training"), ("eval_loss", self.held_out, "held_out")):
            if key in logged:
                value = float(logged[key])
                self.diverged = self.diverged or not math.isfinite(value)
                if math.isfinite(value):
                    curve[step] = values[f"loss/{name}"] = value
        if "loss/held_out" in values:
            for name, text in self._alarms().items():
                self.alarms.setdefault(name, f"step {step}: {text}")
        if self.log is not None and values:
            self.log.values(step, values, self.alarms)

    def _alarms(self) -> dict[str, str]:
        curve = sorted(self.held_out.items())
        (best, lowest), alarms = min(curve, key=lambda item: item[1]), dict[str, str]()
        last, first = curve[-1][1], curve[0]
        if len(curve) > _RISEN and first == (0, lowest):
            alarms["no_better"] = (
                f"no held-out loss is below the {lowest:.3f} before training: what is learned from these rows does "
                "not carry over to other tasks. Lower learning_rate=…, or give more tasks"
            )
        elif best and len([step for step, _ in curve if step > best]) >= _RISEN and last > lowest:
            alarms["overfitting"] = (
                f"the held-out loss rose from {lowest:.3f} at step {best} to {last:.3f}: the rows are learned by "
                "heart. The weights with the lowest held-out loss are kept. Lower epochs=… or learning_rate=…, or "
                "give more rows"
            )
        return alarms
