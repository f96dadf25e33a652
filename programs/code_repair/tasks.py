"""Generated tasks of code repair, `mutants:MODULE_OR_FILE?size=&seed=&isolation=`.

A task is a correct function with one seeded mutation, the fix, and tests made by calling the function. `MODULE_OR_FILE`
is a module or package such as `textwrap` or `json`, a file, a folder, or `stdlib` for all modules of the standard
library. Functions, mutants and made-up calls run in the sandbox.
"""

import ast
import json
import random
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from assay.datasets.specs import Row, number_of, options_of
from assay.errors import ConfigError, DataError
from assay.programs.sandbox import run
from assay.programs.sandbox.isolation import isolations_of

from .calls import call_expressions, similar_calls
from .functions import Slice, module_files, slices
from .mutations import Mutation, mutations

_CALL_S = 0.1  # of processor time for one call, so that a busy machine gives the same tasks
_START_S, _JOB_S = 20.0, 4.0  # by the clock for a batch, and for each function in it
_MEMORY_MB = 512

Outcomes = list[
    list[str | None] | None
]  # [source][call]: repr of a plain result, or None; None for a source that hangs


@dataclass(frozen=True)
class Job:
    """Sources of one function and the calls to evaluate in each."""

    sources: Sequence[str]
    calls: Sequence[str]


# Runs inside of the sandbox. A result counts if its repr is a literal that evaluates to an equal value. Unbuffered
# lines, so that a function that ends the process loses only itself.
_SCRIPT = """
import ast, json, signal, sys

class Late(BaseException):
    pass

def late(*_):
    raise Late

def plain(value, depth=0):
    if value is None or type(value) in (bool, int, float, str, bytes):
        return True
    if depth > 20:
        return False
    if type(value) in (list, tuple, set):
        return all(plain(part, depth + 1) for part in value)
    return type(value) is dict and all(plain(k, depth + 1) and plain(v, depth + 1) for k, v in value.items())

def evaluate(space, call):
    signal.setitimer(signal.ITIMER_PROF, CALL_S)
    try:
        value = eval(call, space)
        if not plain(value):
            return None
        text = repr(value)
        if len(text) > 300 or ast.literal_eval(text) != value:
            return None
        return text
    except (Exception, SystemExit):
        return None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)

def run(source, calls):
    space = {"__name__": "solution"}
    signal.setitimer(signal.ITIMER_PROF, 2)
    try:
        exec(compile(source, "solution", "exec"), space)
    except (Exception, SystemExit):
        return [None] * len(calls)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return [evaluate(space, call) for call in calls]

signal.signal(signal.SIGPROF, late)
write = sys.stdout.write
for number, job in enumerate(json.loads(JOBS)):
    results = []
    for source in job["sources"]:
        try:
            results.append(run(source, job["calls"]))
        except Late:
            results.append(None)
    write(NONCE + json.dumps([number, results]) + "\\n")
    sys.stdout.flush()
"""


def outcomes(jobs: Sequence[Job], isolation: str) -> list[Outcomes | None]:
    """Results of the calls for each job; None for a job that ended its process or took too long.

    Raises:
        DataError: the sandbox ran nothing.
    """
    results: dict[int, Outcomes] = {}
    waiting = [list(range(len(jobs)))]
    while waiting:
        batch = waiting.pop()
        done = _run([jobs[index] for index in batch], isolation)
        results.update((batch[number], rows) for number, rows in done.items())
        # the first one without a result is the cause; the rest are run again
        if len(done) < len(batch) and len(batch) > 1:
            rest = [index for index in batch if index not in results]
            waiting += [[index] for index in rest[:1]] + ([rest[1:]] if rest[1:] else [])
    return [results.get(index) for index in range(len(jobs))]


def _run(jobs: Sequence[Job], isolation: str) -> dict[int, Outcomes]:
    nonce = secrets.token_hex(8)
    data = json.dumps([{"sources": list(job.sources), "calls": list(job.calls)} for job in jobs])
    head = f"CALL_S = {_CALL_S}\nNONCE = {nonce!r}\nJOBS = {data!r}\n"
    result = run(head + _SCRIPT, timeout_s=_START_S + _JOB_S * len(jobs), memory_mb=_MEMORY_MB, isolation=isolation)
    rows: dict[int, Outcomes] = {}
    for line in result.output.split("\n"):
        if line.startswith(nonce):
            number, values = _read(line[len(nonce) :])
            rows[number] = values
    return rows


def _read(text: str) -> tuple[int, Any]:
    try:
        number, values = json.loads(text)
    except ValueError as error:
        raise DataError(f"mutants: the sandbox cut off its output: {error}. Use fewer functions at a time") from None
    return number, values


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
