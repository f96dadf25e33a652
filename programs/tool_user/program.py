"""The shipped program `tool_user`: an agent over several tools, given by the task or by the program.

Each step decides which tools to call, writes the arguments of each call, and executes the calls. What a tool returns or
raises is an observation for the next step.
"""

import contextvars
import copy
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Literal, Unpack

import dspy
from dspy.utils.exceptions import AdapterParseError

from assay.errors import FailureKind, ProgramError
from assay.models.calls import stop_in
from assay.models.loops import ToolLoopDetector
from assay.programs.agent import Agent, AgentSettings
from assay.programs.mcp_servers import McpServer
from assay.programs.tool_agent import ToolAgent
from assay.programs.toolbox import (
    OfferedTool,
    arguments_type,
    checked_arguments,
    cut,
    details,
    function_tool,
    listing,
    names_type,
    schema_tool,
    with_labels,
)
from assay.support.scrubbing import error_text
from assay.traces.recorder import note_failure

_ANSWER = "answer"
_AT_ONCE = 8  # calls of one step
_ERROR = 500  # characters of an error in `calls` and in prompts


class ToolUser(ToolAgent):
    """Calls tools of a task or of the program, several in one step if they are independent, and answers.

    The output fields are `answer` (text) and `calls`: a list of `{name, arguments, result, error}`. A tool of a task
    is a JSON schema without code: its calls are not executed, `result` is None, and the calls are the answer. Tools
    whose schema has a `simulation` (see `assay.programs.toolbox.simulated_result`) return the results that it lists.

    Args:
        tools: Python functions or `dspy.Tool`s.
        servers: MCP servers, started when their tools are first needed.
        parallel: whether a step may have several calls.
    """

    input_names: ClassVar[tuple[str, ...]] = ("question", "tools")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "input_names" not in vars(cls):  # a subclass has tools of its own
            cls.input_names = ("question",)

    def __init__(
        self,
        tools: Sequence[Any] = (),
        servers: Sequence[McpServer] = (),
        *,
        parallel: bool = True,
        **agent: Unpack[AgentSettings],
    ) -> None:
        Agent.__init__(self, **agent)
        _check_lists(tools, servers)
        self.config = {} if parallel else {"parallel": False}
        if type(self) is ToolUser:  # names are refused, so that no artifact runs without its tools, or names code
            self.config |= {"tools": [str(getattr(tool, "__name__", tool)) for tool in tools]} if tools else {}
            self.config |= {"servers": [str(server) for server in servers]} if servers else {}
        self.parallel, self.servers = parallel, list(servers)
        self.functions = [function_tool(tool) for tool in tools]
        self.tools: dict[str, OfferedTool] = with_labels(self.functions, _ANSWER)
        if tools or servers:
            self.input_names = ("question",)  # type: ignore[misc]
        self.inputs, self.outputs = ["question"], [_ANSWER]
        self._add_predictors()

    def _add_predictors(self) -> None:
        question = {"question": (str, dspy.InputField())}
        results = {"results": (str, dspy.InputField(desc="the calls so far and what the tools have returned"))}
        offered = {"tools": (str, dspy.InputField(desc="the tools that can be called"))}
        decision: dict[str, Any] = {
            "thought": (str, dspy.OutputField(max_length=64)),
            "action": (str, dspy.OutputField(desc="the tool to call next, or answer")),
        }
        if self.parallel:
            decision["also"] = (list[str], dspy.OutputField(desc="further tools to call at once, one entry per call"))
        self.decide = dspy.Predict(
            dspy.Signature(
                {**question, **offered, **results, **decision},
                "Choose the next action for the question: a tool that is needed for it, or answer if no tool is needed "
                "or the results are enough.",
            )
        )
        self.write = dspy.Predict(
            dspy.Signature(
                {
                    **question,
                    "tool": (str, dspy.InputField(desc="the tool and its parameters")),
                    **results,
                    "arguments": (dict[str, Any], dspy.OutputField()),
                },
                "Write the arguments of the next call of the tool. Take the values from the question and the results.",
            )
        )
        answer = {_ANSWER: (str, dspy.OutputField(max_length=1000))}
        self.respond = dspy.Predict(
            dspy.Signature({**question, **results, **answer}, "Answer the question from the results.")
        )
        draft = {"draft": (str, dspy.InputField(desc="a first answer"))}
        self.review = dspy.Predict(
            dspy.Signature(
                {**question, **results, **draft, **answer}, "Check the draft against the results and correct it."
            )
        )

    def solve(self, **inputs: Any) -> dspy.Prediction:
        run = copy.copy(self)  # the tools depend on the task, and tasks run at the same time
        run.tools, problem = self._offered(inputs.get("tools"))
        return run._solve({"question": inputs.get("question", "")}, problem)

    def _offered(self, listed: Any) -> tuple[dict[str, OfferedTool], str]:
        """The tools of a run by label, and why tools are missing. The task may name tools of the program."""
        own, problems = [*self.functions, *(tool for server in self.servers for tool in server.tools())], list[str]()
        if isinstance(listed, str):
            try:
                listed = json.loads(listed)
            except (ValueError, RecursionError):
                problems.append(f"the task's tools are not JSON: {listed[:100]!r}")
        if not isinstance(listed, list | tuple) or (own and not listed):
            return with_labels(own, _ANSWER), "; ".join(problems)
        by_name = {tool.name: tool for tool in own}
        chosen = []
        for entry in listed:
            try:
                known = by_name.get(entry) if isinstance(entry, str) else None
                chosen.append(known or schema_tool(entry))
            except ValueError as error:
                problems.append(str(error))
        return with_labels(chosen, _ANSWER), "; ".join(problems)

    def _solve(self, inputs: dict[str, Any], problem: str) -> dspy.Prediction:
        observations = [f"error: {problem}"] if problem else []
        steps: list[dict[str, Any]] = []
        loops = ToolLoopDetector()
        tool_inputs = {"tools": listing(list(self.tools.values()), 2 * self.agent_parameters.context_length)}
        for _ in range(self.agent_parameters.max_steps - 1 if self.tools else 0):
            self._also: list[str] = []
            name = self._choose({**inputs, **tool_inputs}, observations, steps)
            if name == _ANSWER:
                break
            called = [name, *self._also][: _AT_ONCE if self.parallel else 1]
            calls, repeated = self._step(called, inputs, observations, steps)
            steps += calls
            observations += [self._observation(call) for call in calls]
            for call in calls:
                result = call["result"] if call["error"] is None else call["error"]
                repeated |= loops.add(call["tool"], call["arguments"], result) is not None
            if repeated:
                note_failure(FailureKind.LOOP)
                break
        else:
            if self.tools:
                self._demonstrate({**inputs, **tool_inputs}, observations, _ANSWER)
        calls = [{name: value for name, value in step.items() if name != "tool"} for step in steps]
        if steps and all(self.tools[step["tool"]].run is None for step in steps):
            return dspy.Prediction(answer="\n".join(map(call_text, calls)), calls=calls)
        return dspy.Prediction(**self._answer(inputs, observations), calls=calls)

    def decision_signature(self) -> Any:
        choices = Literal[(*self.tools, _ANSWER)]  # type: ignore[valid-type]
        signature = self.decide.signature.with_updated_fields("action", type_=choices)
        if not self.parallel:
            return signature
        return signature.with_updated_fields("also", type_=names_type(list(self.tools), _AT_ONCE - 1))

    def _ask(
        self, predictor: dspy.Predict, signature: Any, inputs: dict[str, Any], observations: list[str], **config: Any
    ) -> Any:
        result = super()._ask(predictor, signature, inputs, observations, **config)
        if predictor is self.decide and self.parallel:
            also = result.get("also")
            self._also = [name for name in also if name in self.tools] if isinstance(also, list) else []
        return result

    def _choose(self, inputs: dict[str, Any], observations: list[str], steps: list[dict[str, Any]]) -> str:
        name = super()._choose(inputs, observations, steps)
        if name == _ANSWER:
            self._also = []
        return name

    def _step(
        self, names: list[str], inputs: dict[str, Any], observations: list[str], steps: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], bool]:
        """The calls of one step, executed, and whether a call that is only recorded repeats one of an earlier step.

        A call that repeats another one of its step ends the step: small models list a tool more often than they have
        calls for it.
        """
        written: list[dict[str, Any]] = []
        repeated = False
        for name in names:
            pending = [f"{call_text(call)}: called" for call in written]
            call = self._written(name, inputs, [*observations, *pending])
            if _is_among(call, written):
                break
            if self.tools[name].run is None and _is_among(call, steps):
                repeated = True  # the calls are the answer, which has each of them once
            else:
                written.append(call)
        return self._executed(written), repeated

    def _written(self, name: str, inputs: dict[str, Any], observations: list[str]) -> dict[str, Any]:
        """A call with the arguments that the model wrote; `error` says what is wrong with them."""
        tool = self.tools[name]
        call: dict[str, Any] = {"tool": name, "name": tool.name, "arguments": {}, "result": None, "error": None}
        signature = self.write.signature.with_updated_fields("arguments", type_=arguments_type(tool.parameters))
        text = details(tool, 2 * self.agent_parameters.context_length)
        try:
            written = self._ask(self.write, signature, {**inputs, "tool": text}, observations)
        except AdapterParseError as error:
            return {**call, "error": f"the arguments could not be parsed: {str(error.lm_response)[:200]!r}"}
        arguments, problem = checked_arguments(tool.parameters, written.arguments)
        arguments = self.clean_arguments(tool.name, arguments)
        written._store["arguments"] = arguments  # as with decisions, the trace has what was executed
        return {**call, "arguments": arguments, "error": problem}

    def _executed(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Executes the calls of one step; those of MCP servers at the same time."""
        at_once = [call for call in calls if call["error"] is None and self.tools[call["tool"]].concurrent]
        if len(at_once) < 2:
            return [self._execute(call) for call in calls]
        with ThreadPoolExecutor(len(at_once), thread_name_prefix="assay-tools") as pool:
            running = {id(call): pool.submit(contextvars.copy_context().run, self._execute, call) for call in at_once}
            return [running[id(call)].result() if id(call) in running else self._execute(call) for call in calls]

    def _execute(self, call: dict[str, Any]) -> dict[str, Any]:
        if call["error"] is not None:
            return call
        try:
            return {**call, "result": self.tools[call["tool"]].call(call["arguments"])}
        except (Exception, SystemExit, GeneratorExit) as error:  # a tool's failure is an observation for the agent
            if (stop := stop_in(error)) is not None:
                raise stop from error
            return {**call, "error": cut(error_text(error), _ERROR)}

    def _observation(self, step: Mapping[str, Any]) -> str:
        if step["error"] is not None:
            return f"{call_text(step)}: error: {step['error']}"
        if step["result"] is None:
            return f"{call_text(step)}: called"
        # at four characters per token, half of the context is left for the rest of the prompt
        return f"{call_text(step)} = {cut(step['result'], 2 * self.agent_parameters.context_length)}"


def _check_lists(tools: Any, servers: Any) -> None:
    """Refuses arguments of `ToolUser` that are not lists of functions and of servers, with what to write."""
    for name, values, members in (("tools", tools, "functions"), ("servers", servers, "McpServer objects")):
        if not isinstance(values, list | tuple):
            one = "" if values is None or isinstance(values, str | Mapping) else f"; write {name}=[{values!r}]"
            raise ProgramError(f"{name}={values!r} must be a list of {members}{one}")
    if named := [tool for tool in (*tools, *servers) if isinstance(tool, str)]:
        raise ProgramError(
            f"the tools {named} are only names: an artifact cannot contain functions and servers. "
            "Write a subclass of ToolUser in a file, whose __init__ passes them, and use file.py:NAME"
        )
    if other := [server for server in servers if not isinstance(server, McpServer)]:
        way = f"McpServer({other[0]!r})" if isinstance(other[0], list | tuple) else "McpServer(['python', 'server.py'])"
        raise ProgramError(f"servers has a {type(other[0]).__name__}: {other[0]!r}; a server is {way}")


def _is_among(call: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> bool:
    return any(call["tool"] == other["tool"] and call["arguments"] == other["arguments"] for other in others)


def call_text(call: Mapping[str, Any]) -> str:
    """A call as Python writes it: `area(base=10, unit="cm")`."""
    arguments = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call["arguments"].items()]
    return f"{call['name']}({', '.join(arguments)})"
