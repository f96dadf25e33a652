"""`ForeignAgent`: an agent that was written with anything, as a program whose model is behind a gateway.

Its runs are recorded, scored and credited like those of any program. It has no prompts, so nothing can be compiled.
"""

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import dspy

from assay.errors import ConfigError, ProgramError
from assay.models.limits import OverTime, given_up
from assay.models.lm import LanguageModel
from assay.programs.runners import AgentRunner, AgentTask, RemoteRunner, RunnerLost
from assay.support.numbers import counted
from assay.traces import Rollout
from assay.traces.places import current_rollout

if TYPE_CHECKING:
    from assay.traces.gateway.policy import OpenedRollout, PolicyGateway


class ForeignAgent(dspy.Module):  # type: ignore[misc]
    """A program that runs an agent on each task, with a base URL at which the program's model answers.

    Args:
        name: how the agent was named; the program's name in rollouts.
    """

    def __init__(self, name: str, runner: AgentRunner) -> None:
        super().__init__()
        self.name, self.runner = name, runner
        self.gateway: PolicyGateway | None = None  # set while something is run
        self.counts, self.other_models = Counter[str](), set[str]()
        self.reached = threading.Event()  # the agent has called the model once

    def __deepcopy__(self, memo: object) -> "ForeignAgent":
        return self  # one agent, of which the runs are counted

    def forward(self, **inputs: Any) -> Any:
        lm, rollout = dspy.settings.lm, current_rollout()
        if self.gateway is None or rollout is None or not isinstance(lm, LanguageModel):
            raise ProgramError(f"{self.name!r} is an agent of another program: train it with assay.train(agent=…)")
        with self.gateway.opened(rollout, lm) as opened:
            task = AgentTask(
                id=rollout.task_id, rollout=rollout.id, inputs=inputs, model=lm.model,
                base_url=opened.base_url, api_key=opened.api_key,
            )  # fmt: skip
            try:
                answer = self._run(task, opened)
            except RunnerLost:
                self.counts["lost"] += 1
                raise
            except Exception:
                self._require_model(opened, rollout, failed=True)
                raise
            finally:
                if opened.upstream.other_models:
                    self.counts["other model"] += 1
                    self.other_models.update(opened.upstream.other_models)
        self._require_model(opened, rollout, failed=False)
        return answer

    def _run(self, task: AgentTask, opened: "OpenedRollout") -> Any:
        def check() -> None:
            if opened.upstream.stopped is not None:
                raise opened.upstream.stopped
            if (seconds := given_up()) is not None:
                self.counts["given up"] += 1
                raise OverTime("the agent", seconds, in_model_call=False)

        answer = self.runner.run(task, check)
        check()
        return answer

    def _require_model(self, opened: "OpenedRollout", rollout: Rollout, *, failed: bool) -> None:
        """Raises if the agent's first run shows that no run will ever be answered by the model."""
        if opened.upstream.answered:
            self.reached.set()
        if self.reached.is_set():
            return
        if opened.upstream.other_models:
            asked = ", ".join(map(repr, sorted(opened.upstream.other_models)))
            raise ConfigError(
                f"the agent {self.name!r} asked for the model {asked}, and the one in training is "
                f"{opened.upstream.name!r}. Let it read the name from ASSAY_MODEL (in a callable: task['model']), or "
                f"set `agent_model` to that name"
            )
        if not failed and not rollout.transitions:
            raise ConfigError(
                f"the agent {self.name!r} answered its first task without calling the model at its base URL "
                f"({opened.upstream.name} at {self.gateway.address if self.gateway else ''}/v1), so there is nothing "
                "to train on. Let its client read OPENAI_BASE_URL and OPENAI_API_KEY (in a callable: task['base_url'] "
                "and task['api_key']), and set no address in the agent"
            )

    def notes(self) -> list[str]:
        """What happened to its runs, for a report."""
        late = self.gateway.late_calls if self.gateway is not None else 0
        unused = self.runner.leases.late_results if isinstance(self.runner, RemoteRunner) else 0
        asked = ", ".join(map(repr, sorted(self.other_models)[:3]))
        lines = {
            f"{counted(self.counts['other model'], 'runs')} asked for another model, which is refused: {asked}": (
                self.counts["other model"]
            ),
            f"{counted(self.counts['lost'], 'runs')} lost the process that ran the agent": self.counts["lost"],
            f"{counted(self.counts['given up'], 'runs')} of the agent took too long and ended": self.counts["given up"],
            f"{counted(unused, 'results')} of runners came after the task had ended, which is refused": unused,
            f"{counted(late, 'calls')} of the agent came after the run had ended, which is refused": late,
        }
        return [line for line, count in lines.items() if count]
