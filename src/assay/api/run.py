"""Public API for `assay run`: `assay.run`, and `assay.load` for a compiled program. Scores nothing."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

import dspy
from dspy.utils.exceptions import AdapterParseError, LMError

from assay.datasets.columns import used_columns
from assay.datasets.tasks import make_task, missing_inputs, own_containers, owners_of
from assay.deployment import Artifact, load_artifact
from assay.deployment.artifact import check_pinned, is_artifact
from assay.errors import ConfigError, LoopStopped, ModelError
from assay.evaluation import SilentProgress
from assay.evaluation.session import stored_fields
from assay.models import Thinking, get_lm
from assay.models.hosted import error_reason
from assay.models.lm import with_recording
from assay.models.roles import Endpoint
from assay.programs import load_program, program_fields, program_inputs, program_version
from assay.programs.budgets import check_budget, set_thinking
from assay.programs.compose import CallSettings, configured, is_agent
from assay.programs.isolation import running
from assay.programs.loading import full_name
from assay.programs.state import with_saved_state
from assay.programs.wrapping import as_prediction
from assay.runs.arguments import check_state, own_model
from assay.runs.ending import ended_in_order
from assay.runs.jobs import salt_in
from assay.runs.lock import answered_within
from assay.runs.opening import opened_store
from assay.runs.settings import DEFAULT_MODEL, RunSettings
from assay.runs.settings.options import RunOptions
from assay.sources.trust import trusting, trusts
from assay.support.keywords import takes
from assay.support.values import json_value
from assay.traces import Recorder, Rollout
from assay.traces.listening import replacing
from assay.traces.records import subject_digest
from assay.traces.store.sealing import claim_salt, resolve_salt


@takes()
def load(path: str | Path, *, program: dspy.Module | None = None, trust: bool = False) -> dspy.Module:
    """Loads the compiled program of an artifact, with its adapter and parameters: `assay.load(path)(question=…)`.

    If the artifact has source files, loading runs them.

    Args:
        program: uncompiled instance to load into, for programs that cannot be built from their name; no file of the
            artifact is run then.
        trust: permanently trust an artifact that somebody else compiled; see `docs/explanation/security.md`.
    Raises:
        UntrustedArtifact: it has code that this user has neither compiled nor trusted.
        ArtifactError: it was changed, or has no program.
    """
    with trusting(trust):
        return load_artifact(path, program=program).runnable()


@takes(RunSettings)
@trusts
def run(
    program: str | Path,
    inputs: Mapping[str, Any],
    *,
    store: str | Path | None = None,
    **options: Unpack[RunOptions],
) -> dspy.Prediction:
    """Makes one recorded prediction with a program or an artifact. Without a model, an artifact uses its own.

    Args:
        options: the fields of `assay.runs.settings.RunSettings`.
    Raises:
        ConfigError: `inputs` is no mapping, or does not have the program's inputs.
        ModelError: the model did not answer.
        ProgramFailed: it exceeded `task_timeout`, or called `sys.exit()`.
        AssayError: what was wrong, which rule, what to do.
    """
    if not isinstance(inputs, Mapping):
        raise ConfigError(f"inputs={str(inputs)[:80]!r} must be a mapping of input names to values")
    with predictor(program, store=store, **options) as predict:
        return predict(inputs)


def inputs_of(program: str) -> list[str] | None:
    """Names of the inputs of a program or an artifact; None if it does not say them. Loading it runs its code.

    Raises:
        AssayError: it cannot be loaded.
    """
    name = full_name(program)
    loaded: Any = load_artifact(name).program if is_artifact(name) else load_program(name)
    return program_inputs(loaded)


@takes(RunSettings)
@contextmanager
def predictor(
    program: str | Path,
    *,
    store: str | Path | None = None,
    columns: Collection[str] | None = None,
    folder: Path | None = None,
    rows: Path | None = None,
    outputs: Sequence[Path] = (),
    say: Callable[[str], None] = lambda _: None,
    ended: Callable[[Rollout], None] = lambda _: None,
    **options: Unpack[RunOptions],
) -> Iterator[Callable[..., dspy.Prediction]]:
    """Context with a function that makes recorded predictions: `run` for many inputs. Settings as in `run`.

    The function's argument `where` names the position of a data row. The row's owner, metadata, task type and split are
    then stored as in `evaluate`; other columns that are not inputs of the program are left out.

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
    settings: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    config, program = RunSettings(**settings), full_name(str(program))
    artifact = load_artifact(program) if is_artifact(program) else None
    budget = Thinking.of(config.thinking)
    if artifact is not None:
        check_state(program, config.state)
    built: Any = artifact.runnable(budget) if artifact else _uncompiled(program, budget, config.state)
    fields = program_fields(built)
    if columns and fields is not None:
        if missing := fields.missing(columns):
            raise missing_inputs("the data", missing, columns)
        say(used_columns(columns, fields))
    named = artifact or config.model or config.api_base or config.api_key_env
    own = None if named or config.replace_lms else own_model(built)
    name = config.model or (artifact.model if artifact else DEFAULT_MODEL if own is None else own.model)
    if name == DEFAULT_MODEL and artifact is None and config.model is None:
        say(f"model: {DEFAULT_MODEL}, the default; model=NAME names another")
    salt = resolve_salt(None, store, artifact=salt_in(artifact)) if salt_in(artifact) else None
    with opened_store(store, SilentProgress()) as opened:
        if salt is not None:  # rollouts may be of sealed tasks; the salt identifies them
            claim_salt(opened, salt)
        people = set[str]()
        opened.put_searched(*outputs, *([] if rows is None else [rows]))  # first: erasure finds them after a kill too
        recorder = Recorder(opened)
        recorded: dict[str, Any] = {"observers": [recorder.observe], "price": config.price}
        lm = (
            get_lm(name, **recorded, **_endpoint(config, artifact).client(name))
            if own is None
            else with_recording(own, **recorded)
        )
        if artifact:
            check_pinned(artifact, lm)
        if budget is not None:
            check_budget(built, lm, budget, prompt_format=artifact.settings["adapter"] if artifact else None)

        def predict(inputs: Mapping[str, Any], *, where: str | None = None) -> dspy.Prediction:
            stored: dict[str, Any] = owners_of(inputs)
            if where is not None:
                task = make_task(inputs, where=where, inputs=fields, folder=folder)
                inputs = task.inputs
                # Expected outputs are left out, as the columns that are not used.
                stored = {**stored_fields(task), "expected": {}, "task_type": task.task_type, "split": task.split or ""}
            elif fields is not None:
                if fields.missing(inputs) or set(inputs) - fields.inputs.keys():
                    raise ConfigError(f"{program} takes the inputs {list(fields.inputs)}, got {sorted(inputs)}")
                inputs = fields.converted(inputs, where=program, folder=folder)
            if subject := stored.get("data_subject"):
                people.add(subject_digest(subject))
            rollout = Rollout(
                phase="run", program=artifact.manifest["program"] if artifact else str(program),
                inputs=json_value(inputs, placeholders=True),
                model=name,
                program_version=program_version(built, artifact.settings["adapter"] if artifact else None),
                parameters=artifact.settings["parameters"] if artifact else {},
                **stored,
            )  # fmt: skip
            called = replacing(lm) if config.replace_lms else {"lm": lm}
            try:
                with _as_model_errors(), dspy.context(**called), recorder.active(), recorder.rollout(rollout):
                    with running(built) as own:
                        prediction = answered_within(
                            config.task_timeout, lambda: as_prediction(own(**own_containers(dict(inputs))))
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


@contextmanager
def _as_model_errors() -> Iterator[None]:
    """Raises a failure of the model, or an answer of it that cannot be used, as a `ModelError`."""
    try:
        yield
    except LMError as error:
        raise ModelError(f"the model did not answer: {error_reason(error)}") from error
    except LoopStopped as error:
        raise ModelError(f"the model gave no answer: {error}") from error
    except AdapterParseError as error:
        raise ModelError(f"the answer could not be parsed: {str(error.lm_response)[:300]!r}") from error


def _uncompiled(program: str, thinking: Thinking | None, state: str | Path | None) -> dspy.Module:
    """A program that is no artifact, with a saved state and a budget if there are any."""
    loaded = load_program(program)
    if state is not None:
        loaded = with_saved_state(loaded, state)
    if thinking is None:
        return loaded
    set_thinking(loaded, thinking)
    return loaded if is_agent(loaded) else configured(loaded, CallSettings(thinking=thinking))


def _endpoint(config: RunSettings, artifact: Artifact | None) -> Endpoint:
    """Address and key of the model: as set, else those of the artifact, unless another model is named."""
    if config.api_base is None and config.model is None and artifact:
        return Endpoint(artifact.endpoint.api_base, config.api_key_env or artifact.endpoint.api_key_env)
    return Endpoint(config.api_base, config.api_key_env)
