"""Generated sums, `arithmetic:terms=2-3&digits=2-3&ops=+-*&signs=&size=&seed=`."""

import random
from collections.abc import Iterator

from assay.datasets.specs import Row, number_of, options_of, span_of
from assay.errors import DataError

_WORDINGS = ("What is {}?", "Calculate {}.", "Work out {}.", "How much is {}?")


def rows(query: str) -> Iterator[Row]:
    """Distinct sums, differences and products; `signs=1` includes negative numbers."""
    options = options_of(query, ("terms", "digits", "ops", "signs", "size", "seed"), "arithmetic")
    terms, digits = span_of(options, "terms", "2-3", "arithmetic"), span_of(options, "digits", "2-3", "arithmetic")
    size, rng = number_of(options, "size", 500, at_least=1), random.Random(number_of(options, "seed", 0))
    ops, signs = options.get("ops", "+-"), options.get("signs", "0")
    if signs not in ("0", "1"):
        raise DataError(f"arithmetic: signs={signs!r} must be 0 or 1")
    if not ops or set(ops) - set("+-*"):
        raise DataError(f"arithmetic: ops={ops!r} must be among + - *")
    questions: set[str] = set()
    tries = 0
    while len(questions) < size:
        if (tries := tries + 1) > 100 * size + 1000:
            raise DataError(
                f"arithmetic: there are fewer than {size} distinct tasks with these options; allow more digits or terms"
            )
        numbers = [_operand(rng, digits, signs == "1") for _ in range(rng.randint(*terms))]
        expression = numbers[0]
        used = [rng.choice(ops) for _ in numbers[1:]]
        for op, number in zip(used, numbers[1:], strict=True):
            expression += f" {op} {number}"
        if expression in questions:
            continue
        questions.add(expression)
        kind = {"+": "sum", "-": "difference", "*": "product"}[used[0]] if len(set(used)) == 1 else "mixed"
        yield (
            f"arithmetic:{len(questions)}",
            {
                "inputs": {"question": rng.choice(_WORDINGS).format(expression)},
                # the expression holds only digits and operators generated above
                "expected": {"answer": str(eval(expression, {"__builtins__": {}}))},
                "task_type": kind,
                "metadata": {"expression": expression},
            },
        )


def _operand(rng: random.Random, digits: tuple[int, int], signs: bool) -> str:
    length = rng.randint(*digits)
    number = rng.randint(10 ** (length - 1) if length > 1 else 0, 10**length - 1)
    return f"(-{number})" if signs and rng.random() < 0.3 else str(number)
