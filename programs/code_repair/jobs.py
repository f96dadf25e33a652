"""Runs functions and their mutants in a sandbox and reads the results back."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from assay.errors import DataError
from assay.programs.sandbox import run

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
