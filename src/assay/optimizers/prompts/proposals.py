"""Checks of proposed instructions: truncated, unclosed, too long, or copied from the training tasks.

Does not call a model.
"""

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import dspy
from dspy.utils.exceptions import AdapterParseError

from assay.datasets import Task
from assay.datasets.near_duplicates import overlap
from assay.errors import StopRun
from assay.evaluation.session import RecordedProgram, Session
from assay.models import count_tokens
from assay.models.calls import Call
from assay.optimizers.prompts.demonstrations import Demonstration
from assay.support.scrubbing import error_text
from assay.support.values import value_text

MOST_TOKENS = 2000  # of an instruction: more is paid for in every call
_COPIED = 0.1  # share of an instruction's runs of words in training tasks from which it is reported
_TAIL = 60  # characters at the end of an answer that was cut off
_PAIRS = {")": "(", "]": "[", "}": "{"}
_ENDED = re.compile(r"[.!?:;)\]}\"'`*_>|…。！？]$")
_CONTINUES = re.compile(
    r"\b(and|or|the|a|an|to|of|with|for|in|on|by|that|which|if|when|because|is|are|as|from|your|its|such|then)$"
    r"|[,(\-\u2013\u2014]$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Finding:
    """`rule` is `truncated`, `unclosed`, `long` or `copied`; `predictor` is where the instruction is."""

    predictor: str
    rule: str
    text: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def broken(text: str, *, before: str = "") -> tuple[str, str] | None:
    """Why an instruction is not whole: a rule and what is wrong, or None.

    Args:
        before: the instruction that it replaces; what was unclosed there already is not a reason to reject.
    """
    stripped = text.strip()
    if not stripped:
        return "truncated", "it is empty"
    if stripped.count("```") % 2:
        return None if before.count("```") % 2 else ("unclosed", "a ``` fence is not closed")
    inches = re.sub(r'(?<=\d)"', "", stripped)
    plain = re.sub(
        r"```.*?```|`[^`\n]*`|\"[^\"\n]*\"", "", inches, flags=re.S
    )  # brackets in code and quotes need not match
    if (opened := _unclosed(plain)) and not _unclosed(before):
        return "unclosed", f"{opened!r} is not closed"
    if plain.count('"') % 2 and not before.count('"') % 2:
        return "unclosed", "a quotation mark is not closed"
    if _CONTINUES.search(stripped) or (
        len(stripped) > 200 and not _ENDED.search(stripped) and "\n" not in stripped[-80:]
    ):
        return "truncated", f"it ends in the middle of a sentence: {stripped[-40:]!r}"
    return None


def _unclosed(text: str) -> str:
    """The first bracket that is opened and not closed; closing ones alone are list markers or smileys."""
    stack: list[str] = []
    for char in text:
        if char in _PAIRS.values():
            stack.append(char)
        elif char in _PAIRS and stack and stack[-1] == _PAIRS[char]:
            stack.pop()
    return stack[0] if stack else ""


def lint_instructions(
    program: dspy.Module, original: dspy.Module, tasks: Sequence[Task], *, lm: Any = None
) -> list[Finding]:
    """Findings on the instructions that differ from the original program's.

    Args:
        tasks: those that were learned from.
        lm: counts tokens; four characters a token without it.
    """
    before = {name: p.signature.instructions for name, p in original.named_predictors()}
    texts = _texts(tasks)
    return [
        finding
        for name, predictor in program.named_predictors()
        if predictor.signature.instructions != before.get(name, "")
        for finding in _of(name, predictor.signature.instructions, before.get(name, ""), texts, lm)
    ]


def _texts(tasks: Sequence[Task]) -> list[str]:
    return [" ".join(map(str, [*task.inputs.values(), *task.expected.values()])) for task in tasks]


def _of(name: str, text: str, before: str, texts: Sequence[str], lm: Any, most: int = MOST_TOKENS) -> Iterator[Finding]:
    if (problem := broken(text, before=before)) is not None:
        yield Finding(name, *problem)
    if (tokens := count_tokens(lm, text)) > most:
        yield Finding(name, "long", f"it has {tokens} tokens, more than {most}, and each call pays for them")
    if (share := overlap(text, texts, before=before)) >= _COPIED:
        yield Finding(
            name,
            "copied",
            f"{share:.0%} of its word sequences occur in training tasks: it may have memorised them",
        )


class InstructionCheck:
    """Checks proposed instructions, of the `auto` search or of a teleprompter.

    Each is checked before it is evaluated, and again in the resulting program.

    Args:
        original: the program before optimization; its own instructions are never rejected.
        lm: counts tokens.

    Attributes:
        rejected: (proposal number, rule) of the proposals that the `auto` search rejected.
    """

    def __init__(self, original: dspy.Module, lm: Any = None) -> None:
        self.before = {name: p.signature.instructions for name, p in original.named_predictors()}
        self.lm, self.cut = lm, list[str]()
        self.rejected: list[tuple[int, str]] = []

    def store_truncated(self, call: Call) -> None:
        """Stores the end of an answer that was truncated at its token limit."""
        if (call.response or {}).get("finish_reason") == "length" and call.output:
            self.cut.append(call.output.rstrip()[-_TAIL:])

    @contextmanager
    def listening(self, *lms: Any) -> Iterator[None]:
        """Inside, truncated answers of these models are stored, so that no instruction is made of them."""
        engines = {id(lm.recording): lm.recording for lm in lms if lm is not None}.values()
        before = [engine.observers for engine in engines]
        for engine in engines:
            engine.observers = (*engine.observers, self.store_truncated)
        try:
            yield
        finally:
            for engine, observers in zip(engines, before, strict=True):
                engine.observers = observers

    def why(
        self, text: str, before: str = "", *, sources: Sequence[Task] = (), most_tokens: int = MOST_TOKENS
    ) -> str | None:
        """Why an instruction is rejected, as `rule: reason`; None if it is accepted.

        Args:
            before: the instruction that it replaces.
            sources: tasks that it was written from and must not copy.
            most_tokens: the longest instruction that is accepted.
        """
        if text == before or text in self.before.values():
            return None
        tail = text.strip()[-_TAIL:]
        if len(tail) >= 20 and any(end.endswith(tail) or tail.endswith(end) for end in self.cut if len(end) >= 20):
            return "truncated: the model's answer was cut off at its limit of tokens"
        finding = next(_of("", text, before, _texts(sources), self.lm, most_tokens), None)
        return f"{finding.rule}: {finding.text}" if finding else None

    def refuses(self, program: Any) -> bool:
        """Whether one of a program's instructions is rejected."""
        inner = getattr(program, "program", program)
        return any(
            self.why(p.signature.instructions, self.before.get(name, "")) is not None
            for name, p in inner.named_predictors()
        )

    def restore_rejected(self, program: dspy.Module) -> list[str]:
        """Restores the old instruction where the new one is rejected; returns a note for each."""
        notes = []
        for name, predictor in program.named_predictors():
            why = self.why(predictor.signature.instructions, self.before.get(name, ""))
            if why is not None and name in self.before:
                predictor.signature = predictor.signature.with_instructions(self.before[name])
                notes.append(f"the proposed instruction of {name} was rejected ({why}); it keeps its own")
        return notes

    def checked(self, program: dspy.Module, original: dspy.Module, tasks: Sequence[Task]) -> list[str]:
        """Applies `restore_rejected`; returns its notes and notes on other findings in the remaining instructions.

        Args:
            tasks: the training tasks.
        """
        notes = self.restore_rejected(program)
        findings = lint_instructions(program, original, tasks, lm=self.lm)
        return notes + [f"instruction of {finding.predictor}: {finding.text}" for finding in findings]


# -- Instructions that a model proposes for one predictor, from training examples.


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
        cause = f"the answer of {lm.model} lacks the field improved_instruction" if unparsed else error_text(error)
        session.progress.say(
            f"no instruction was proposed: {cause} (traces list --source outside has its calls); the search continues"
        )
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
