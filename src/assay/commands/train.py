"""`assay train rl`: weights from rollouts of a program, or from an export of transitions."""

import os
import subprocess
import sys
from typing import Annotated, Any, ClassVar

from assay.commands.groups import InStore, JobOutput, Reported, Trusting, WithPage
from assay.errors import ConfigError
from assay.jobs.rl_settings import RLSettings, is_export
from assay.optimizers.finetuning.report import PolicyReport
from assay.support.options import Flag, function_of


class TrainingOutput(WithPage, JobOutput):
    """Output."""

    accelerate_config: Annotated[str | None, Flag(metavar="FILE")] = None
    """Config file of accelerate; training runs in the processes that it describes."""

    @property
    def speaks(self) -> bool:
        """Of processes that train together, the first one does."""
        return os.environ.get("RANK", "0") == "0"

    def begin(self, stdout: Any) -> None:
        """Restarts the command in the processes of an accelerate config."""
        if self.accelerate_config is None:
            return
        if not os.path.exists(self.accelerate_config):
            raise ConfigError(f"{self.accelerate_config} does not exist", field="accelerate_config")
        at = next(place for place, word in enumerate(sys.argv) if word.startswith("--accelerate-config"))
        arguments = [*sys.argv[1:at], *sys.argv[at + (1 if "=" in sys.argv[at] else 2) :]]
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1)))
        launcher = [
            sys.executable, "-m", "accelerate.commands.launch", "--config_file", self.accelerate_config,
            "--num_cpu_threads_per_process", threads, "-m", "assay",
        ]  # fmt: skip
        raise SystemExit(subprocess.run([*launcher, *arguments], check=False, stdout=stdout).returncode)


class TrainRL(Reported, Trusting, InStore, RLSettings):
    """Train an adapter by reward: by policy gradient on rollouts of PROGRAM, or on an export of transitions.

    Trains on `train`, evaluates on `val`, and compares old and new weights on the sealed `test`, greedy and sampled.
    The adapter is served as MODEL+NAME. With a curriculum, steps take train tasks of its stages, and evaluations val
    tasks of the current stage. An export brings its tasks and rewards: no program runs, and importance ratios are
    relative to the weights that made the calls.

    Raises:
        AssayError: what was wrong, which rule, what to do.
        Cancelled: a signal came; call again with `resume`.
    """

    OUTPUT: ClassVar[Any] = TrainingOutput

    def run(self) -> PolicyReport:
        from assay.jobs.policy_training import train_on_export, train_on_rollouts

        run = train_on_export if is_export(self.program) else train_on_rollouts
        return run(self, store=self.store, progress=self.reporter)


train = function_of(TrainRL, "train")
