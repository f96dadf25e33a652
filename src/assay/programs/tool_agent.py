"""`ToolAgent`, an agent that calls tools, on which all five parameters have an effect.

There is one predictor per decision: the next action, a tool's arguments, the answer, the review. A small model can
follow each of these, but not one prompt that combines them.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack

import dspy

from assay.errors import FailureKind, ProgramError
from assay.models import supports
from assay.models.loops import ToolLoopDetector
from assay.models.scope import alternatives_of
from assay.programs.agent import WRITTEN_DECISIONS, Agent, AgentSettings
from assay.programs.estimate import choice_odds, has_probabilities, narrowed_signature
from assay.programs.thinking import margin_of
from assay.support.values import value_text
from assay.traces.recorder import note_failure

_ANSWER = "answer"


class ToolAgent(Agent):
    """Chooses actions, calls tools with arguments constrained to a schema, and answers from the results.

    Args:
        signature: the task, `inputs -> outputs`.
        tools: functions or `dspy.Tool`s with typed arguments.
        arguments: tool -> argument -> (type, DSPy field).
    """

    def __init__(
        self,
        signature: Any,
        tools: Sequence[Any],
        *,
        arguments: Mapping[str, Mapping[str, tuple[Any, Any]]],
        **agent: Unpack[AgentSettings],
    ) -> None:
        super().__init__(**agent)
        self.tools = {tool.name: tool for tool in (t if isinstance(t, dspy.Tool) else dspy.Tool(t) for t in tools)}
        if not self.tools or _ANSWER in self.tools:
            raise ProgramError(f"a tool agent needs tools, none of them named {_ANSWER!r}; got {sorted(self.tools)}")
        task = dspy.Signature(signature) if isinstance(signature, str) else signature
        self.task_signature = task
        self.inputs, self.outputs = list(task.input_fields), list(task.output_fields)
        fields = {name: (field.annotation, dspy.InputField()) for name, field in task.input_fields.items()}
        context = {**fields, "results": (str, dspy.InputField(desc="what the tools have returned so far"))}
        answer = {name: (field.annotation, field) for name, field in task.output_fields.items()}
        names = list(self.tools)
        choices = Literal[(*names, _ANSWER)]  # type: ignore[valid-type]
        decision = {"thought": (str, dspy.OutputField(max_length=64)), "action": (choices, dspy.OutputField())}
        descriptions = "; ".join(f"{name}: {tool.desc}" for name, tool in self.tools.items())
        self.decide = dspy.Predict(
            dspy.Signature(
                {**context, **decision},
                f"Choose the next action for the question. {descriptions} answer: give the final answer.",
            )
        )
        self.use = {
            name: dspy.Predict(
                dspy.Signature(
                    {**context, **arguments[name]}, f"Write the next call of {name}. {self.tools[name].desc}"
                )
            )
            for name in names
        }
        self.respond = dspy.Predict(
            dspy.Signature({**context, **answer}, f"{task.instructions} Answer from the results.")
        )
        draft = {"draft": (str, dspy.InputField(desc="a first answer"))}
        self.review = dspy.Predict(
            dspy.Signature({**context, **draft, **answer}, "Check the draft against the results and correct it.")
        )

    def solve(self, **inputs: Any) -> dspy.Prediction:
        observations: list[str] = []
        steps: list[dict[str, Any]] = []
        loops = ToolLoopDetector()
        for _ in range(self.agent_parameters.max_steps - 1):
            name = self._choose(inputs, observations, steps)
            if name == _ANSWER:
                break
            step = self._call(name, inputs, observations)
            steps.append(step)
            observations.append(self._observation(step))
            result = step["result"] if step["error"] is None else step["error"]
            if loops.add(step["tool"], step["arguments"], result) is not None:
                note_failure(FailureKind.LOOP)
                break
        else:
            self._demonstrate(inputs, observations, _ANSWER)
        return dspy.Prediction(**self._answer(inputs, observations), steps=steps)

    def _answer(self, inputs: dict[str, Any], observations: list[str]) -> dict[str, Any]:
        """The output fields, reviewed if the depth requires it."""

        def written(predictor: dspy.Predict, given: dict[str, Any]) -> dict[str, Any]:
            prediction = self._ask(predictor, predictor.signature, given, observations)
            return {name: prediction[name] for name in self.outputs}

        def review(answer: dict[str, Any]) -> dict[str, Any]:
            return written(self.review, {**inputs, "draft": "; ".join(map(value_text, answer.values()))})

        return self.reviewed(written(self.respond, inputs), review)

    def decision_signature(self) -> Any:
        """Signature of the decision. Subclasses whose tools depend on the task restrict its actions to these tools."""
        return self.decide.signature

    def _ask(
        self, predictor: dspy.Predict, signature: Any, inputs: dict[str, Any], observations: list[str], **config: Any
    ) -> Any:
        filled = self.fit_context(predictor, signature, inputs, observations, "results")
        return predictor(signature=signature, config=config, **filled)

    def _choose(self, inputs: dict[str, Any], observations: list[str], steps: list[dict[str, Any]]) -> str:
        """Returns the next action: a tool if its estimated need reaches the threshold, otherwise the answer.

        After a successful tool call, the threshold is at least 0.5, so that the agent can finish.
        """
        threshold, answered = self.agent_parameters.tool_usage_threshold, any(step["error"] is None for step in steps)
        names = list(self.tools)
        if threshold == 0 and not answered and len(names) == 1:
            self._demonstrate(inputs, observations, names[0])
            return names[0]
        written = bool(dspy.settings.get(WRITTEN_DECISIONS))
        reads = not written and supports(dspy.settings.lm, "top_logprobs")
        least = max(threshold, 0.5) if answered else threshold

        def ask(signature: Any, asked: dict[str, Any], options: dict[str, Any]) -> tuple[Any, str, float | None]:
            decision = self._ask(self.decide, signature, asked, observations, **options)
            if written:
                return decision, str(decision.action), None
            margin = None
            if reads:
                odds = self._odds(decision, [*names, _ANSWER], signature, asked, observations, options)
                need, favourite = 1 - odds[_ANSWER], max(names, key=odds.__getitem__)
                margin = margin_of(odds) if has_probabilities(decision) else None
            else:
                need, favourite = float(decision.need), decision.action if decision.action != _ANSWER else names[0]
            # the trace has the executed action, because demonstrations are created from it
            decision.action = favourite if need >= least else _ANSWER
            return decision, decision.action, margin

        signature = _decision(self.decision_signature(), stated=not (reads or written))
        tokens = self.thought_tokens
        return str(self.decided(ask, signature, inputs, tokens=tokens, field="action", reads=reads).choice)

    def _odds(
        self,
        decision: Any,
        choices: list[str],
        signature: Any,
        inputs: dict[str, Any],
        observations: list[str],
        config: dict[str, Any],
    ) -> dict[str, float]:
        """Probability of each action.

        If only the sum of a group of actions is known (their names begin alike and the model wrote another one), and
        the group could change the choice, a second request decides among the group.
        """
        result = choice_odds(decision, "action", choices)
        odds, tools = result.probabilities, [name for name in choices if name != _ANSWER]
        for group, probability in result.together:
            outside = [odds[name] for name in tools if name not in group]
            if len(group) < len(choices) and (_ANSWER in group or probability > max(outside, default=0.0)):
                among = [name for name in choices if name in group]
                narrowed = narrowed_signature(signature, tuple(among))
                # not traced, because demonstrations are created from the first decision
                with alternatives_of("action"), dspy.context(trace=[]):
                    second = self._ask(self.decide, narrowed, inputs, observations, **config)
                within = self._odds(second, among, narrowed, inputs, observations, config)
                odds |= {name: probability * within[name] for name in among}
        return odds

    def _demonstrate(self, inputs: dict[str, Any], observations: list[str], action: str) -> None:
        """Adds a decision that the parameters forced to the trace, as if the agent had made it."""
        if dspy.settings.trace is not None:
            thought = f"The result is {observations[-1].rpartition(' = ')[2]}." if observations else "No results yet."
            context = {**inputs, "results": "\n".join(observations)}
            dspy.settings.trace.append((self.decide, context, dspy.Prediction(thought=thought, action=action)))

    def _call(self, name: str, inputs: dict[str, Any], observations: list[str]) -> dict[str, Any]:
        predictor = self.use[name]
        written = self._ask(predictor, predictor.signature, inputs, observations)
        arguments = self.clean_arguments(name, {key: written[key] for key in predictor.signature.output_fields})
        written._store.update(arguments)  # as with decisions, the trace has what was executed
        try:
            return {"tool": name, "arguments": arguments, "result": str(self.tools[name](**arguments)), "error": None}
        except Exception as error:  # a tool's failure is an observation for the agent
            return {"tool": name, "arguments": arguments, "result": None, "error": str(error)}

    def clean_arguments(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a tool call from the model's output. Subclasses can remove unwanted parts."""
        return arguments

    def _observation(self, step: dict[str, Any]) -> str:
        values = ", ".join(str(value) for value in step["arguments"].values())
        call = values if len(self.tools) == 1 else f"{step['tool']}({values})"
        return f"{call} = {step['result']}" if step["error"] is None else f"{call}: error: {step['error']}"


@functools.lru_cache(maxsize=256)
def _decision(signature: Any, *, stated: bool) -> Any:
    """The decision without its thought, and with the field `need` if the engine gives no probabilities."""
    need = dspy.OutputField(desc="how likely a tool is needed, from 0 to 1", ge=0, le=1)
    decision = signature.delete("thought")
    return decision.append("need", need, float) if stated else decision
