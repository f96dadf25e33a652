"""Checks of proposed instructions: truncated, unclosed, too long, or copied from the training tasks.

Does not call a model.
"""

import random
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import dspy
from dspy.utils.exceptions import AdapterParseError

from assay.datasets import Task
from assay.datasets.keys import overlap
from assay.datasets.memorised import memorised
from assay.errors import StopRun
from assay.evaluation.session import RecordedProgram, Session
from assay.models import count_tokens
from assay.models.calls import Call
from assay.optimizers.prompts.demonstrations import Demonstration
from assay.programs.foreign_agent import TextAgent
from assay.programs.texts import why_refused
from assay.support.scrubbing import error_text
from assay.support.values import value_text

MOST_TOKENS = 2000  # of an instruction: more is paid for in every call
UNREADABLE = "unreadable"  # the rule by which an answer without the asked-for field is rejected
_GROWTH = 300  # tokens that an agent's text may have more than its own
_COPIED = 0.1  # share of an instruction's runs of words in training tasks from which it is reported
_TAIL = 60  # characters at the end of an answer that was cut off
_PAIRS = {")": "(", "]": "[", "}": "{"}
_ENDED = re.compile(r"[.!?:;)\]}\"'`*_>|…。！？]$")
_CONTINUES = re.compile(
    r"\b(and|or|the|a|an|to|of|with|for|in|on|by|that|which|if|when|because|is|are|as|from|your|its|such|then)$"
    r"|[,(\-\u2013\u2014]$",
    re.IGNORECASE,
)


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


def _texts(tasks: Sequence[Task]) -> list[str]:
    return [" ".join(map(str, [*task.inputs.values(), *task.expected.values()])) for task in tasks]


class InstructionCheck:
    """Checks proposed instructions, of the `auto` search or of a teleprompter.

    Each is checked before it is evaluated, and again in the resulting program.

    Args:
        original: the program before optimization; its own instructions are never rejected.
        lm: counts tokens.

    Attributes:
        proposed: number of proposals of the `auto` search and of GEPA.
        rejected: (proposal number, rule) of the rejected ones.
    """

    def __init__(self, original: dspy.Module, lm: Any = None) -> None:
        self.before = {name: p.signature.instructions for name, p in original.named_predictors()}
        self.of_agent = isinstance(original, TextAgent)
        self._most = original.most_tokens if isinstance(original, TextAgent) else MOST_TOKENS
        self.lm, self.cut = lm, list[str]()
        self.proposed = 0
        self.rejected: list[tuple[int, str]] = []

    def rejections(self) -> list[str]:
        """A note on the proposed instructions that were not taken."""
        rules = Counter(rule for _, rule in self.rejected)
        counts = ", ".join(f"{count} {rule}" for rule, count in sorted(rules.items()))
        return [f"{rules.total()} of {self.proposed} proposed instructions were rejected: {counts}"] if rules else []

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
        self,
        text: str,
        before: str = "",
        *,
        sources: Sequence[Task] = (),
        beside: Sequence[str] = (),
        most_tokens: int = MOST_TOKENS,
    ) -> str | None:
        """Why an instruction is rejected, as `rule: reason`; None if it is accepted.

        The rule is `truncated`, `unclosed`, `long` or `copied`; of an agent's text also those of
        `assay.programs.texts.why_refused`.

        Args:
            before: the instruction that it replaces.
            sources: tasks that it was written from and must not copy.
            beside: the other texts of the same candidate, which must not answer these tasks together with it.
            most_tokens: the longest instruction that is accepted.
        """
        if text == before or text in self.before.values():
            return None
        tail = text.strip()[-_TAIL:]
        if len(tail) >= 20 and any(end.endswith(tail) or tail.endswith(end) for end in self.cut if len(end) >= 20):
            return "truncated: the model's answer was cut off at its limit of tokens"
        if (problem := broken(text, before=before)) is not None:
            return ": ".join(problem)
        if self.of_agent and (refused := why_refused(before, text)) is not None:
            return refused
        if (tokens := count_tokens(self.lm, text)) > most_tokens:
            return f"long: it has {tokens} tokens, more than {most_tokens}, and each call pays for them"
        own = "\n".join(self.before.values()) if self.of_agent else before  # of an agent not what the search has added
        if len(known := memorised("\n".join([text, *beside]), sources, before=own)):
            return f"copied: words of {len(known)} training tasks stand next to their answers: it has memorised them"
        if (share := overlap(text, _texts(sources), before=before)) >= _COPIED:
            return f"copied: {share:.0%} of its word sequences occur in training tasks: it may have memorised them"
        return None

    def limit_of(self, name: str) -> int:
        """The most tokens of an instruction of a predictor: of an agent's text 300 more than its own or twice as many,
        at most `most_tokens` unless its own has more."""
        if not self.of_agent:
            return self._most
        own = count_tokens(self.lm, self.before[name])
        return max(own, min(self._most, max(own + _GROWTH, 2 * own)))

    def refuses(self, program: Any) -> bool:
        """Whether one of a program's instructions is rejected."""
        inner = getattr(program, "program", program)
        return any(
            self.why(p.signature.instructions, before, most_tokens=self.limit_of(name)) is not None
            for name, p in inner.named_predictors()
            if (before := self.before.get(name)) is not None
        )

    def checked(self, program: dspy.Module, tasks: Sequence[Task]) -> list[str]:
        """Restores the old instruction where the new one is rejected.

        Args:
            tasks: the training tasks.
        Returns:
            A note for each of them, and for each other instruction that copies training tasks.
        """
        rejected, copied = list[str](), list[str]()
        for name, predictor in program.named_predictors():
            text, before = predictor.signature.instructions, self.before.get(name, "")
            if (why := self.why(text, before, most_tokens=self.limit_of(name))) is not None and name in self.before:
                predictor.signature = predictor.signature.with_instructions(before)
                rejected.append(f"the proposed instruction of {name} was rejected ({why}); it keeps its own")
            elif (why := self.why(text, before, sources=tasks)) is not None:
                copied.append(f"instruction of {name}: {why.partition(': ')[2]}")
        return rejected + copied


@dataclass(frozen=True)
class Proposed:
    """Instructions that a model proposed, by predictor, and why."""

    texts: Mapping[str, str]
    why: tuple[str, ...] = ()


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
    among: Collection[str] = (),
) -> Proposed | None:
    """One proposal; None where the model gave nothing usable. It costs one call.

    Args:
        instruction_check: checks the proposal and counts it if it is rejected.
        number: how many there are already; decides what is shown, and which predictor it is for.
        among: names of the predictors that it may be for; empty for all.
    Raises:
        StopRun: a cap or the user stopped the run.
    """
    rng = random.Random(f"instruction {session.seed} {number}")
    predictors = student.program.named_predictors()
    name, predictor = rng.choice([pair for pair in predictors if not among or pair[0] in among])
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
        if unparsed := isinstance(error, AdapterParseError):
            instruction_check.rejected.append((number, UNREADABLE))
        cause = "its answer has no field improved_instruction" if unparsed else error_text(error)
        session.progress.say(
            f"{lm.model} proposed no instruction: {cause}. Its calls: assay traces list --source outside. "
            "The search continues"
        )
        return None
    text, before = str(prediction.improved_instruction).strip(), predictor.signature.instructions
    reason = instruction_check.why(text, before, sources=[d.task for d in drawn], most_tokens=_MOST_TOKENS)
    if reason is not None:
        instruction_check.rejected.append((number, reason.partition(":")[0]))
    return Proposed({name: text}) if reason is None and text != before else None


def _format_fields(values: Any) -> str:
    return "\n".join(f"{name}: {value_text(value)}" for name, value in dict(values).items())


def _run(demonstration: Demonstration, name: str) -> str:
    """A demonstration's last call of a predictor; empty where it made none."""
    calls = [(inputs, output) for called, inputs, output in demonstration.steps if called == name]
    return _format_fields({**calls[-1][0], **calls[-1][1]}) if calls else ""
