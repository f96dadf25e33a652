"""`assay run`: recorded predictions of a program or an artifact, one or many. Scores nothing."""

import logging
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

from assay.commands.groups import InStore, Output, Reported, Trusting
from assay.errors import AssayError, ConfigError, DataError, ModelError, NoJsonForm, ProgramFailed, WriteFailed
from assay.jobs.groups import Budget, Model, Source, State
from assay.models.limits import DEFAULT_S
from assay.models.roles import DEFAULT_MODEL
from assay.support.numbers import counted
from assay.support.options import Flag, Seconds, function_of
from assay.support.report import Report
from assay.support.terminal import echo
from assay.support.values import json_text, json_value, value_text

if TYPE_CHECKING:
    import dspy

    from assay.deployment import Artifact
    from assay.models import Thinking
    from assay.models.roles import Endpoint
    from assay.traces import Rollout

    Prediction: TypeAlias = dspy.Prediction
else:
    Prediction = Any  # so that the types can be read without the heavy packages


class Predictor(Trusting, InStore, Model):
    """A program that is run."""

    program: Annotated[Source, Flag(path=True, key=False)] = field(kw_only=False)
    """Program: path/file.py:Class, package.module:Class, an artifact's folder or a shipped name."""
    state: State = None
    """State of the program, as DSPy's program.save('x.json') writes it: instructions, field texts and demonstrations.
    It must have the program's predictors and fields. Not for an artifact, which has its own."""
    model: str | None = None
    """Language model; by default that of the artifact, or of the program's predictors if each has one."""
    thinking: Budget = None
    """How much the program may think in a call: a number of tokens, minimal, low, medium, high, xhigh, max, off or
    auto (no limit). By default that of the artifact. A model or program that cannot keep it is refused."""
    lm: Annotated[Any, Flag(key=False, shown=False)] = None
    """The model as an object, in place of `model`."""
    replace_lms: bool = False
    """Call the language model in place of the models that the program makes itself. By default they are used
    unchanged, even with `model`."""
    task_timeout: Seconds = DEFAULT_S
    """Time limit of one prediction in seconds."""

    @contextmanager
    def predictor(
        self,
        *,
        columns: Collection[str] | None = None,
        folder: Path | None = None,
        rows: Path | None = None,
        outputs: Sequence[Path] = (),
        say: Callable[[str], None] = lambda _: None,
        ended: "Callable[[Rollout], None]" = lambda _: None,
    ) -> Iterator[Callable[..., Prediction]]:
        """Context with a function that makes recorded predictions.

        The function's argument `where` names the position of a data row. The row's owner, metadata, task type and split
        are then stored as in `evaluate`; other columns that are not inputs of the program are left out.

        Args:
            columns: columns of the data rows, if any; the program's inputs must be among them.
            folder: of the local files that inputs may name, such as images; None: they may name none.
            rows: file of the inputs, in which an erasure looks for texts.
            outputs: files that the predictions are written to, which an erasure names.
            say: is told which of the columns are inputs and which are left out, and which model is the default.
            ended: is called with each rollout after its end.
        Raises:
            AssayError: what was wrong, which rule, what to do.
        """
        import dspy

        from assay.datasets.splits import used_columns
        from assay.datasets.tasks import make_task, missing_inputs, other_inputs, own_containers, owners_of
        from assay.deployment import load_artifact
        from assay.deployment.artifact import check_pinned
        from assay.evaluation import SilentProgress
        from assay.evaluation.session import stored_fields
        from assay.jobs.arguments import check_state, own_model
        from assay.jobs.ending import ended_in_order
        from assay.jobs.job import salt_in
        from assay.jobs.opening import answered_within, opened_store
        from assay.models import Thinking, get_lm
        from assay.models.lm import with_recording
        from assay.programs import program_fields, program_version
        from assay.programs.budgets import check_budget
        from assay.programs.isolation import running
        from assay.programs.loading import full_name
        from assay.programs.wrapping import as_prediction
        from assay.sources.artifact_files import is_artifact
        from assay.traces import Recorder, Rollout
        from assay.traces.listening import replacing
        from assay.traces.records import subject_digest
        from assay.traces.store.sealing import claim_salt, resolve_salt

        program = full_name(str(self.program))
        artifact = load_artifact(program) if is_artifact(program) else None
        budget = Thinking.of(self.thinking)
        if artifact is not None:
            check_state(program, self.state)
        built: Any = artifact.runnable(budget) if artifact else _uncompiled(program, budget, self.state)
        fields = program_fields(built)
        if columns and fields is not None:
            if missing := fields.missing(columns):
                raise missing_inputs("the data", missing, columns)
            say(used_columns(columns, fields))
        own = self.lm
        if own is None and not (artifact or self.model or self.api_base or self.api_key_env or self.replace_lms):
            own = own_model(built)
        name = self.model or (
            artifact.model if artifact and own is None else DEFAULT_MODEL if own is None else own.model
        )
        if name == DEFAULT_MODEL and artifact is None and self.model is None:
            say(f"model: {DEFAULT_MODEL}, the default; `model=NAME` names another")
        salt = resolve_salt(None, self.store, artifact=salt_in(artifact)) if salt_in(artifact) else None
        with opened_store(self.store, SilentProgress()) as opened:
            if salt is not None:  # rollouts may be of sealed tasks; the salt identifies them
                claim_salt(opened, salt)
            people = set[str]()
            # first: erasure finds them after a kill too
            opened.put_searched(*outputs, *([] if rows is None else [rows]))
            recorder = Recorder(opened)
            recorded: dict[str, Any] = {"observers": [recorder.observe], "price": self.price}
            lm = (
                get_lm(name, **recorded, **self._endpoint(artifact).client(name))
                if own is None
                else with_recording(own, **recorded)
            )
            if artifact:
                check_pinned(artifact, lm)
            if budget is not None:
                check_budget(built, lm, budget, prompt_format=artifact.settings["adapter"] if artifact else None)

            def predict(inputs: Mapping[str, Any], *, where: str | None = None) -> Prediction:
                stored: dict[str, Any] = owners_of(inputs)
                if where is not None:
                    task = make_task(inputs, where=where, inputs=fields, folder=folder)
                    inputs = task.inputs
                    # Expected outputs are left out, as the columns that are not used.
                    of_row = {"expected": {}, "task_type": task.task_type, "split": task.split or ""}
                    stored = {**stored_fields(task), **of_row}
                elif fields is not None:
                    if fields.missing(inputs) or set(inputs) - fields.inputs.keys():
                        raise ConfigError(other_inputs(program, list(fields.inputs), inputs))
                    inputs = fields.converted(inputs, where=program, folder=folder)
                if subject := stored.get("data_subject"):
                    people.add(subject_digest(subject))
                rollout = Rollout(
                    phase="run", program=artifact.manifest["program"] if artifact else program,
                    inputs=json_value(inputs, placeholders=True),
                    model=name,
                    program_version=program_version(built, artifact.settings["adapter"] if artifact else None),
                    parameters=artifact.settings["parameters"] if artifact else {},
                    **stored,
                )  # fmt: skip
                called = replacing(lm) if self.replace_lms else {"lm": lm}
                try:
                    with _as_model_errors(), dspy.context(**called), recorder.active(), recorder.rollout(rollout):
                        with running(built) as copy:
                            prediction = answered_within(
                                self.task_timeout, lambda: as_prediction(copy(**own_containers(dict(inputs))))
                            )
                        rollout.prediction = json_value(dict(prediction.items()), placeholders=True)
                finally:
                    ended(rollout)
                return prediction

            meter = lm.recording.meter
            with ended_in_order(meter, recorder, opened, SilentProgress(), to_continue="run it again"):
                try:
                    yield predict
                finally:
                    for path in outputs:
                        if path.is_file():
                            opened.put_artifact(str(path.resolve()), sorted(people))

    def _endpoint(self, artifact: "Artifact | None") -> "Endpoint":
        """Address and key of the model: as set, else those of the artifact, unless another model is named."""
        from assay.models.roles import Endpoint

        if self.api_base is None and self.model is None and artifact:
            return Endpoint(artifact.endpoint.api_base, self.api_key_env or artifact.endpoint.api_key_env)
        return Endpoint(self.api_base, self.api_key_env)


@contextmanager
def _as_model_errors() -> Iterator[None]:
    """Raises a failure of the model, or an answer of it that cannot be used, as a `ModelError`."""
    from dspy.utils.exceptions import AdapterParseError, LMError

    from assay.errors import LoopStopped
    from assay.models.hosted import error_reason

    try:
        yield
    except LMError as error:
        raise ModelError(f"the model did not answer: {error_reason(error)}") from error
    except LoopStopped as error:
        raise ModelError(f"the model gave no answer: {error}") from error
    except AdapterParseError as error:
        raise ModelError(f"the answer could not be parsed: {str(error.lm_response)[:300]!r}") from error


def _uncompiled(program: str, thinking: "Thinking | None", state: str | Path | None) -> "dspy.Module":
    """A program that is not an artifact, with a saved state and a budget if there are any."""
    from assay.programs import load_program
    from assay.programs.budgets import set_thinking
    from assay.programs.compose import CallSettings, configured, is_agent
    from assay.programs.state import with_saved_state

    loaded = load_program(program)
    if state is not None:
        loaded = with_saved_state(loaded, state)
    if thinking is None:
        return loaded
    set_thinking(loaded, thinking)
    return loaded if is_agent(loaded) else configured(loaded, CallSettings(thinking=thinking))


class Run(Predictor):
    """Make one recorded prediction with a program or an artifact. Without a model, an artifact uses its own.

    Raises:
        ConfigError: `inputs` does not have the program's inputs.
        ModelError: the model did not answer.
        ProgramFailed: it exceeded `task_timeout`, or called `sys.exit()`.
        AssayError: what was wrong, which rule, what to do.
    """

    inputs: Annotated[Mapping[str, Any], Flag(key=False)] = field(kw_only=False)
    """Names of inputs and their values."""

    def run(self) -> Prediction:
        with self.predictor() as predict:
            return predict(self.inputs)


@dataclass(frozen=True, kw_only=True, repr=False)
class PredictionReport(Report):
    """A prediction, as the command line shows it."""

    is_data: ClassVar[bool] = True

    fields: Mapping[str, Any]
    called: "Called"
    lack: str  # why the fields are not all of the answer; empty if they are

    def to_dict(self) -> dict[str, Any]:
        return {**self.called.to_dict(), **self.fields}

    def lines(self) -> Iterator[str]:
        from assay.traces.records import RUN_FIELDS

        yield from (f"{key}: {value_text(value)}" for key, value in self.fields.items() if key not in RUN_FIELDS)
        for step in self.fields.get("steps", []):
            result = step["result"] if step["error"] is None else f"error: {step['error']}"
            yield f"  {step['tool']}({', '.join(map(str, step['arguments'].values()))}) = {result}"

    def warnings(self) -> Iterator[str]:
        yield from self.called.lines()


@dataclass(frozen=True, kw_only=True, repr=False)
class RowsReport(Report):
    """Predictions of rows, which were written as they came."""

    is_stream: ClassVar[bool] = True

    failed: int
    called: "Called"

    def warnings(self) -> Iterator[str]:
        yield from self.called.lines()

    @property
    def failure(self) -> str:
        return f"{counted(self.failed, 'rows')} failed; each has its error in the output" if self.failed else ""


class RunOutput(Output):
    """Output."""

    def finish(self, command: Any, report: Any) -> None:
        if isinstance(report, PredictionReport) and report.lack:
            raise ProgramFailed(f"the answer is not whole: {report.lack}. Return values that have one")


class RunProgram(Reported, Predictor):
    """Run PROGRAM (an artifact's folder or a program's name) and record its calls.

    Makes one prediction from INPUTS, each NAME=VALUE, or one for each row of a file. Columns that are not inputs of the
    program are left out, except that a row's `id` is part of its prediction, and that its `data_subject`, `tenant`,
    `consent`, `metadata`, `task_type` and `split` are stored. A row that fails becomes an object with `error` and its
    `line`, and the exit code is 1.
    """

    OUTPUT: ClassVar[Any] = RunOutput

    inputs: Annotated[Sequence[str], Flag(key=False)] = field(default=(), kw_only=False)
    """Inputs, each NAME=VALUE."""
    file: Annotated[str | None, Flag(metavar="FILE", key=False)] = None
    """File of inputs: a .jsonl, .json, .csv or .parquet file; - for JSON lines on standard input."""
    out: Annotated[str | None, Flag(metavar="FILE", key=False)] = None
    """File for the predictions of `file`, as JSON lines; by default standard output."""
    rename: Annotated[Mapping[str, str], Flag(metavar="COLUMN=NAME", key=False)] = field(default_factory=dict)
    """Rename a column of `file`."""
    stdout: Annotated[Any, Flag(key=False, shown=False)] = None

    def check(self) -> None:
        if bool(self.inputs) == (self.file is not None):
            raise ConfigError("give either inputs as NAME=VALUE, or a `file` (- for standard input)")
        if self.file is None and (idle := self.changed("out", "rename")):
            raise ConfigError("goes with `file`", field=idle[0])

    def run(self) -> PredictionReport | RowsReport:
        from assay.sources.artifact_files import unproven_note

        logging.getLogger("dspy").setLevel(logging.ERROR)
        if (note := unproven_note(str(self.program))) is not None:
            self.reporter.say(f"note: {note}")
        return self._one() if self.file is None else self._rows(self.file)

    def _one(self) -> PredictionReport:
        from assay.traces.records import RUN_FIELDS

        inputs, called = self._pairs(), Called()
        with self.predictor(folder=Path.cwd(), say=self.reporter.say, ended=called.add) as predict:
            prediction = predict(inputs)
        lack = ""
        try:
            json_value({name: value for name, value in prediction.items() if name not in RUN_FIELDS})
        except NoJsonForm as error:
            lack = str(error)
        shown = json_value(dict(prediction.items()), placeholders=True)
        return PredictionReport(fields=shown, called=called, lack=lack)

    def _pairs(self) -> dict[str, str]:
        """The inputs by name. An input that is not NAME=VALUE is refused with the names that the program takes."""
        pairs = [text.partition("=") for text in self.inputs]
        wrong = next(
            (name + equals + value for name, equals, value in pairs if not equals or re.search(r"\s", name)), None
        )
        if wrong is None and (same := next((n for n, _, _ in pairs if [p[0] for p in pairs].count(n) > 1), None)):
            raise ConfigError(f"gives {same!r} twice", field="inputs")
        if wrong is None:
            return {name: value for name, _, value in pairs}
        try:
            names = inputs_of(str(self.program))
        except AssayError:
            names = None
        if not names:
            raise ConfigError(f"input {wrong!r} must be NAME=VALUE")
        values = [f"{names[0]}={wrong}", *(f"{name}=…" for name in names[1:])]
        takes = f"input {names[0]}" if len(names) == 1 else f"inputs {', '.join(names)}"
        raise ConfigError(
            f"input {wrong!r} must be NAME=VALUE; {self.program} takes the {takes}. For example: "
            f"{shlex.join(['assay', 'run', str(self.program), *values])}"
        )

    def _rows(self, file: str) -> RowsReport:
        """Writes one line per row."""
        from assay.support.places import check_new_file, no_such_file
        from assay.support.scrubbing import results

        failed, called, program = 0, Called(), str(self.program)
        if file != "-" and ":" not in file and not Path(file).exists():
            raise DataError(no_such_file(file))
        if self.out:
            check_new_file(self.out, "out", inputs=(file, program, program.rpartition(":")[0]))
        rows = Path(file) if file != "-" and Path(file).is_file() else None
        # Of a file all rows are read first: one that cannot be read, or lacks an input in all rows, is refused before
        # anything is run or written.
        total, columns = (None, None) if rows is None else _surveyed(file, self.rename)
        with (
            self.predictor(
                columns=columns, folder=Path.cwd() if rows is None else rows.parent, rows=rows,
                outputs=(Path(self.out), _part(self.out)) if self.out else (), say=self.reporter.say, ended=called.add,
            ) as predict,
            _growing(self.out) if self.out else nullcontext(self.stdout or sys.stdout) as written,
            self.reporter.bar(f"run {program}", total) as advance,
        ):  # fmt: skip
            for place, row in _rows_of(file):
                answer = self._answer(predict, place, row)
                failed += "error" in answer and "line" in answer
                echo(json_text(results(json_value(answer, placeholders=True))), file=written)
                advance(1)
        return RowsReport(failed=failed, called=called)

    def _answer(self, predict: Any, place: str, row: Any) -> dict[str, Any]:
        """The prediction for a row, or its error: a failed row does not stop the others."""
        from assay.datasets.splits import renamed
        from assay.support.scrubbing import error_text

        try:
            if isinstance(row, DataError):
                raise row
            row = json_value(row)
            identity = {"id": row["id"]} if row.get("id") not in (None, "") else {}
            return {**identity, **dict(predict(renamed(row, self.rename, place), where=place).items())}
        except Exception as error:
            at = re.search(r"\d+$", place)
            return {"line": int(at[0]) if at else 0, "error": error_text(error)}


class Called:
    """The LM calls of rollouts by model, shown if others than the rollouts' model answered."""

    def __init__(self) -> None:
        self.model, self.usages = "", list[Any]()

    def add(self, rollout: "Rollout") -> None:
        from assay.traces.store.listing import added_up, usage_by_model

        self.model, self.usages = rollout.model, added_up([*self.usages, *usage_by_model(rollout.transitions)])

    @property
    def _report(self) -> dict[str, Any]:
        return {"model": self.model, "models": [asdict(usage) for usage in self.usages]}

    def lines(self) -> Iterator[str]:
        from assay.reports.markdown import models_text

        if text := models_text(self._report):
            yield f"LM calls by model: {text}"

    def to_dict(self) -> dict[str, Any]:
        return {"models": self._report["models"]} if any(self.lines()) else {}


def inputs_of(program: str) -> list[str] | None:
    """Names of the inputs of a program or an artifact; None if it does not say them. Loading it runs its code.

    Raises:
        AssayError: it cannot be loaded.
    """
    from assay.deployment import load_artifact
    from assay.programs import load_program, program_inputs
    from assay.programs.loading import full_name
    from assay.sources.artifact_files import is_artifact

    name = full_name(program)
    loaded: Any = load_artifact(name).program if is_artifact(name) else load_program(name)
    return program_inputs(loaded)


@contextmanager
def _growing(out: str) -> Iterator[Any]:
    """A file to write line by line. Its name ends with `.part` until it is whole; so it does after a stop."""
    place, part = Path(out), _part(out)
    if place.exists() and not place.is_file():  # a pipe
        part = place
    try:
        with open(part, "w", encoding="utf-8") as file:
            yield file
        part.replace(place)
    except OSError as error:
        reason = error.strerror or error
        raise WriteFailed(f"{out} cannot be written: {reason}. What was written before is in {part}") from error


def _part(out: str) -> Path:
    return Path(f"{out}.part")


def _surveyed(file: str, rename: Mapping[str, str]) -> tuple[int, set[str]]:
    """Number of rows of a file, and the names of all columns after renaming."""
    total, columns = 0, set[str]()
    for _, row in _rows_of(file):
        total += 1
        if isinstance(row, dict):  # an error is reported when the row's turn comes
            columns |= row.keys() | (row["inputs"].keys() if isinstance(row.get("inputs"), dict) else set())
    if not total:
        raise DataError(f"{file} has no rows")
    if columns and (missing := sorted(rename.keys() - columns)):
        raise DataError(f"{file}: there is no column {missing[0]!r} to rename; the rows have {sorted(columns)}")
    return total, {rename.get(name, name) for name in columns}


def _rows_of(file: str) -> Iterator[tuple[str, Any]]:
    """Rows with their places. An invalid line of JSON is its error, so that the other lines are run."""
    from assay.datasets.files import attempted_rows, parsed_lines
    from assay.datasets.sources import iter_rows

    if file == "-":
        return parsed_lines(file, enumerate(sys.stdin, 1))
    return attempted_rows(Path(file), default=".jsonl") if Path(file).exists() else iter_rows(file)


run = function_of(Run, "run")
