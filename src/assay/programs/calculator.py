"""A safe calculator: `+ - * / % ^ ** sqrt( )`, fractions and decimals, bounded in size and time.

Integers and fractions are computed exactly. simpleeval evaluates the expression and refuses names, attributes and calls
other than `sqrt`.
"""

import ast
import math
import operator
from fractions import Fraction
from typing import Any

from simpleeval import InvalidExpression, SimpleEval

_LENGTH = 200  # characters of an expression
_NODES = 100
_BITS = 1024  # of a numerator or denominator


class CalculatorError(ValueError):
    """The expression cannot be computed. The message is written for the model that wrote the expression."""


Number = int | Fraction | float


def _bounded(value: Any) -> Number:
    if isinstance(value, bool) or not isinstance(value, int | float | Fraction):
        raise CalculatorError(f"{value!r} is not a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise CalculatorError("the result is too large")
    if isinstance(value, int | Fraction):
        value = Fraction(value)
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > _BITS:
            raise CalculatorError("the result is too large")
    return value


def _divide(a: Number, b: Number) -> Number:
    if b == 0:
        raise CalculatorError("division by zero")
    return _exact(a) / _exact(b)


def _modulo(a: Number, b: Number) -> Number:
    if b == 0:
        raise CalculatorError("division by zero")
    return _exact(a) % _exact(b)


def _power(a: Number, b: Number) -> Number:
    a, b = _exact(a), _exact(b)
    if a == 0 and b < 0:
        raise CalculatorError("division by zero")
    if isinstance(a, Fraction) and isinstance(b, Fraction) and b.denominator == 1:
        size = max(a.numerator.bit_length(), a.denominator.bit_length())
        if abs(b.numerator) * size > _BITS:
            raise CalculatorError("the result is too large")
        return a**b.numerator
    try:
        result = float(a) ** float(b)
    except OverflowError:
        raise CalculatorError("the result is too large") from None
    if isinstance(result, complex):
        raise CalculatorError("the result is not a real number")
    return result


def _sqrt(a: Number) -> Number:
    if a < 0:
        raise CalculatorError("square root of a negative number")
    a = _exact(a)
    if isinstance(a, Fraction):
        top, bottom = math.isqrt(a.numerator), math.isqrt(a.denominator)
        if top * top == a.numerator and bottom * bottom == a.denominator:
            return Fraction(top, bottom)
    return math.sqrt(a)


def _exact(value: Number) -> Fraction | float:
    return Fraction(value) if isinstance(value, int) else value


def _checked(function: Any) -> Any:
    return lambda *args: _bounded(function(*map(_exact, args)))


_OPERATORS = {
    ast.Add: _checked(operator.add),
    ast.Sub: _checked(operator.sub),
    ast.Mult: _checked(operator.mul),
    ast.Div: _checked(_divide),
    ast.Mod: _checked(_modulo),
    ast.Pow: _checked(_power),
    ast.BitXor: _checked(_power),
    ast.USub: _checked(operator.neg),
    ast.UAdd: _checked(operator.pos),
}


def evaluate_expression(expression: str) -> Number:
    """Evaluates an arithmetic expression. Text after a `=` is ignored.

    Returns:
        A `Fraction` if the value is exact, otherwise a float.

    Raises:
        CalculatorError: too long, not arithmetic, division by zero, or a result that is too large.
    """
    if len(expression) > _LENGTH:
        raise CalculatorError(f"the expression is longer than {_LENGTH} characters")
    text = expression.split("=")[0].replace("×", "*").replace("÷", "/").replace("−", "-").replace("^", "**")
    if not text.strip():
        raise CalculatorError("the expression is empty")
    try:
        tree = ast.parse(text.strip(), mode="eval")
        if sum(1 for _ in ast.walk(tree)) > _NODES:
            raise CalculatorError("the expression is too long")
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, bool):
                raise CalculatorError("not arithmetic: True and False are not numbers")
            if isinstance(node, ast.Constant) and type(node.value) is float:  # 0.1 is exactly 1/10
                if not math.isfinite(node.value):
                    raise CalculatorError("the number is too large")
                written = ast.get_source_segment(text.strip(), node) or node.value
                node.value = Fraction(str(written if node.value else 0))  # type: ignore[assignment]
        evaluator = SimpleEval(operators=_OPERATORS, functions={"sqrt": _checked(_sqrt)}, names={})
        return _bounded(evaluator.eval(text, previously_parsed=ast.Expr(tree.body)))
    except CalculatorError:
        raise
    except (
        InvalidExpression,
        SyntaxError,
        ValueError,
        TypeError,
        ArithmeticError,
        KeyError,
        RecursionError,
        MemoryError,
    ) as error:
        raise CalculatorError(f"not arithmetic: {type(error).__name__}") from None


def calculator(expression: str) -> str:
    """Computes an arithmetic expression: + - * / ^ sqrt( ), fractions and decimals."""
    value = evaluate_expression(expression)
    if isinstance(value, Fraction) and value.denominator == 1:
        return str(value.numerator)
    number = float(value)
    text = f"{number:.10g}"
    return f"{number:.15g}" if "e+" in text and abs(number) < 1e15 else text  # no exponent below 1e15
