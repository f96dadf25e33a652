"""How a program's fields become messages. The adapter is one more thing that compile may choose.

`json` is DSPy's JSONAdapter with a closed schema from the signature, its patterns and lengths included, wherever the
engine takes one. `lean` writes plain `name: value` turns without section markers: half the tokens, and what a model
of a few hundred million parameters can follow. `chat` is DSPy's own ChatAdapter.
"""

import re
from typing import Any, get_args, get_origin

import dspy
import pydantic
from dspy.adapters.utils import format_field_value, parse_value
from dspy.utils.exceptions import AdapterParseError

from assay.errors import ConfigError
from assay.models.embedded import LINES

__all__ = ["ADAPTERS", "LeanAdapter", "SchemaAdapter", "listen_under", "make_adapter", "output_schema"]

ADAPTERS = ("json", "lean", "chat")


def make_adapter(name: str) -> Any:
    """The adapter of that name.

    Raises:
        ConfigError: no adapter is called so.
    """
    kinds = {"json": SchemaAdapter, "lean": LeanAdapter, "chat": dspy.ChatAdapter}
    if name not in kinds:
        raise ConfigError(f"no adapter is called {name!r}; there are {', '.join(ADAPTERS)}")
    return kinds[name]()


def output_schema(signature: Any) -> dict[str, Any] | None:
    """The closed JSON schema of a signature's outputs; None where a field has no closed form (`dict[str, Any]`)."""
    fields: dict[str, Any] = {}
    for name, field in signature.output_fields.items():
        if get_origin(field.annotation) is dict or field.annotation in (dict, Any):
            return None
        fields[name] = (field.annotation, field)
    try:
        model: Any = pydantic.create_model("Outputs", **fields)
        found: dict[str, Any] = model.model_json_schema()
    except (pydantic.PydanticInvalidForJsonSchema, pydantic.PydanticSchemaGenerationError):
        return None
    return _closed(found)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Every object lists all its properties as required and admits no others; DSPy's own keywords go."""
    kept = {k: v for k, v in schema.items() if k not in ("title", "prefix", "desc", "constraints", "__dspy_field_type")}
    if kept.get("type") == "object" and "properties" in kept:
        kept["properties"] = {name: _closed(value) for name, value in kept["properties"].items()}
        kept |= {"required": list(kept["properties"]), "additionalProperties": False}
    if isinstance(kept.get("items"), dict):
        kept["items"] = _closed(kept["items"])
    if "$defs" in kept:
        kept["$defs"] = {name: _closed(value) for name, value in kept["$defs"].items()}
    return kept


def _response_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "outputs", "schema": schema, "strict": True}}


class SchemaAdapter(dspy.JSONAdapter):  # type: ignore[misc]
    """DSPy's JSONAdapter; DSPy itself drops patterns and lengths from the schema it sends."""

    def _prepare_response_format(self, lm: Any, lm_kwargs: dict[str, Any], signature: Any) -> None:
        schema = output_schema(signature)
        if schema is not None and lm.supports_response_schema and "response_format" in lm.supported_params:
            lm_kwargs["response_format"] = _response_format(schema)
        else:
            super()._prepare_response_format(lm, lm_kwargs, signature)


SchemaAdapter.__name__ = "JSONAdapter"  # `dspy.streamify` looks up what an adapter writes by its class's name


def listen_under(adapter: Any) -> None:
    """Has the listeners of `dspy.streamify` read what this adapter writes. They read by the adapter that is set where the stream is consumed,
    which is not the one that a program sets for itself. Lines of a `lean` program have no listener; its answer comes whole."""
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


class LeanAdapter(dspy.Adapter):  # type: ignore[misc]
    """`name: value` lines, in and out; constrained to the schema by engines that can constrain lines."""

    def _call_preprocess(self, lm: Any, lm_kwargs: dict[str, Any], signature: Any, inputs: dict[str, Any]) -> Any:
        signature = super()._call_preprocess(lm, lm_kwargs, signature, inputs)
        schema = output_schema(signature)
        if schema is not None and LINES in lm.supported_params:
            lm_kwargs["response_format"] = _response_format({**schema, LINES: True})
        return signature

    def format_system_message(self, signature: Any) -> str:
        return f"{signature.instructions}\nReply with: " + ", ".join(f"{name}: …" for name in signature.output_fields)

    def format_user_message_content(
        self, signature: Any, inputs: dict[str, Any], prefix: str = "", suffix: str = "", main_request: bool = False
    ) -> str:
        return _lines(signature.input_fields, inputs)

    def format_assistant_message_content(self, signature: Any, outputs: dict[str, Any], missing_field_message: str | None = None) -> str:
        return _lines(signature.output_fields, outputs)

    def format_demos(self, signature: Any, demos: list[dict[str, Any]]) -> list[dict[str, Any]]:
        messages = []
        for demo in demos:
            user, answer = self.format_user_message_content(signature, demo), self.format_assistant_message_content(signature, demo)
            if user and answer:
                messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        return messages

    def parse(self, signature: Any, completion: str) -> dict[str, Any]:
        names = list(signature.output_fields)
        starts = re.compile(rf"^\s*({'|'.join(map(re.escape, names))})\s*:[ \t]*", re.MULTILINE)
        marks = list(starts.finditer(completion))
        texts: dict[str, str] = {}
        for mark, following in zip(marks, [*marks[1:], None], strict=False):
            texts.setdefault(mark[1], completion[mark.end() : following.start() if following else len(completion)].strip())
        if not texts and len(names) == 1:
            texts = {names[0]: completion.strip()}
        values: dict[str, Any] = {}
        for name, text in texts.items():
            field = signature.output_fields[name]
            try:
                value = parse_value(_as_choice(text, field.annotation), field.annotation)
                values[name] = pydantic.create_model("Value", value=(field.annotation, field))(value=value).value  # type: ignore[attr-defined]
            except (ValueError, TypeError) as error:
                raise self._failure(signature, completion, values, f"{name}: {error}") from error
        if missing := [name for name in names if name not in values]:
            raise self._failure(signature, completion, values, f"no {', '.join(missing)} in the answer")
        return values

    @staticmethod
    def _failure(signature: Any, completion: str, values: dict[str, Any], message: str) -> AdapterParseError:
        return AdapterParseError(adapter_name="LeanAdapter", signature=signature, lm_response=completion, message=message, parsed_result=values)


def _as_choice(text: str, annotation: Any) -> str:
    """`Calculator.` for the choice `calculator`: small models add capitals and full stops."""
    for choice in get_args(annotation):
        if isinstance(choice, str) and text.strip(" .\"'`").casefold() == choice.casefold():
            return choice
    return text


def _lines(fields: dict[str, Any], values: dict[str, Any]) -> str:
    shown = ((name, values[name], field) for name, field in fields.items() if values.get(name) not in (None, ""))
    return "\n".join(f"{name}: {format_field_value(field_info=field, value=value)}" for name, value, field in shown)
