"""Loss curves of supervised fine-tuning: what is logged, the alarms, and the end at a loss that is not finite."""

import math
import threading
from pathlib import Path

from assay.optimizers.finetuning.sft import LossMonitor
from assay.reports.training_log import TrainingLog, read_training_log


def monitor_of(*held_out: float, folder: Path | None = None) -> LossMonitor:
    """A monitor that has seen a training loss at each of these evaluations' steps, which are 0, 1, 2, …"""
    log = None if folder is None else TrainingLog(folder)
    monitor = LossMonitor(loss={}, held_out={}, stop=threading.Event(), advance=lambda steps: None, log=log)
    for step, value in enumerate(held_out):
        if step:
            monitor.record({"step": step, "loss": 1 / step})
        monitor.record({"step": step, "eval_loss": value})
    return monitor


def test_a_falling_loss_raises_no_alarm(tmp_path: Path) -> None:
    monitor = monitor_of(2.0, 1.5, 1.6, 1.4, folder=tmp_path)
    assert (monitor.alarms, monitor.diverged) == ({}, False)
    progress = read_training_log(tmp_path)
    assert progress is not None
    assert progress.curves == {"loss/held_out": monitor.held_out, "loss/training": monitor.loss}
    assert progress.step == 3


def test_rows_learned_by_heart_raise_an_alarm_once() -> None:
    monitor = monitor_of(2.0, 1.5, 1.6, 1.7, 1.8)
    assert list(monitor.alarms) == ["overfitting"]
    assert monitor.alarms["overfitting"].startswith("step 3: the held-out loss rose from 1.500 at step 1 to 1.700")


def test_a_training_that_is_never_better_raises_an_alarm(tmp_path: Path) -> None:
    monitor = monitor_of(2.0, 2.1, 2.2, folder=tmp_path)
    assert list(monitor.alarms) == ["no_better"]
    progress = read_training_log(tmp_path)
    assert progress is not None
    assert progress.alarms == monitor.alarms
    assert monitor_of(2.0, 2.1).alarms == {}


def test_a_loss_that_is_not_finite_ends_training_and_is_in_no_curve() -> None:
    monitor = monitor_of(2.0, 1.5)
    monitor.record({"step": 2, "loss": math.nan})
    assert monitor.diverged
    assert monitor.loss == {1: 1.0}
