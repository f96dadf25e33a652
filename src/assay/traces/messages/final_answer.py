"""Reads the final answer of a run from its LM calls. Used by the gateway, in-process recording and importers.

The answer is the text of the last LM call, or the arguments of the tool call that ended the run: a tool that the model
had to call, a tool with which agent libraries end runs, or, if the model may not answer with text, a tool that was not
called before. If the last LM call requests other tools only, the run has no answer. Does not score.
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.support.sections import (
    SUBMIT,
    adapter_readings,
    answer_fields,
    fields_in,
    format_of,
    nested_outputs,
    output_names,
)
from assay.support.values import json_text
from assay.traces.messages import gemini
from assay.traces.messages.dialects import Answer, Message, answer_of, chat_messages, chat_tools, part_texts
from assay.traces.messages.parts import each, object_of
from assay.traces.records import Transition

# -- The prompts of a program's run: which of them continue it. Does not import DSPy.


_FORM = re.compile(r"All interactions will be structured.*?(?=In adhering to this structure|\Z)", re.DOTALL)
_MODULE_FIELDS = re.compile(  # fields that DSPy's modules add to a task's inputs: ReAct, ProgramOfThought, retrieval
    r"trajectory|(?:thought|tool_name|tool_args|observation)_\d+|previous_code|final_generated_code|code_output|error"
    r"|context|passages"
)
_SYSTEM = ("system", "developer")
_LONG = 12  # minimum characters of a text that is recognised inside another one


def asked_outputs(messages: Sequence[Message]) -> tuple[str, ...]:
    """Names of the output fields that a prompt asks for; empty if no adapter of DSPy or assay wrote it."""
    return output_names(_system(messages))


def answered_fields(request: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    """Fields in the text of an answer; empty if no adapter of DSPy or assay wrote the request, or it has none."""
    messages = chat_messages(request)
    outputs, nested = asked_outputs(messages), nested_outputs(_system(messages))
    return answer_fields(answer.output, names=outputs, nested=nested) if outputs else {}


def sent_formats(calls: Sequence[Transition]) -> Counter[str]:
    """Prompt formats of recorded calls with their counts; calls that no adapter wrote are left out."""
    formats = Counter(format_of(_system(chat_messages(call.request))) for call in calls)
    del formats[""]
    return formats


def _system(messages: Sequence[Message]) -> str:
    return next((part_texts(m.get("content")) for m in messages if m.get("role") in _SYSTEM), "")


def arguments_of(answer: Answer) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments of each tool call of an answer."""
    return [(name, object_of(arguments)) for _, name, arguments in answer.tools]


def output_values(answer: Answer, outputs: Collection[str] = ()) -> list[tuple[str, str]]:
    """Names and values of the fields of an answer; empty if it has none.

    Args:
        outputs: names of the fields, see `asked_outputs`.
    """
    texts = {
        name: (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).strip()
        for name, value in answer_fields(answer.output, arguments_of(answer), outputs).items()
    }
    return [(name, text) for name, text in texts.items() if text not in ("", "{}", "[]", "null")]


@dataclass(frozen=True)
class Prompt:
    """A prompt of an adapter of DSPy or assay.

    Args:
        readings: Fields of the last message, by name; several where the format is ambiguous, the most likely first.
        signature: System message without the description of the output format.
    """

    readings: Sequence[Mapping[str, str]] = ()
    signature: str = ""

    @property
    def sections(self) -> Mapping[str, str]:
        """Fields of the last message as it was most likely written."""
        return self.readings[0] if self.readings else {}

    @classmethod
    def of(cls, messages: Sequence[Message]) -> "Prompt":
        """Parse messages. The result has no sections if no adapter wrote them."""
        if not messages or messages[-1].get("role") != "user":
            return cls()
        system = _system(messages)
        readings = adapter_readings(system, part_texts(messages[-1].get("content")))
        return cls(readings, _FORM.sub("", system)) if readings else cls()

    def follows(
        self, first: "Prompt", answers: Sequence[tuple[str, str]], latest: Sequence[tuple[str, str]]
    ) -> float | None:
        """Whether this is a later prompt of the program run that `first` started.

        It must have inputs of the first prompt, and otherwise only fields from earlier answers or fields that DSPy's
        modules add. Identical inputs belong to the same run only if the latest answer could not be parsed, because the
        adapter then retries in another format.

        Args:
            first: First prompt of the run.
            answers: Fields of all answers of the run.
            latest: Fields of the latest answer.
        Returns:
            Share of the latest answer's fields that are in this prompt, in [0, 1]; None if it is another run.
        """
        shares = [
            share
            for before in first.readings
            for sections in self.readings
            if (share := self._share(sections, before, first, answers, latest)) is not None
        ]
        return max(shares, default=None)

    def _share(
        self,
        sections: Mapping[str, str],
        before: Mapping[str, str],
        first: "Prompt",
        answers: Sequence[tuple[str, str]],
        latest: Sequence[tuple[str, str]],
    ) -> float | None:
        """`follows` for a reading of each prompt."""
        if not any(value and before.get(name) == value for name, value in sections.items()):
            return None
        more = {name: value for name, value in sections.items() if value and before.get(name) != value}
        if not more:
            return 0.0 if not latest and self.signature == first.signature else None
        continues = False
        for name, value in more.items():
            of_module = _MODULE_FIELDS.fullmatch(name) is not None
            if not (name in before or of_module or _in_answers(name, value, answers)):
                return None
            continues = continues or _in_answers(name, value, answers, within=of_module)
        if not continues:
            return None
        texts = "\n".join(more.values())
        return sum(value in texts for _, value in latest) / len(latest) if latest else 0.0


def _in_answers(name: str, value: str, answers: Sequence[tuple[str, str]], *, within: bool = False) -> bool:
    """Whether a field has text of an earlier answer: the field of the same name, or a text of at least `_LONG`
    characters.

    Args:
        within: Accept short texts of other fields too.
    """
    return any(
        (known == name and text == value) or (text in value and (within or len(text) >= _LONG))
        for known, text in answers
    )


# -- Requirements of a request on its answer, in any dialect: an output schema, or tools that must be called.


def output_schema(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """JSON schema that the answer must or should follow; None without one."""
    config = request.get("body") or request.get("config") or {}
    if not isinstance(config, Mapping):
        return None
    if request.get("dialect") == "gemini":
        return gemini.output_schema(config)
    nested = [part.get("format") for name in ("text", "output_config") for part in each([config.get(name)])]
    for output_format in each([config.get("response_format"), config.get("output_format"), *nested]):
        inner = output_format.get("json_schema")
        schema = (inner.get("schema") if isinstance(inner, Mapping) else None) or output_format.get("schema")
        return schema if isinstance(schema, dict) else None
    return None


def insisted_tool(request: Mapping[str, Any]) -> str | None:
    """Name of the only tool that the model must call, which clients use for typed answers; None if it may choose."""
    choice = _tool_choice(request)
    if not isinstance(choice, Mapping):
        return None
    function = choice.get("function", choice)
    names = [function.get("name")] if isinstance(function, Mapping) else []
    allowed = choice.get("allowed")  # DSPy's canonical form, and Gemini's
    if isinstance(allowed, list | tuple) and len(allowed) == 1 and choice.get("mode") == "required":
        names.append(allowed[0])
    return next((name for name in names if isinstance(name, str) and name), None)


def must_call(request: Mapping[str, Any]) -> bool:
    """Whether the model must answer with a tool call."""
    choice = _tool_choice(request)
    if not isinstance(choice, Mapping):
        return choice == "required"
    return choice.get("type") == "any" or choice.get("mode") == "required" or insisted_tool(request) is not None


def _tool_choice(request: Mapping[str, Any]) -> Any:
    body = request.get("body", request.get("config"))
    if request.get("dialect") == "gemini":
        return gemini.tool_choice(body) if isinstance(body, Mapping) else None
    choice = body.get("tool_choice") if isinstance(body, Mapping) else None
    inner = choice.get("allowed_tools") if isinstance(choice, Mapping) else None  # OpenAI's form of a restricted one
    return inner if isinstance(inner, Mapping) else choice


# -- Final answer.


NO_ANSWER = "the run ended without an answer: its last LM call asked for tools"
NOT_RECORDED = "the final answer was not recorded"
_FINAL = frozenset(
    {
        "final_result",  # pydantic-ai
        "final_answer",  # smolagents
        "submit",  # DSPy's ReActV2, Inspect
        "finish",
        "final_response",
        "final_output",
        "submit_answer",
        "submit_final_answer",
        "structured_output",
        "structuredoutput",
        "attempt_completion",
    }
)
_CODE = re.compile(
    r"(?:<code>|```(?:python|py)?\n)(.*?)(?:</code>|```|\Z)", re.DOTALL
)  # the end is missing if a stop sequence cut it off
_FINAL_OF_UNION = ("final_result_",)  # pydantic-ai has one tool per union member, such as `final_result_City`


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Args:
        value: The answer; None without one. A mapping of its fields if the prompt of an adapter named them.
        known: False if the answer was not recorded.
    """

    value: Any = None
    known: bool = True


def ends_run(tool: str) -> bool:
    """Whether agent libraries use a tool of this name to end a run."""
    name = tool.casefold().replace("-", "_")
    return name in _FINAL or name.startswith(_FINAL_OF_UNION)


def argument_value(arguments: Any) -> Any:
    """The answer in the arguments of a tool call: the value of the only field, else the arguments as JSON text."""
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments
    if isinstance(parsed, Mapping) and len(parsed) == 1:
        value = next(iter(parsed.values()))
        return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping | list) else value
    return arguments if isinstance(arguments, str) else json_text(parsed)


def prediction_of(answer: Any, field: str = "answer") -> dict[str, Any] | None:
    """Convert an answer to a prediction: its fields, else one field. None without an answer.

    Args:
        answer: the value of an `Ending`, or a text.
        field: Name of the field of an answer without fields.
    """
    if answer is None:
        return None
    if isinstance(answer, Mapping):
        return dict(answer)
    fields = fields_in(answer) if isinstance(answer, str) and answer.lstrip().startswith("[[ ## ") else {}
    return fields or {field: answer}


def answered_with(request: Mapping[str, Any], answer: Answer, called: Collection[str] = ()) -> Ending:
    """How a run ended whose last LM call is this one.

    There is no answer if the call only requests tools whose results are still missing.

    Args:
        request: Request of the call.
        answer: Its answer.
        called: Names of the tools that earlier calls of the run requested.
    """
    required, calls = insisted_tool(request), answer.tools
    must, offers_end = must_call(request), any(ends_run(str(t["function"]["name"])) for t in chat_tools(request))
    final = [call for call in calls if call[1] == required] or [call for call in calls if ends_run(call[1])]
    if not final and len(calls) == 1 and must and not offers_end:
        final = [call for call in calls if call[1] not in called]
    if final:
        submitted = final[0][1] == SUBMIT and asked_outputs(chat_messages(request))
        return Ending(answer_fields("", arguments_of(answer)) if submitted else argument_value(final[0][2]))
    if not calls:
        return _by_code(request, answer.output) or Ending(answered_fields(request, answer) or answer.output)
    reasoning = must or offers_end  # then text next to tool calls is not an answer
    return Ending(answer.output if answer.output and not reasoning else None)


def _by_code(request: Mapping[str, Any], text: str) -> Ending | None:
    """How code ended a run whose instructions require a call of `final_answer`, as in smolagents.

    The answer is the argument of the call if it is a literal; a computed value is not recorded.

    Returns:
        None if the run has no such instructions or the text no code.
    """
    blocks = _CODE.findall(text)
    if not blocks or not any("final_answer(" in part_texts(m.get("content")) for m in chat_messages(request)[:1]):
        return None
    for block in blocks:
        try:
            calls = [node for node in ast.walk(ast.parse(block.strip())) if isinstance(node, ast.Call)]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for call in calls:
            if isinstance(call.func, ast.Name) and call.func.id == "final_answer":
                return _of_literal([*call.args, *(keyword.value for keyword in call.keywords)])
    return Ending(None)


def _of_literal(arguments: Sequence[ast.expr]) -> Ending:
    try:
        return Ending(argument_value({"answer": ast.literal_eval(arguments[0])}))
    except (ValueError, IndexError, RecursionError, MemoryError):
        return Ending(known=False)


def final_answer(transitions: Sequence[Transition]) -> Ending:
    """How a run ended.

    The answer is unknown if there are no calls, the last call failed, or its answer was not recorded.

    Args:
        transitions: LM calls of the run, in order.
    """
    if not transitions or transitions[-1].error is not None:
        return Ending(known=False)
    last, request = transitions[-1], transitions[-1].request
    answer = _answer(last)
    if answer is None or (answer.empty and _unrecorded(last)):
        return Ending(known=False)
    called = {tool.name for earlier in transitions[:-1] for tool in earlier.tools}
    return answered_with(request, answer, called)


def _answer(transition: Transition) -> Answer | None:
    response = transition.response
    if not isinstance(response, Mapping):
        return Answer(text=transition.output) if transition.output else None
    dialect = transition.request.get("dialect")
    body = response.get("body", response) if dialect else response
    return answer_of(dialect, body) if isinstance(body, Mapping) else None


def _unrecorded(transition: Transition) -> bool:
    """Whether an empty answer was not recorded, as opposed to a model that returned nothing."""
    return bool(transition.completion_tokens) or not chat_messages(transition.request)
