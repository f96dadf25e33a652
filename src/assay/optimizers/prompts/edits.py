"""New versions of an agent's texts, which a model proposes from failed runs and their feedback.

A version is made by at most four edits of one text: passages that are replaced, deleted or added. A short text may also
be written anew. Which text it is depends on the requests of the failed runs.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dspy
import pydantic
from dspy.utils.exceptions import AdapterParseError

from assay.datasets import Task
from assay.errors import StopRun
from assay.evaluation.session import RecordedProgram, Session
from assay.models import count_tokens
from assay.optimizers.prompts.demonstrations import Run, traced_runs
from assay.optimizers.prompts.proposals import UNREADABLE, InstructionCheck, Proposed
from assay.support.scrubbing import error_text
from assay.support.values import value_text

MOST_EDITS = 4  # of one version: more make it unclear which of them helped
SHORT = 300  # tokens up to which a text may be written anew
_FAILURES = 4  # shown to the model, and runs that are made to find them
_HOT = 1.0  # temperature, high so that proposals differ
_CHARACTERS = 1500  # of a failure


class Edit(pydantic.BaseModel):
    """A change of a text."""

    passage: str = pydantic.Field(description="a passage exactly as it is once in the text; empty to add at the end")
    new: str = pydantic.Field(description="what replaces the passage; empty to delete it")
    why: str = pydantic.Field(description="which failures it prevents, in one sentence")


class Revise(dspy.Signature):  # type: ignore[misc]
    """Improve a text by which an AI agent works. It is one of the texts of the agent, such as its system prompt, a
    skill, or the description of a tool.

    Make one to four edits that prevent failures like those below on other tasks as well. Write general rules; do not
    name the tasks or their answers. Keep placeholders such as {name} and blocks of code exactly as they are.
    """

    text: str = dspy.InputField()
    failures: str = dspy.InputField(desc="runs of the agent with the feedback of their evaluation")
    edits: list[Edit] = dspy.OutputField()


class Rewrite(dspy.Signature):  # type: ignore[misc]
    """Write a better version of a text by which an AI agent works. It is one of the texts of the agent, such as its
    system prompt, a skill, or the description of a tool.

    It must prevent failures like those below on other tasks as well. Write general rules; do not name the tasks or
    their answers. Keep placeholders such as {name} and blocks of code exactly as they are.
    """

    text: str = dspy.InputField()
    failures: str = dspy.InputField(desc="runs of the agent with the feedback of their evaluation")
    improved_text: str = dspy.OutputField()
    why: str = dspy.OutputField(desc="which failures it prevents, in one sentence")


@dataclass(frozen=True, kw_only=True)
class Parent:
    """What a new version is made from.

    Attributes:
        student: the program, whose texts are changed.
        texts: its new texts, by name; those left out are the agent's own.
        failures: runs of it or of the agent's own texts on train tasks, if some are known.
    """

    student: RecordedProgram
    texts: Mapping[str, str]
    failures: Sequence[Run] = ()


def propose_text(
    parent: Parent, train: Sequence[Task], session: Session, *, number: int, check: InstructionCheck, threshold: float
) -> Proposed | None:
    """A new version of one text; None where the model gave nothing usable, or there was no failure to learn from.

    It costs one call, and up to four runs if no failures are known.

    Args:
        number: how many versions were proposed before; decides which tasks are run and what is shown.
        check: checks the version, and counts it if it is rejected.
        threshold: score from which a run is a success.
    Raises:
        StopRun: a cap or the user stopped the run.
    """
    rng = random.Random(f"edit {session.seed} {number}")
    failures = list(parent.failures)
    if not failures:
        first = number * _FAILURES % max(1, len(train))
        tasks = [*train[first:], *train[:first]][:_FAILURES]
        failures = [run for run in traced_runs(parent.student, tasks, session) if is_failure(run, threshold)]
    credit = Counter(name for _, steps in failures for name in {name for name, _, _ in steps})
    if not credit:
        return None
    name = rng.choices(list(credit), list(credit.values()))[0]
    failures = [run for run in failures if any(name == called for called, _, _ in run[1])]
    shown = rng.sample(failures, min(_FAILURES, len(failures)))
    before = dict(parent.student.program.named_predictors())[name].signature.instructions
    lm = (session.prompt_lm or session.lm).copy(temperature=_HOT)
    rewrites = number % 2 == 1 and count_tokens(session.lm, before) <= SHORT
    try:
        with session.context(), dspy.context(lm=lm, adapter=dspy.ChatAdapter(), trace=[]):
            texts = "\n\n".join(_failure_text(run, name) for run in shown)
            answer = dspy.Predict(Rewrite if rewrites else Revise)(text=before, failures=texts)
    except StopRun:
        raise
    except Exception as error:  # a failed proposal does not end the search
        if unparsed := isinstance(error, AdapterParseError):
            check.rejected.append((number, UNREADABLE))
        cause = "its answer cannot be read" if unparsed else error_text(error)
        session.progress.say(
            f"{lm.model} proposed no text: {cause}. Its calls: assay traces list --source outside. The search continues"
        )
        return None
    if rewrites:
        text, why, reason = str(answer.improved_text).strip(), [str(answer.why).strip()], None
    else:
        text, why = edited(before, answer.edits)
        reason = None if why else "edit: no passage of its edits occurs once in the text"
    others = [p.signature.instructions for other, p in parent.student.program.named_predictors() if other != name]
    limit = check.limit_of(name)
    reason = reason or check.why(text, before, sources=train, beside=others, most_tokens=limit)
    if reason is not None:
        check.rejected.append((number, reason.partition(":")[0]))
    if reason is not None or text == before:
        return None
    return Proposed({**parent.texts, name: text}, tuple(f"{name}: {line}" for line in why if line))


def is_failure(run: Run, threshold: float) -> bool:
    """Whether a run was scored below the threshold."""
    return run[0].scored.scored and run[0].scored.value < threshold


def edited(text: str, edits: Sequence[Edit]) -> tuple[str, list[str]]:
    """A text with at most four edits, and their reasons. An edit is left out if its passage does not occur once."""
    why = list[str]()
    for edit in edits[:MOST_EDITS]:
        if not edit.passage.strip() and edit.new.strip():
            text = f"{text}\n\n{edit.new.strip()}"
        elif edit.passage.strip() and text.count(edit.passage) == 1:
            text = text.replace(edit.passage, edit.new)
        else:
            continue
        why.append(edit.why.strip())
    return text.strip(), why


def _failure_text(run: Run, name: str) -> str:
    scored, steps = run
    _, inputs, output = next(step for step in steps if step[0] == name)
    lines = [
        *_lines(inputs),
        *(f"the agent's {line}" for line in _lines(output)),
        f"feedback: {scored.scored.feedback}",
    ]
    return "\n".join(line[:_CHARACTERS] for line in lines)


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"{name}: {value_text(value)}" for name, value in values.items()]
