"""What `ToolUser` takes as tools and servers, and how functions with unusual parameters are called."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import dspy
import pytest

from assay.errors import ProgramError
from assay.programs import McpServer, ToolUser
from assay.programs.toolbox import function_tool


def double(n: int) -> int:
    """Doubles a number."""
    return 2 * n


def counted(n: int) -> Iterator[int]:
    yield from range(n)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tools": None}, r"^tools=None must be a list of functions$"),
        ({"tools": double}, r"^tools=<function double .* must be a list of functions; write tools=\[<function double"),
        ({"tools": "double"}, "^tools='double' must be a list of functions$"),
        ({"servers": "python server.py"}, "^servers='python server.py' must be a list of McpServer objects$"),
        ({"servers": McpServer(["x"])}, r"must be a list of McpServer objects; write servers=\["),
        ({"servers": [["python", "s.py"]]}, r"servers has a list: .*; a server is McpServer\(\['python', 's.py'\]\)"),
        ({"servers": [double]}, r"servers has a function: .*; a server is McpServer\(\['python', 'server.py'\]\)"),
        ({"tools": [len]}, "is a builtin, which names no types: wrap it in a function"),
        ({"tools": [partial(double, 2)]}, "is a partial, which names no types: wrap it in a function"),
        ({"tools": [counted]}, "yields its results, which are not read: return them as a list"),
        ({"tools": [dspy.Tool(counted)]}, "yields its results, which are not read: return them as a list"),
    ],
)
def test_tools_and_servers_of_a_wrong_type_are_refused_with_the_valid_form(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProgramError, match=message):
        ToolUser(**arguments)


def collecting(n: int, unit: str = "km", *more: Any, **rest: Any) -> str:
    """Takes anything."""
    return f"{n} {unit} {more} {rest}"


def by_position(n: int, scale: int = 2, /, *, shift: int = 0) -> int:
    """Takes two of its parameters by position."""
    return n * scale + shift


@pytest.mark.parametrize("wrapped", [collecting, dspy.Tool(collecting)])
def test_parameters_that_collect_are_not_asked_for(wrapped: Any) -> None:
    tool = function_tool(wrapped)
    assert list(tool.parameters["properties"]) == ["n", "unit"]
    assert tool.parameters["required"] == ["n"]
    assert tool.call({"n": 3}) == "3 km () {}"


def test_parameters_by_position_are_passed_by_position() -> None:
    tool = function_tool(by_position)
    assert tool.parameters["required"] == ["n"]
    assert (tool.call({"n": 3}), tool.call({"n": 3, "scale": 5, "shift": 1})) == ("6", "16")
