"""Tools and their schemas: what is taken as a tool, what engines and prompts get, and arguments checked by it."""

import json
from typing import Any

import dspy
import pydantic
import pytest

from assay.programs.toolbox import arguments_type, checked_arguments, function_tool, plain_schema, signature_line

AREA = plain_schema(
    {
        "type": "dict",
        "properties": {
            "base": {"type": "integer", "description": "the base"},
            "unit": {"type": "string", "enum": ["cm", "m"]},
            "points": {"type": "array", "items": {"type": "float"}},
        },
        "required": ["base"],
    }
)


def sent(schema: Any) -> Any:
    return pydantic.TypeAdapter(arguments_type(schema)).json_schema()


def test_dialects_become_closed_json_schema() -> None:
    assert AREA == {
        "type": "object",
        "properties": {
            "base": {"type": "integer", "description": "the base"},
            "unit": {"type": "string", "enum": ["cm", "m"]},
            "points": {"type": "array", "items": {"type": "number"}},
        },
        "required": ["base"],
        "additionalProperties": False,
    }
    assert signature_line("area", AREA) == 'area(base: integer, unit?: "cm" | "m", points?: array of number)'


def test_optional_properties_are_nullable_for_the_engine_and_nulls_are_dropped() -> None:
    properties = sent(AREA)["properties"]
    assert properties["base"] == {"type": "integer"}
    assert properties["unit"] == {"anyOf": [{"type": "string", "enum": ["cm", "m"]}, {"type": "null"}]}
    assert sent(AREA)["required"] == ["base", "unit", "points"]
    assert checked_arguments(AREA, {"base": 1, "unit": None, "points": None}) == ({"base": 1}, None)


@pytest.mark.parametrize(
    ("written", "arguments", "problem"),
    [
        ({"base": "12"}, {"base": 12}, ""),
        ({"base": 3.0}, {"base": 3}, ""),
        ('{"base": 3}', {"base": 3}, ""),
        ({"base": 1, "points": ["1.5", 2]}, {"base": 1, "points": [1.5, 2]}, ""),
        ({"base": "ten"}, {"base": "ten"}, "base: 'ten' is not of type 'integer'"),
        ({"base": True}, {"base": True}, "True is not of type 'integer'"),
        ({"unit": "cm"}, {"unit": "cm"}, "'base' is a required property"),
        ({"base": 1, "unit": "km"}, {"base": 1, "unit": "km"}, "unit: 'km' is not one of"),
        ({"base": 1, "x": 2}, {"base": 1, "x": 2}, "'x' was unexpected"),
        ([1], {}, "must be a JSON object"),
    ],
)
def test_arguments_are_converted_or_refused_with_the_reason(written: Any, arguments: Any, problem: str) -> None:
    result, why = checked_arguments(AREA, written)
    assert result == arguments
    assert (why is None) if not problem else (why is not None and problem in why)


def test_references_are_resolved_within_the_schema_and_recursion_ends() -> None:
    node = {"type": "object", "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}
    plain = plain_schema({**node, "$defs": {"node": node}})
    assert plain["properties"]["next"]["properties"]["value"] == {"type": "integer"}
    assert "$ref" not in json.dumps(plain)
    wide = {"type": "object", "properties": {str(i): {"$ref": "#/$defs/wide"} for i in range(30)}}
    assert len(json.dumps(plain_schema({**wide, "$defs": {"wide": wide}}))) < 200_000
    loop = plain_schema(
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}
    )
    assert loop["properties"]["a"] == {}
    assert (
        plain_schema({"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1/x"}}})["properties"]["a"] == {}
    )


@pytest.mark.parametrize("schema", [None, 3, "x", [], {}, {"type": "string"}, {"properties": 3}, {"type": ["x", None]}])
def test_a_missing_schema_is_an_open_object(schema: Any) -> None:
    assert plain_schema(schema) == {"type": "object"}
    assert checked_arguments(plain_schema(schema), {"a": [1]}) == ({"a": [1]}, None)


def collecting(n: int, unit: str = "km", *more: Any, **rest: Any) -> str:
    """Takes anything."""
    return f"{n} {unit} {more} {rest}"


@pytest.mark.parametrize("wrapped", [collecting, dspy.Tool(collecting)])
def test_parameters_that_collect_are_not_asked_for(wrapped: Any) -> None:
    tool = function_tool(wrapped)
    assert list(tool.parameters["properties"]) == ["n", "unit"]
    assert tool.parameters["required"] == ["n"]
    assert tool.call({"n": 3}) == "3 km () {}"
