"""Instructions that a model proposes for one predictor, from training examples."""

import random
from collections.abc import Sequence
from typing import Any

import dspy
from dspy.utils.exceptions import AdapterParseError

from assay.errors import StopRun
from assay.evaluation.session import RecordedProgram, Session
from assay.optimizers.prompts.demonstrations import Demonstration
from assay.optimizers.prompts.proposals import InstructionCheck
from assay.support.scrubbing import error_text
from assay.support.values import value_text

_EXAMPLES = 6
_MOST_TOKENS = 300  # of the six sentences that are asked for: an instruction is paid for with every call
_HOT = 1.0  # temperature, high so that proposals differ


class Instruct(dspy.Signature):  # type: ignore[misc]
    """Write a better instruction for a language model: what to do, what to look for and which mistakes to avoid.

    Write in general terms, in at most six sentences. Do not quote the examples.
    """

    instruction: str = dspy.InputField(desc="the instruction so far")
    examples: str = dspy.InputField(desc="inputs with the right outputs")
    improved_instruction: str = dspy.OutputField()


def propose_instruction(
    student: RecordedProgram,
    pool: Sequence[Demonstration],
    session: Session,
    *,
    number: int,
    instruction_check: InstructionCheck,
) -> dict[str, str] | None:
    """One proposal, by predictor; None where the model gave nothing usable. It costs one call.

    Args:
        instruction_check: checks the proposal and counts it if it is rejected.
        number: how many there are already; decides what is shown, and which predictor it is for.
    Raises:
        StopRun: a cap or the user stopped the run.
    """
    rng = random.Random(f"instruction {session.seed} {number}")
    name, predictor = rng.choice(student.program.named_predictors())
    lm = (session.prompt_lm or session.lm).copy(temperature=_HOT)
    drawn = rng.sample(list(pool), min(_EXAMPLES, len(pool)))
    examples = [_run(d, name) for d in drawn]
    try:
        with session.context(), dspy.context(lm=lm, adapter=dspy.ChatAdapter(), trace=[]):
            example_text = "\n\n".join(filter(None, examples)) or "none"
            prediction = dspy.Predict(Instruct)(instruction=predictor.signature.instructions, examples=example_text)
    except StopRun:
        raise
    except Exception as error:  # a failed proposal does not end the search
        unparsed = isinstance(error, AdapterParseError)
        cause = f"the answer of {lm.model} could not be parsed" if unparsed else error_text(error)
        session.progress.say(f"no instruction was proposed: {cause}")
        return None
    text, before = str(prediction.improved_instruction).strip(), predictor.signature.instructions
    reason = instruction_check.why(text, before, sources=[d.task for d in drawn], most_tokens=_MOST_TOKENS)
    if reason is not None:
        instruction_check.rejected.append((number, reason.partition(":")[0]))
    return {name: text} if reason is None and text != before else None


def _format_fields(values: Any) -> str:
    return "\n".join(f"{name}: {value_text(value)}" for name, value in dict(values).items())


def _run(demonstration: Demonstration, name: str) -> str:
    """A demonstration's last call of a predictor; empty where it made none."""
    calls = [(inputs, output) for called, inputs, output in demonstration.steps if called == name]
    return _format_fields({**calls[-1][0], **calls[-1][1]}) if calls else ""
