"""The shipped program `code_repair`: edits a source line by line until its visible tests pass.

One predictor chooses the line, another one writes what replaces it: a small model can do each of these, but not write
the whole source again. Tests run in the sandbox, and what they report is the feedback for the next edit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Unpack

import dspy
from dspy.utils.exceptions import AdapterParseError, ContextWindowExceededError

from assay.errors import FailureKind, LoopStopped, ProgramError
from assay.models import supports
from assay.models.limits import ToolOverTime
from assay.programs.agent import WRITTEN_DECISIONS, Agent, AgentSettings
from assay.programs.estimate import choice_margin
from assay.programs.sandbox import Suite, SuiteResult, run_tests
from assay.programs.sandbox.isolation import Limits, isolations_of
from assay.programs.thinking import OFF
from assay.support.scrubbing import error_text
from assay.traces.recorder import note_failure, note_isolation

from .edits import Edit, applied, excerpt, functions_of, is_same, replacement_of

_REPLACEMENT = 400  # characters that replace a line
_FAILURES = 3  # failed tests in a report
_SHORT = 300  # characters of an attempt's outcome

_TASK = "Correct the code so that the tests pass."
_CHOOSE = "One function of the code is wrong. Choose the function that makes the tests fail."
_LOCATE = "One line of the code is wrong. Find the line that makes the tests fail."
_REWRITE = "Correct the wrong line of code, so that the tests pass. Change as little as possible."
_REVIEW = (
    "The tests pass. Keep the edits if they correct the mistake for every input and change nothing else. "
    "Revise them if they only suit the tests or change too much."
)


@dataclass(frozen=True)
class _Version:
    """A source with the outcome of its visible tests, and the edits that led to it."""

    source: str
    passed: int
    total: int
    report: str
    edits: tuple[Edit, ...] = ()

    @property
    def works(self) -> bool:
        return self.passed == self.total


class CodeRepair(Agent):
    """Repairs Python code by edits of single lines until the visible tests pass.

    Inputs are `code` and `visible_tests` (Python source with asserts or test functions, or a list of
    `[expression, expected]`), as in the dataset `mutants:`; `function`, the name of what to repair, is optional. The
    output `code` is the whole source with the edits, or unchanged if no edit helped. It is never empty.

    An edit is a step: choose a line, write its replacement, run the tests. An edit that passes more tests than the
    best version so far is kept, others are undone. The run ends when all visible tests pass, after `max_steps`, or with
    the failure kind `loop` when an edit gives a source that was already tried. The first edit that changes nothing is
    not counted as a loop. From `reasoning_depth` 6 on, a working edit is reviewed; a rejected one is kept unless
    another one works with at most as many edits. `tool_usage_threshold` has no effect: every edit has to be tested.

    Args:
        timeout_s: for all visible tests of one version together.
        memory_mb: of the processes of the tests.
        isolation: `bubblewrap`, `landlock`, `none`, or `auto` for the first of the first two that works.
    Raises:
        ConfigError: a limit is out of range, or there is no such isolation.
    """

    input_names: ClassVar = ("code", "visible_tests")

    def __init__(
        self,
        *,
        timeout_s: float = 10.0,
        memory_mb: int = 512,
        isolation: str = "auto",
        **agent: Unpack[AgentSettings],
    ) -> None:
        super().__init__(**agent)
        Limits(timeout_s=timeout_s, memory_mb=memory_mb)
        isolations_of(isolation)
        self.timeout_s, self.memory_mb, self.isolation = timeout_s, memory_mb, isolation
        self.config = {"timeout_s": timeout_s, "memory_mb": memory_mb, "isolation": isolation}
        tests, solution = dspy.InputField(desc="tests that the code must pass"), dspy.OutputField(desc="Python code")
        # of a revision, whose draft is the code: a signature has no input and output of one name
        self.task_signature = dspy.Signature({"visible_tests": (Any, tests), "code": (str, solution)}, _TASK)
        code = {"code": (str, dspy.InputField(desc="the source with line numbers"))}
        failed = {
            "failures": (str, dspy.InputField(desc="tests that fail")),
            "attempts": (str, dspy.InputField(desc="edits that did not help")),
        }
        edited = {
            "tests": (str, dspy.InputField(desc="tests that pass now")),
            "edits": (str, dspy.InputField(desc="what was changed")),
        }
        wrong = {"old_line": (str, dspy.InputField(desc="the wrong line"))}
        number = dspy.OutputField(desc="number of the wrong line")
        text = dspy.OutputField(desc="Python code that replaces old_line", max_length=_REPLACEMENT)
        verdict = {"verdict": (Literal["keep", "revise"], dspy.OutputField())}
        outline = {"functions": (str, dspy.InputField(desc="the functions of the code"))}
        name = dspy.OutputField(desc="name of the wrong function")
        self.choose = dspy.Predict(dspy.Signature({**outline, **failed, "function": (str, name)}, _CHOOSE))
        self.locate = dspy.Predict(dspy.Signature({**code, **failed, "line": (int, number)}, _LOCATE))
        self.rewrite = dspy.Predict(dspy.Signature({**code, **failed, **wrong, "new_line": (str, text)}, _REWRITE))
        self.review = dspy.Predict(dspy.Signature({**code, **edited, **verdict}, _REVIEW))

    def solve(self, **inputs: Any) -> dspy.Prediction:
        run = _Run(self, inputs)
        run.repair(self.agent_parameters.max_steps - self.rounds)
        run.reviewed(self.rounds)
        return dspy.Prediction(code=run.best.source, steps=run.steps)


class _Run:
    """The repair of one source."""

    def __init__(self, agent: CodeRepair, inputs: Mapping[str, Any]) -> None:
        self.agent = agent
        source = getattr(inputs.get("code"), "code", inputs.get("code"))  # `dspy.Code`
        if not isinstance(source, str) or not source.strip():
            raise ProgramError(f"code={source!r} must be the source to repair; it is empty or not text")
        name = str(inputs.get("entry_point") or inputs.get("function") or "")
        self.suite = Suite.parse(inputs.get("visible_tests"), name)
        self.steps: list[dict[str, Any]] = []
        self.attempts: list[str] = []
        self.original = self.best = self._tested(source, ())
        self.tried = [source]

    def repair(self, steps: int) -> None:
        """Makes up to `steps` edits, until the visible tests pass or the edits repeat themselves."""
        for _ in range(steps):
            if self.best.works or not self._step():
                return

    def reviewed(self, rounds: int) -> None:
        """Reviews a working version up to `rounds` times; if it is rejected, tries one with fewer edits or other
        ones, from the original.
        """
        for _ in range(rounds):
            accepted = self.best
            if not accepted.works or not accepted.edits or self._keeps(accepted):
                return
            self.attempts.append(f"{_listed(accepted)}: passes these tests, but is not a general correction")
            self.best = self.original
            self._step(reviewing=True)
            if not self.best.works or len(self.best.edits) > len(accepted.edits):
                self.best = accepted

    def _step(self, *, reviewing: bool = False) -> bool:
        """Proposes and tests one edit. Returns False if another step has no use.

        Args:
            reviewing: a repeated edit answers the review, and is not a loop.
        """
        base = self.best
        try:
            edit = self._proposed(base)
        except AdapterParseError:
            self.attempts.append("an edit that could not be read")
            return True
        except (ContextWindowExceededError, LoopStopped):  # the next prompt is longer, and no better
            return False
        source = applied(base.source, edit)
        if any(is_same(source, other) for other in self.tried):
            if self.attempts:  # the same code gives the same result
                if not reviewing:
                    note_failure(FailureKind.LOOP)
                return False
            self.attempts.append(f"{edit}: the line is the same as before")
            return True
        self.tried.append(source)
        version = self._tested(source, (*base.edits, edit))
        if version.passed > base.passed:
            self.best = version
        if not version.works:
            self.attempts.append(f"{edit}: {_cut(version.report, _SHORT)}")
        return True

    def _proposed(self, base: _Version) -> Edit:
        """The edit that the model chooses: which line, then what replaces it; in a long source first which function."""
        agent, limit = self.agent, self.agent.agent_parameters.context_length
        failures = {"failures": _cut(base.report, limit)}
        # at four characters per token, half of the context is for the code, and a quarter for the failed tests
        code = excerpt(base.source, 2 * limit)
        parts = {} if code.whole else functions_of(base.source)
        if len(parts) > 1:
            outline = {"functions": _cut("\n".join(parts), 2 * limit)}
            name = self._chosen(agent.choose, "function", tuple(parts), {**outline, **failures})
            code = excerpt(base.source, 2 * limit, parts[name])
        inputs = {"code": code.text, **failures}
        line = int(self._chosen(agent.locate, "line", code.choices, inputs))
        inputs["old_line"] = base.source.split("\n")[line - 1].strip()
        written = self._asked(agent.rewrite, agent.rewrite.signature, inputs)
        return Edit(line, replacement_of(str(written.new_line), line))

    def _chosen(self, predictor: dspy.Predict, field: str, choices: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
        """One of the choices, after as much thinking as budget and policy allow."""
        agent, written = self.agent, bool(dspy.settings.get(WRITTEN_DECISIONS))
        dynamic = agent.thinking_policy != OFF and not written
        reads = dynamic and supports(dspy.settings.lm, "top_logprobs")
        words = list(map(str, choices)) if reads else []

        def ask(signature: Any, asked: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any, float | None]:
            answer = self._asked(predictor, signature, asked, **options)
            return answer, answer[field], choice_margin(answer, field, words)

        signature = predictor.signature.with_updated_fields(field, type_=Literal[choices])
        tokens, kept = agent.thought_tokens, field if reads else ""
        return agent.decided(ask, signature, inputs, tokens=tokens, field=kept, reads=reads).choice

    def _asked(self, predictor: dspy.Predict, signature: Any, inputs: dict[str, Any], **config: Any) -> Any:
        filled = self.agent.fit_context(predictor, signature, inputs, self.attempts, "attempts")
        return predictor(signature=signature, config=config, **filled)

    def _keeps(self, version: _Version) -> bool:
        """Whether the model accepts a working version. An answer that cannot be read accepts it."""
        agent, limit = self.agent, self.agent.agent_parameters.context_length
        lines = sorted({edit.line for edit in version.edits})
        code = excerpt(version.source, 2 * limit)
        if not code.whole:
            spans = functions_of(version.source).values()
            code = excerpt(version.source, 2 * limit, [n for span in spans if set(lines) & set(span) for n in span])
        tests = _cut("\n".join(self.suite.names), limit)
        inputs = {"code": code.text, "tests": tests}
        try:
            filled = agent.fit_context(
                agent.review, agent.review.signature, inputs, [_listed(version)], "edits", keep=1
            )
            return bool(agent.review(**filled).verdict == "keep")
        except (AdapterParseError, ContextWindowExceededError, LoopStopped):
            return True

    def _tested(self, source: str, edits: tuple[Edit, ...]) -> _Version:
        """Runs the visible tests on a source, as a tool call of the agent."""
        agent, edit = self.agent, edits[-1] if edits else None
        results: list[SuiteResult] = []

        def run_visible(line: int = 0, replacement: str = "") -> str:
            result = run_tests(
                source, self.suite, timeout_s=agent.timeout_s, memory_mb=agent.memory_mb, isolation=agent.isolation
            )
            note_isolation(result.isolation)
            results.append(result)
            return result.feedback(_FAILURES)

        tool = dspy.Tool(run_visible, name="run_tests", desc="Runs the visible tests on the code after an edit.")
        arguments = {"line": edit.line, "replacement": edit.text} if edit is not None else {}
        step: dict[str, Any] = {"tool": tool.name, "arguments": arguments, "result": None, "error": None}
        self.steps.append(step)
        try:
            step["result"] = report = str(tool(**arguments))
        except ToolOverTime as error:  # a shorter limit than that of the tests
            step["error"] = report = error_text(error)
        passed = results[0].passed if results else 0
        return _Version(source, passed, len(self.suite.names), report, edits)


def _listed(version: _Version) -> str:
    return "; ".join(map(str, version.edits))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
