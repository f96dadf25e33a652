"""Agents that were written with anything, as programs whose model is behind a gateway.

Their runs are recorded, scored and credited like those of any program. A `ForeignAgent` has no prompts; those of a
`TextAgent` are texts of the agent, which the gateway replaces in its requests.
"""

import inspect
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import dspy

from assay.errors import ConfigError, ProgramError
from assay.models.limits import OverTime, given_up
from assay.models.lm import LanguageModel
from assay.programs.runners import AgentRunner, AgentTask, RemoteRunner, RunnerLost, runner_of
from assay.programs.texts import LEAST_CHARACTERS, TextFiles
from assay.programs.wrapping import as_prediction
from assay.support.numbers import counted
from assay.support.placeholders import outer_of, placeholders_in, with_added
from assay.support.scrubbing import error_text
from assay.support.values import value_text
from assay.traces import Rollout
from assay.traces.places import current_rollout

if TYPE_CHECKING:
    from assay.traces.gateway.agents import AgentGateway, OpenedRollout
    from assay.traces.gateway.texts import NewText, TextSwap


class ForeignAgent(dspy.Module):  # type: ignore[misc]
    """A program that runs an agent on each task, with a base URL at which the program's model answers.

    Args:
        name: how the agent was named; the program's name in rollouts.
        runner: runs it; by default the one of its name.
        trains: its model is in training, and samples as the training does.

    Attributes:
        files: of its texts, if they are read from files.
        marker: of a line that is added to each text, with its name, while it is tried whether they reach the model.
        learned: roles of the requests in which each text was found while `TextAgent.roles` were not known.
        places: of one request in which each text was found then, at most.
    """

    def __init__(self, name: str, runner: AgentRunner | None = None, *, trains: bool = False) -> None:
        super().__init__()
        self.name, self._runner, self._trains = name, runner, trains
        self.gateway: AgentGateway | None = None  # set while something is run
        self.counts, self.other_models = Counter[str](), set[str]()
        self.files: TextFiles | None = None
        self.marker = ""
        self.learned: dict[str, set[str]] = defaultdict(set)
        self.places = Counter[str]()
        self.reached = threading.Event()  # the agent has called the model once

    def __deepcopy__(self, memo: object) -> "ForeignAgent":
        return self  # one agent, of which the runs are counted

    @property
    def runner(self) -> AgentRunner:
        """What runs it. An agent of an artifact is looked up here, when it is run."""
        if self._runner is None:
            self._runner = runner_of(self.name)
        return self._runner

    def forward(self, **inputs: Any) -> Any:
        return self.run(inputs)

    def run(
        self,
        inputs: Mapping[str, Any],
        swap: "TextSwap | None" = None,
        *,
        texts: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
    ) -> Any:
        """The agent's answer to a task, in the open rollout.

        Args:
            swap: texts that are replaced in its requests.
            texts, files: as of `AgentTask`.
        Raises:
            AgentFailed: the agent gave no answer.
            RunnerLost: the process that ran it is gone.
            ConfigError: its first run shows that it never calls the model.
        """
        from assay.traces.gateway.agents import ModelUpstream
        from assay.traces.gateway.policy import PolicyUpstream

        lm, rollout = dspy.settings.lm, current_rollout()
        if self.gateway is None or rollout is None or not isinstance(lm, LanguageModel):
            raise ProgramError(
                f"{self.name!r} is an agent of another program, which runs in a job alone: use assay.evaluate, "
                "assay.compile or assay.train"
            )
        kind = PolicyUpstream if self._trains else ModelUpstream
        upstream = kind(lm, rollout.sample, accepts=self.gateway.accepts, texts=swap)
        with self.gateway.opened(rollout, upstream) as opened:
            task = AgentTask(
                id=rollout.task_id, rollout=rollout.id, inputs=dict(inputs), model=lm.model,
                base_url=opened.base_url, api_key=opened.api_key, texts=None if texts is None else dict(texts),
                files=files,
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
                f"the agent {self.name!r} asked for the model {asked}, and the one that answers is "
                f"{opened.upstream.name!r}. Let it read the name from ASSAY_MODEL (in a callable: task['model']), or "
                f"set `agent_model` to that name"
            )
        if not failed and not rollout.transitions:
            raise ConfigError(
                f"the agent {self.name!r} answered its first task without calling the model at its base URL "
                f"({opened.upstream.name} at {self.gateway.address if self.gateway else ''}/v1), so nothing of its "
                "work is seen. Let its client read OPENAI_BASE_URL and OPENAI_API_KEY (in a callable: "
                "task['base_url'] and task['api_key']), and set no address in the agent"
            )

    def notes(self) -> list[str]:
        """What happened to its runs, for a report."""
        late = self.gateway.late_calls if self.gateway is not None else 0
        unused = self._runner.leases.late_results if isinstance(self._runner, RemoteRunner) else 0
        asked = ", ".join(map(repr, sorted(self.other_models)[:3]))
        runs = self.counts["runs with texts"]
        lines = {
            f"{counted(self.counts['other model'], 'runs')} asked for another model, which is refused: {asked}": (
                self.counts["other model"]
            ),
            f"{counted(self.counts['lost'], 'runs')} lost the process that ran the agent": self.counts["lost"],
            f"{counted(self.counts['given up'], 'runs')} of the agent took too long and ended": self.counts["given up"],
            f"{counted(unused, 'results')} of runners came after the task had ended, which is refused": unused,
            f"{counted(late, 'calls')} of the agent came after the run had ended, which is refused": late,
            f"none of its texts was in the requests of {self.counts['without texts']} of {runs} runs: those runs say "
            "nothing about them": self.counts["without texts"],
        }
        return [line for line, count in lines.items() if count]


class TextAgent(dspy.Module):  # type: ignore[misc]
    """An agent with its texts as prompts: one `dspy.Predict` a text, which is never called.

    The instructions of a predictor are the text; its demonstrations are successful runs, added to the text as a section
    "Examples".

    Args:
        agent: the name of the agent, as for `runner_of`.
        texts: of the agent: `name`, `text` as its file has it, and `is_value` as in `AgentText`.
        delivery: how the agent gets new texts. `gateway`: they are replaced in its requests; `copy`: it is a command
            and runs in a copy of the working directory with them; `task`: it reads them from its task.
        most_tokens: of a text, see `assay.optimizers.prompts.proposals.InstructionCheck.limit_of`.
        roles: of the messages in which each text may be replaced, see `assay.traces.gateway.texts`; None: in all.
        runner: as of `ForeignAgent`.
    """

    def __init__(
        self,
        agent: str,
        texts: Sequence[Mapping[str, Any]],
        delivery: str = "gateway",
        most_tokens: int = 2000,
        roles: Mapping[str, Sequence[str]] | None = None,
        runner: AgentRunner | None = None,
    ) -> None:
        super().__init__()
        self.agent, self.texts, self.delivery, self.roles = agent, [dict(text) for text in texts], delivery, roles
        self.most_tokens = most_tokens
        self.host = ForeignAgent(agent, runner)
        for text in self.texts:
            if hasattr(self, text["name"]):
                hint = f"Give it as ./{text['name']}"
                raise ConfigError(f"{text['name']!r} is a name that programs use themselves", field="text", hint=hint)
            setattr(self, text["name"], dspy.Predict(dspy.Signature("task -> answer", text["text"])))

    @property
    def shows_examples(self) -> str:
        """The name of the text that examples are added to: the first one that is not a value of JSON or YAML; "" if
        there is none."""
        return next((text["name"] for text in self.texts if not text["is_value"]), "")

    def forward(self, **inputs: Any) -> dspy.Prediction:
        from assay.traces.gateway.texts import TextSwap

        swap = TextSwap(self._watched(), None) if self._is_read else self.swap()
        output: dict[str, Any] = {}
        try:
            prediction = as_prediction(self.host.run(inputs, swap, **self._read()))
            output = dict(prediction.items())
            return prediction
        except Exception as error:
            output = {"answer": "", "error": error_text(error)}
            raise
        finally:
            self._note(inputs, output, swap)

    def _note(self, inputs: Mapping[str, Any], output: Mapping[str, Any], swap: "TextSwap") -> None:
        """Writes the run into DSPy's trace, for each text that was in its requests: optimizers learn from it."""
        rollout, trace = current_rollout(), dspy.settings.trace
        if rollout is None or not rollout.transitions:
            return
        self.host.counts["runs with texts"] += 1
        self.host.counts["without texts"] += not swap.seen
        for name, roles in swap.seen.items() if self.roles is None and (self.host.marker or not self._is_read) else ():
            self.host.learned[name] |= roles
            self.host.places |= swap.places
        tools = [tool for call in rollout.transitions for tool in call.tools]
        called = [f"{tool.name}({value_text(tool.arguments)}): {tool.result or tool.error or ''}" for tool in tools]
        shown = {**output, **({"tool_calls": "\n".join(called)} if called else {})}
        for name, predictor in self.named_predictors() if trace is not None else ():
            if name in swap.seen:
                trace.append((predictor, dict(inputs), dspy.Prediction(**shown)))

    @property
    def _is_read(self) -> bool:
        """Whether the agent reads the new texts itself."""
        return self.delivery != "gateway"

    def swap(self) -> "TextSwap":
        """Replaces the texts in the requests of one rollout."""
        from assay.traces.gateway.texts import TextSwap

        roles = None if self.roles is None else {name: frozenset(known) for name, known in self.roles.items()}
        return TextSwap(self.new_texts(), roles)

    def _read(self) -> dict[str, Any]:
        """What an agent that reads its texts itself gets, as arguments of `ForeignAgent.run`."""
        if not self._is_read:
            return {}
        marked = {name: "\n\n".join([text, *self._marker_of(name)]) for name, text in self._now()}
        if self.delivery == "task":
            return {"texts": marked}
        if self.host.files is None:
            raise ConfigError(
                f"the files of {self.agent!r} were read by another process: compile it here, or use delivery gateway"
            )
        changed = self.host.files.with_texts(marked)
        return {"files": {str(file.path): file.after.decode("utf-8") for file in changed}}

    def _now(self) -> list[tuple[str, str]]:
        """The present texts with their examples, by name."""
        return [(name, with_added(text, self.examples_of(name))) for name, (_, text) in self.changes().items()]

    def _marker_of(self, name: str) -> list[str]:
        """The line that shows whether a text of that name reaches the model, while that is tried."""
        return [f"{self.host.marker} ({name})"] if self.host.marker else []

    def _watched(self) -> "list[NewText]":
        """The lines by which a text that the agent reads itself is recognised: the marker, else those that are new."""
        from assay.traces.gateway.texts import NewText

        watched = []
        for (name, (own, _)), (_, now) in zip(self.changes().items(), self._now(), strict=True):
            lines = [line.strip() for line in now.splitlines() if len(line.strip()) >= LEAST_CHARACTERS]
            lines = [line for line in lines if line not in own] or lines
            for line in self._marker_of(name) or lines:
                watched.append(NewText(name=name, before=line, after=line))
        return watched

    def new_texts(self) -> "list[NewText]":
        """The texts as the agent is to send them."""
        from assay.traces.gateway.texts import NewText

        return [
            NewText(name=name, before=own, after=text, examples=self.examples_of(name))
            for name, (own, text) in self.changes().items()
        ]

    def changes(self) -> dict[str, tuple[str, str]]:
        """The agent's own text and the present one, without examples, by name."""
        changes = {}
        for text in self.texts:
            own, now = text["text"], getattr(self, text["name"]).signature.instructions
            changes[text["name"]] = own, own if now == inspect.cleandoc(own) else now  # DSPy changes indentation
        return changes

    def examples_of(self, name: str) -> str:
        """The section with examples that is added to a text; empty without any. A template gets no example with a
        brace or a placeholder, which it would read as its own."""
        predictor = getattr(self, name)
        template, examples = predictor.signature.instructions, [example_text(demo) for demo in predictor.demos]
        if placeholders_in(template):
            examples = [text for text in examples if not placeholders_in(text) and not {"{", "}"} & set(text)]
        return "\n\n".join(["", "## Examples", *examples, *([""] if outer_of(template)[1] else [])]) if examples else ""

    def whole_texts(self) -> dict[str, str]:
        """The texts that are not the agent's own, with their examples, by name."""
        return {name: text for name, text in self._now() if text != self.changes()[name][0]}


def example_text(demo: Mapping[str, Any]) -> str:
    """A successful run as an example: its inputs, its tool calls and its answer, one a line."""
    fields = {name: value for name, value in dict(demo).items() if name not in ("augmented", "tool_calls")}
    calls = str(dict(demo).get("tool_calls") or "")
    lines = [f"{name}: {value_text(value)}" for name, value in fields.items()]
    if calls:
        lines.insert(-1, f"tool calls:\n{calls}")
    return "\n".join(["<example>", *lines, "</example>"])


def foreign_agent_in(program: Any) -> ForeignAgent | None:
    """The agent that a program runs; None for any other program."""
    if isinstance(program, TextAgent):
        return program.host
    return program if isinstance(program, ForeignAgent) else None
