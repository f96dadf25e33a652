"""Prompt formats: how a program's fields become messages (adapters in DSPy's terms). `compile` can choose one.

- `json`: DSPy's JSONAdapter. If the engine supports schemas, it sends a closed JSON schema of the signature with
  patterns and lengths.
- `lean`: `name: value` lines without section markers. Half the tokens, and simple enough for a model of a few hundred
  million parameters.
- `xml`: DSPy's XMLAdapter. Answers are also read if they are not valid XML.
- `chat`: DSPy's ChatAdapter.
"""

import ast
import enum
import json
import operator
import types
from collections.abc import Collection
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin

import dspy
import json_repair
import pydantic
from dspy.utils.exceptions import AdapterParseError

from assay.errors import ConfigError
from assay.models.dspy_seam import DEFAULT_FORMAT
from assay.programs.thinking import LimitsThoughts
from assay.support.names import one_of
from assay.support.sections import FORMATS, LINES, fields_in, structure_in, without_thoughts
from assay.support.values import value_text

# -- Values of a program's fields as text in prompts, and back: as DSPy's adapters write and read them.


def text_of_value(value: Any, annotation: Any) -> str:
    """A value in a prompt: JSON, or a text as it is. A list for a text is numbered."""
    if isinstance(value, list) and annotation is str:
        quoted = [_quoted(item) for item in value]
        if len(quoted) < 2:
            return quoted[0] if quoted else "N/A"
        return "\n".join(f"[{number}] {text}" for number, text in enumerate(quoted, 1))
    try:
        plain = pydantic.TypeAdapter(type(value)).dump_python(value, mode="json", fallback=value_text)
    except Exception:  # of a class that pydantic does not know
        return value_text(value)
    return json.dumps(plain, ensure_ascii=False) if isinstance(plain, dict | list) else str(plain)


def _quoted(text: Any) -> str:
    if not any(mark in text for mark in "\n«»"):
        return f"«{text}»"
    lines = text.replace("\n", "\n    ")
    return f"«««\n    {lines}\n»»»"


def value_in(text: Any, annotation: Any) -> Any:
    """The value that a text of an answer stands for, in the type of its field.

    Raises:
        ValueError: it is none of this type.
    """
    if annotation is str:
        return str(text)
    if isinstance(annotation, enum.EnumMeta):
        return _member(annotation, text)
    kind, choices = get_origin(annotation), get_args(annotation)
    if kind is Literal:
        for written in (text, _unquoted(text)):
            if written in choices:
                return written
        text = _unquoted(text)
    adapter = pydantic.TypeAdapter(annotation)
    optional_text = kind in (Union, types.UnionType) and str in choices and type(None) in choices
    if not isinstance(text, str) or optional_text:
        return adapter.validate_python(text)
    try:
        return adapter.validate_python(_read(text))
    except pydantic.ValidationError:
        if isinstance(annotation, type) and issubclass(annotation, dspy.Type):  # which may read a text itself
            return adapter.validate_python(text)
        raise


def _member(kind: Any, written: Any) -> Any:
    for member in kind:
        if member.value == written:
            return member
    if isinstance(written, str) and written in kind.__members__:
        return kind[written]
    raise ValueError(f"{written!r} is neither a value nor a name of {kind.__name__}")


def _unquoted(text: Any) -> Any:
    """A choice without the forms in which models quote it: `Literal['a']`, `str[a]`, `'a'`."""
    if not isinstance(text, str):
        return text
    text = text.strip()
    if text.startswith(("Literal[", "str[")) and text.endswith("]"):
        text = text[text.find("[") + 1 : -1]
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _read(text: str) -> Any:
    """The JSON in a text, also if it is damaged; else the Python literal; else the text."""
    value = json_repair.loads(text)
    if value != "" or text == "":
        return value
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


ADAPTERS = ("json", "lean", "xml", "chat")


def checked_format(name: Any) -> str:
    """The name of a prompt format.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(name, str) or name not in ADAPTERS:
        raise ConfigError(f"`prompt_format={name!r}` {one_of(name, ADAPTERS)}")
    return name


def ambient_format() -> str:
    """The prompt format of programs that set none: that of the configured adapter, or DSPy's default.

    Of an adapter of one's own it is the name of the class.
    """
    adapter = dspy.settings.adapter
    if adapter is None:
        return DEFAULT_FORMAT
    kinds = {"JSONAdapter": "json", "LeanAdapter": "lean", "XMLAdapter": "xml", "ChatAdapter": "chat"}
    name = type(adapter).__name__
    return kinds.get(name, name)


def make_adapter(name: str) -> Any:
    """Creates the adapter of a prompt format.

    Raises:
        ConfigError: unknown name.
    """
    kinds = {"json": SchemaAdapter, "lean": LeanAdapter, "xml": TagsAdapter, "chat": SectionsAdapter}
    return kinds[checked_format(name)]()


@lru_cache(maxsize=256)
def output_schema(signature: Any) -> dict[str, Any] | None:
    """Returns a closed JSON schema of a signature's outputs; None if a field has no closed form (`dict[str, Any]`).

    Calls of one signature share it: it must not be changed.
    """
    fields: dict[str, Any] = {}
    for name, field in signature.output_fields.items():
        if get_origin(field.annotation) is dict or field.annotation in (dict, Any):
            return None
        fields[name] = (field.annotation, field)
    try:
        model: Any = pydantic.create_model("Outputs", **fields)
        schema: dict[str, Any] = model.model_json_schema()
    except (pydantic.PydanticInvalidForJsonSchema, pydantic.PydanticSchemaGenerationError):
        return None
    return _closed(schema)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Makes all properties of every object required, forbids others, and removes DSPy's own keywords."""
    closed = {
        k: v for k, v in schema.items() if k not in ("title", "prefix", "desc", "constraints", "__dspy_field_type")
    }
    if closed.get("type") == "object" and "properties" in closed:
        closed["properties"] = {name: _closed(value) for name, value in closed["properties"].items()}
        closed |= {"required": list(closed["properties"]), "additionalProperties": False}
    if isinstance(closed.get("items"), dict):
        closed["items"] = _closed(closed["items"])
    if "$defs" in closed:
        closed["$defs"] = {name: _closed(value) for name, value in closed["$defs"].items()}
    return closed


def _response_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "outputs", "schema": schema, "strict": True}}


class _AnswersAlone:
    """Mixin of adapters: a thought in the text of an answer has no fields, in particular one that was cut."""

    def parse(self, signature: Any, completion: str) -> Any:
        return super().parse(signature, without_thoughts(completion))  # type: ignore[misc]


class _RendersOnce:
    """Mixin of adapters: demonstrations of the last call are not rendered again.

    An agent renders its prompt before each call, to count its tokens, and DSPy spends more time on the demonstrations
    than on all else.
    """

    _rendered: tuple[Any, list[Any], list[dict[str, Any]]] | None = None

    def format_demos(self, signature: Any, demos: list[Any]) -> list[dict[str, Any]]:
        kept = self._rendered
        same = kept is not None and kept[0] is signature and len(kept[1]) == len(demos)
        if kept is None or not same or any(map(operator.is_not, kept[1], demos)):
            messages = super().format_demos(signature, demos)  # type: ignore[misc]
            kept = self._rendered = (signature, list(demos), messages)
        return [dict(message) for message in kept[2]]


class SectionsAdapter(_AnswersAlone, _RendersOnce, LimitsThoughts, dspy.ChatAdapter):  # type: ignore[misc]
    """DSPy's ChatAdapter, which can leave a thought out but not limit it."""

    without_limits = "chat"


class TagsAdapter(LimitsThoughts, dspy.XMLAdapter):  # type: ignore[misc]
    """DSPy's XMLAdapter, which also reads answers with literal `<` and `&`, open tags or text around them."""

    without_limits = "xml"

    def parse(self, signature: Any, completion: str) -> Any:
        try:
            return super().parse(signature, without_thoughts(completion, signature.output_fields))
        except AdapterParseError:
            return _typed("XMLAdapter", signature, completion, FORMATS)


class _WithSchema(dspy.JSONAdapter):  # type: ignore[misc]
    """DSPy's JSONAdapter with patterns and lengths in the schema."""

    def __call__(self, lm: Any, lm_kwargs: dict[str, Any], signature: Any, demos: Any, inputs: Any) -> Any:
        constrained = _constrained(lm, signature)
        # past JSONAdapter, which would replace the schema
        call = dspy.ChatAdapter.__call__ if constrained else dspy.JSONAdapter.__call__
        return call(self, lm, {**lm_kwargs, **constrained}, signature, demos, inputs)

    async def acall(self, lm: Any, lm_kwargs: dict[str, Any], signature: Any, demos: Any, inputs: Any) -> Any:
        constrained = _constrained(lm, signature)
        call = dspy.ChatAdapter.acall if constrained else dspy.JSONAdapter.acall
        return await call(self, lm, {**lm_kwargs, **constrained}, signature, demos, inputs)


def _constrained(lm: Any, signature: Any) -> dict[str, Any]:
    """The option that constrains an answer to the signature's schema; empty if engine or signature allow none."""
    schema = output_schema(signature)
    if schema is None or not lm.supports_response_schema or "response_format" not in lm.supported_params:
        return {}
    return {"response_format": _response_format(schema)}


class SchemaAdapter(_AnswersAlone, _RendersOnce, LimitsThoughts, _WithSchema):
    """DSPy's JSONAdapter with patterns and lengths in the schema; DSPy itself drops them."""


# `dspy.streamify` finds an adapter's output format by the class name
SchemaAdapter.__name__, SectionsAdapter.__name__, TagsAdapter.__name__ = "JSONAdapter", "ChatAdapter", "XMLAdapter"


def listen_under(adapter: Any) -> None:
    """Makes the listeners of `dspy.streamify` parse with this adapter.

    By default they use the adapter configured where the stream is consumed, not the program's own. `lean` is not
    supported by listeners: its answer is not streamed field by field.
    """
    if not isinstance(adapter, dspy.ChatAdapter | dspy.JSONAdapter):
        return

    def under(method: Any) -> Any:
        def read(*arguments: Any) -> Any:
            with dspy.context(adapter=adapter):
                return method(*arguments)

        return read

    for listener in dspy.settings.stream_listeners or ():
        if "receive" not in vars(listener):
            listener.receive, listener.finalize = under(listener.receive), under(listener.finalize)


class _Lines(dspy.Adapter):  # type: ignore[misc]
    """`name: value` lines for inputs and outputs."""

    def __call__(self, lm: Any, lm_kwargs: dict[str, Any], signature: Any, demos: Any, inputs: Any) -> Any:
        return super().__call__(lm, {**lm_kwargs, **self._constraint(lm, signature)}, signature, demos, inputs)

    async def acall(self, lm: Any, lm_kwargs: dict[str, Any], signature: Any, demos: Any, inputs: Any) -> Any:
        return await super().acall(lm, {**lm_kwargs, **self._constraint(lm, signature)}, signature, demos, inputs)

    @staticmethod
    def _constraint(lm: Any, signature: Any) -> dict[str, Any]:
        schema = output_schema(signature)
        constrained = schema is not None and LINES in lm.supported_params
        return {"response_format": _response_format({**(schema or {}), LINES: True})} if constrained else {}

    def format_system_message(self, signature: Any) -> str:
        return f"{signature.instructions}\nReply with: " + ", ".join(f"{name}: …" for name in signature.output_fields)

    def format_user_message_content(
        self, signature: Any, inputs: dict[str, Any], prefix: str = "", suffix: str = "", main_request: bool = False
    ) -> str:
        return _lines(signature.input_fields, inputs)

    def format_assistant_message_content(
        self, signature: Any, outputs: dict[str, Any], missing_field_message: str | None = None
    ) -> str:
        return _lines(signature.output_fields, outputs)

    def format_demos(self, signature: Any, demos: list[dict[str, Any]]) -> list[dict[str, Any]]:
        messages = []
        for demo in demos:
            user = self.format_user_message_content(signature, demo)
            answer = self.format_assistant_message_content(signature, demo)
            if user and answer:
                messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        return messages

    def parse(self, signature: Any, completion: str) -> dict[str, Any]:
        return _typed("LeanAdapter", signature, completion, ("lean",))


class LeanAdapter(LimitsThoughts, _Lines):
    """`name: value` lines for inputs and outputs. Engines that support it constrain the lines to the schema."""


def _typed(adapter: str, signature: Any, completion: str, formats: Collection[str]) -> dict[str, Any]:
    """The outputs of an answer in one of the formats, in their types. A single output may be the whole text.

    Raises:
        AdapterParseError: an output is missing, or has another type.
    """
    names = list(signature.output_fields)
    texts = fields_in(completion, names, formats=formats)
    if not texts and len(names) == 1:
        texts = {names[0]: without_thoughts(completion).strip()}
    values: dict[str, Any] = {}

    def failure(message: str) -> AdapterParseError:
        return AdapterParseError(
            adapter_name=adapter, signature=signature, lm_response=completion, message=message, parsed_result=values
        )

    for name, text in texts.items():
        field = signature.output_fields[name]
        try:
            value = _parsed(text, field.annotation)
            model = pydantic.create_model("Value", value=(field.annotation, field))
            values[name] = vars(model(value=value))["value"]
        except (ValueError, TypeError) as error:
            raise failure(f"{name}: {error}") from error
    if missing := [name for name in names if name not in values]:
        raise failure(f"no {', '.join(missing)} in the answer")
    return values


def _parsed(text: Any, annotation: Any) -> Any:
    try:
        return value_in(_as_choice(text, annotation), annotation)
    except ValueError:
        if not isinstance(text, str) or (structure := structure_in(text)) == text:
            raise
        return value_in(structure, annotation)


def _as_choice(text: Any, annotation: Any) -> Any:
    """The matching choice, ignoring case and punctuation: small models write `Calculator.` for `calculator`."""
    for choice in get_args(annotation):
        if isinstance(choice, str) and isinstance(text, str) and text.strip(" .\"'`").casefold() == choice.casefold():
            return choice
    return text


def _lines(fields: dict[str, Any], values: dict[str, Any]) -> str:
    entries = ((name, values[name], field) for name, field in fields.items() if values.get(name) not in (None, ""))
    return "\n".join(f"{name}: {text_of_value(value, field.annotation)}" for name, value, field in entries)
