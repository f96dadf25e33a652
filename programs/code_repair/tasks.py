"""Generated tasks of code repair, `mutants:MODULE_OR_FILE?size=&seed=&isolation=`.

A task is a correct function with one seeded mutation, the fix, and tests made by calling the function. `MODULE_OR_FILE`
is a module or package such as `textwrap` or `json`, a file, a folder, or `stdlib` for all modules of the standard
library. Functions, mutants and made-up calls run in the sandbox.
"""

import ast
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from assay.datasets.specs import Row, number_of, options_of
from assay.errors import ConfigError, DataError
from assay.programs.sandbox.isolation import isolations_of

from .calls import call_expressions, similar_calls
from .functions import Slice, module_files, slices
from .jobs import Job, outcomes
from .mutations import Mutation, mutations

_CANDIDATES = 100  # calls tried per function, in each of two rounds
_CALLS = 16  # calls kept
_VISIBLE = 4
_FEWEST_RESULTS = 3  # different results among the kept calls
_MUTANTS = (8, 40)  # tried per function: as many as the size needs, within these limits
_BATCH = 16  # functions per run of the sandbox


@dataclass
class _Subject:
    """A function with the calls that give plain results."""

    part: Slice
    seed: int
    calls: list[str]
    mutants: list[Mutation]


def rows(spec: str) -> Iterator[Row]:
    """Rows of `mutants:` and the rest of the spec; fewer than `size` (default 500) if the functions give no more.

    A row has the inputs `function`, `code` (the broken source) and `visible_tests`, expects `reference` (the fixed
    source), and has `hidden_tests` in its metadata, where neither prompts nor demonstrations show them. A test is
    `[expression, repr of the result]`. The broken source fails at least one visible and one hidden test; the reference
    passes all. Each function gives one task before any gives a second one.

    Raises:
        DataError: an unknown option, no such file, or no function that can be tested.
        SandboxError: no sandbox works here; `isolation=none` runs without one.
    """
    name, _, query = spec.partition("?")
    options = options_of(query, ("size", "seed", "isolation"), f"mutants:{name}")
    isolation = options.get("isolation", "auto")
    try:
        isolations_of(isolation)
    except ConfigError as error:
        raise DataError(f"mutants: {error}") from None
    size, seed = number_of(options, "size", 500, at_least=1), number_of(options, "seed", 0)
    parts = _all_slices(name)
    random.Random(seed).shuffle(parts)
    tried = min(_MUTANTS[1], max(_MUTANTS[0], 8 * size // len(parts)))
    count, later = 0, list[list[Row]]()
    for start in range(0, len(parts), _BATCH):
        subjects = [_subject(part, seed, tried) for part in parts[start : start + _BATCH]]
        for rows in _batch(subjects, isolation):
            if rows:
                count += 1
                yield rows[0]
                later.append(rows[1:])
            if count >= size:
                return
    if not count:
        raise DataError(
            f"mutants:{name} has no function whose mutants give other results than the function itself on calls "
            "made for it"
        )
    rounds = (row for at in range(tried) for rows in later for row in rows[at : at + 1])
    yield from islice(rounds, size - count)


def _all_slices(name: str) -> list[Slice]:
    """The functions of all files. Files that are not Python are left out where others have functions."""
    parts, unread = list[Slice](), list[str]()
    for module, file in module_files(name):
        try:
            source = file.read_text(encoding="utf-8")
            ast.parse(source)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            unread.append(f"{file} cannot be read: {error}")
            continue
        parts += slices(source, module)
    if parts:
        return parts
    rule = (
        f"mutants:{name} has no function to mutate: functions need parameters, at least three statements, and must not "
        "use files, processes, the network or other modules with side effects"
    )
    raise DataError("; ".join([rule, *unread[:3]]))


def _subject(part: Slice, seed: int, tried: int) -> _Subject:
    rng = random.Random(f"{seed}:{part.module}:{part.name}")
    return _Subject(part, seed, call_expressions(part, rng, _CANDIDATES), mutations(part.code, rng, tried))


def _batch(subjects: Sequence[_Subject], isolation: str) -> Iterator[list[Row]]:
    chosen = []
    for subject, expected in zip(subjects, _calls(subjects, isolation), strict=True):
        if len(set(expected.values())) >= _FEWEST_RESULTS:
            chosen.append((subject, expected))
    jobs = [
        Job([s.part.code, *(mutant.code for mutant in s.mutants)], list(reversed(expected))) for s, expected in chosen
    ]  # another process and another order: results that depend on either are dropped
    for (subject, expected), results in zip(chosen, outcomes(jobs, isolation), strict=True):
        yield list(_rows(subject, expected, results)) if results else []


def _calls(subjects: Sequence[_Subject], isolation: str) -> list[dict[str, str]]:
    """Calls with their results for each function. The second round varies the calls that gave results."""
    first = _evaluated([s.part for s in subjects], [s.calls for s in subjects], isolation)
    again = [index for index, expected in enumerate(first) if expected and len(set(expected.values())) < _CALLS]
    rngs = (random.Random(f"{subjects[index].seed}:{subjects[index].part.name}:again") for index in again)
    more = [
        similar_calls(subjects[index].part, rng, first[index], _CANDIDATES)
        for index, rng in zip(again, rngs, strict=True)
    ]
    second = _evaluated([subjects[index].part for index in again], more, isolation)
    better = dict(zip(again, second, strict=True))
    return [_selected(better.get(index, expected)) for index, expected in enumerate(first)]


def _evaluated(parts: Sequence[Slice], calls: Sequence[Sequence[str]], isolation: str) -> list[dict[str, str]]:
    """The calls of each function that give a plain result, with it."""
    jobs = [Job([part.code], listed) for part, listed in zip(parts, calls, strict=True)]
    return [
        {call: text for call, text in zip(job.calls, rows[0], strict=True) if text is not None}
        if rows and rows[0]
        else {}
        for job, rows in zip(jobs, outcomes(jobs, isolation), strict=True)
    ]


def _selected(results: Mapping[str, str]) -> dict[str, str]:
    """Call -> result for the kept calls, with as many different results as there are."""
    fresh = {text: call for call, text in reversed(list(results.items()))}  # the first call of each result
    first = [(call, text) for call, text in results.items() if fresh[text] == call]
    others = [(call, text) for call, text in results.items() if fresh[text] != call]
    return dict([*first, *others][:_CALLS])


def _rows(subject: _Subject, expected: dict[str, str], results: Sequence[Sequence[str | None] | None]) -> Iterator[Row]:
    calls, correct = list(reversed(expected)), results[0]
    if correct is None:
        return
    stable = [call for call, text in zip(calls, correct, strict=True) if text == expected[call]]
    if len({expected[call] for call in stable}) < _FEWEST_RESULTS:
        return
    for mutant, texts in zip(subject.mutants, results[1:], strict=True):
        if texts is None:
            continue
        actual = dict(zip(calls, texts, strict=True))
        failing = [call for call in stable if actual[call] != expected[call]]
        passing = [call for call in stable if actual[call] == expected[call]]
        if len(failing) >= 2 and len(stable) >= _VISIBLE + 2:
            yield _row(subject, mutant, expected, failing, passing)


def _row(subject: _Subject, mutant: Mutation, expected: dict[str, str], failing: list[str], passing: list[str]) -> Row:
    """A quarter of the calls are visible tests. Visible and hidden tests each include a failing one."""
    part = subject.part
    rng = random.Random(f"{subject.seed}:{part.module}:{part.name}:{mutant.line}:{mutant.new}")
    failing, passing = rng.sample(failing, len(failing)), rng.sample(passing, len(passing))
    visible = [failing[0], *rng.sample([*failing[2:], *passing], _VISIBLE - 1)]
    hidden = [call for call in expected if call not in visible]
    visible.sort(key=list(expected).index)
    return f"mutants:{part.module}:{part.name}:{mutant.line}", {
        "inputs": {
            "function": part.name,
            "code": mutant.code,
            "visible_tests": [[call, expected[call]] for call in visible],
        },
        "expected": {"reference": part.code},
        "task_type": f"mutants/{mutant.kind}",
        "metadata": {
            "hidden_tests": [[call, expected[call]] for call in hidden],
            "module": part.module,
            "line": mutant.line,
            "mutation": json.dumps([mutant.old, mutant.new]),
        },
    }
