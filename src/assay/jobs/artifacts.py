"""Writes the artifact of a job: once for trial before the first call, and with the result at the end.

The artifact of a compiled judge has the reliability card and the anchor set of the result, measured on held-out items.
Does not run a job: the commands do.
"""

import contextlib
import glob
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import dspy

from assay.datasets import SPLITS
from assay.deployment import Artifact, load_artifact, save_artifact
from assay.deployment.artifact import loaded_again, needs_instance, readable_text, source_of
from assay.deployment.registry import Registry
from assay.errors import ArtifactError, ProgramError
from assay.evaluation import RecordedProgram, Session
from assay.evaluation.judged import judge_again, judge_items
from assay.jobs.agents import changed_files
from assay.jobs.anchors import freeze, made_by
from assay.jobs.job import Job
from assay.jobs.opening import Run
from assay.judges import Judge
from assay.judges.labels import Item, LabelSplits, output_name
from assay.judges.quality.agreement import Answers
from assay.judges.quality.audit import padded
from assay.judges.quality.card import reliability_card
from assay.judges.quality.drift import AnchorSet
from assay.judges.questions import key_of
from assay.judges.reading import scale_masses
from assay.models.meter import Meter
from assay.optimizers.judges import JudgeOutcome
from assay.programs import program_state, program_version
from assay.programs.adapters import ambient_format
from assay.programs.foreign_agent import foreign_agent_in
from assay.sources.artifact_files import is_artifact, read_json, verified
from assay.sources.files import FILES
from assay.sources.modules import alone, qualified_name
from assay.sources.trust import trusting
from assay.support.package import __version__
from assay.support.scrubbing import error_text
from assay.support.values import digest_of, json_text
from assay.traces import Recorder, Store
from assay.traces.messages.final_answer import sent_formats
from assay.traces.records import person_digest, subject_digest
from assay.traces.shown import demos_in


def keep_artifact(
    job: Job, recorded: RecordedProgram, folder: Path, result: Mapping[str, Any], report: str, *, unproven: bool = False
) -> Path:
    """Writes a job's artifact.

    The store keeps the data subjects of its tasks, so that an erasure can name the artifact.

    Args:
        unproven: whether gate did not show that the program is better than the baseline; the manifest then says so.
    """
    splits, manifest = job.splits, _program_manifest(job, recorded, result)
    # of gate too: its tasks decided what the artifact is
    people = [(key, subject_digest(name)) for key, name in splits.subjects()]
    manifest["shown"] = _shown_tasks(job, recorded.program, people)
    manifest |= {"unproven": True} if unproven else {}
    path = save_artifact(
        folder.resolve(), recorded.program, manifest, splits=splits.manifest(), report=report, rubric=job.rubric_files,
        changed=changed_files(recorded.program),
        replaces=of_earlier_attempt(folder.resolve(), job.session.recorder, job.store),
    )  # fmt: skip
    _, note = loaded_again(path, recorded.program)
    if note is not None:
        job.session.progress.say(f"note: {note}")
    if subjects := {digest for _, digest in people} | set(manifest["shown"]["people"]):
        job.store.put_artifact(str(path), sorted(subjects))
    return path


def _shown_tasks(job: Job, program: dspy.Module, people: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The entry of an artifact's manifest about the demonstrations of its program.

    Args:
        people: keys of tasks, with the hashes of the names of their data subjects.
    Returns:
        `tasks`: keys of all tasks that may be shown. `by_demo`: the tasks that each demonstration shows, as
        far as known, in the order of the program's state. `people`: hashes of the names of their data subjects.
    """
    recorder, learned = job.session.recorder, job.splits.manifest()["tasks"]
    texts = [json_text(demo) for demo in demos_in(program_state(program))]
    by_demo = [sorted(recorder.texts.within(readable_text(text))) for text in texts]
    tasks = {task for demo in by_demo for task in demo} | recorder.carried.tasks
    tasks |= set(recorder.demonstrated_tasks).intersection([*learned["train"], *learned["val"]]) if texts else set()
    before = (job.artifact.manifest.get("shown") or {}) if job.artifact else {}
    subjects = {digest for key, digest in people if key in tasks} | set(before.get("people", ()))
    return {"tasks": sorted(tasks), "by_demo": by_demo, "people": sorted(subjects)}


def of_earlier_attempt(folder: Path, recorder: Recorder, store: Store) -> Path | None:
    """The artifact that an earlier attempt of a resumed run wrote under a name, which may have a number.

    One that is registered as a version stays: its version names the folder and the hash of its files.

    Args:
        folder: with the name without a number.
    """
    if not recorder.resumed:
        return None
    registry = Registry(store.engine)
    registered = {version.artifact for agent in registry.agents() for version in registry.versions(agent)}
    for path in folder.parent.glob(f"{glob.escape(folder.name)}*"):
        numbered = path.name.removeprefix(folder.name)
        if not re.fullmatch(r"(-\d+)?", numbered) or path.is_symlink() or not is_artifact(path):
            continue
        with contextlib.suppress(ArtifactError):  # another one that cannot be read
            manifest = read_json(path / "manifest.json", path)
            if manifest.get("run") == recorder.run_id and str(path) not in registered:
                return path
    return None


def rehearsed(job: Job, *, portable: bool) -> list[str]:
    """Saves the unchanged program as an artifact, loads it as another machine would, and runs the first val task in it.

    Finds modules and files that would be missing on another machine, before the job spends anything. The working
    directory is another one meanwhile. The calls of the task are those of the preflight, which are not sent again.

    Args:
        portable: an artifact that would not run elsewhere is an error, not a note.
    Returns:
        Notes for the report.
    Raises:
        ArtifactError: the artifact would not run elsewhere.
    """
    if not job.config.preflight:
        return []
    program, session = job.recorded.program, job.session
    source = source_of(program, session.program_name, data=_data(job))
    notes, missing = list(source.notes), list(source.missing)
    job.rubric_files  # noqa: B018 - read now, so that one that cannot be copied ends the job before its first call
    with tempfile.TemporaryDirectory(prefix="assay-") as scratch, trusting("once"):
        path = Path(scratch).resolve() / "artifact"
        try:
            save_artifact(path, program, _program_manifest(job, job.recorded, {}), splits={}, report="")
            with alone(), contextlib.chdir(scratch):  # without this process's modules, as on another machine
                artifact, note = loaded_again(path, program)
                if note is not None:
                    (notes if needs_instance(program, source) else missing).append(note.replace(f"{path}: ", ""))
                notes += [] if note else _models_left_out(job, artifact)
                error = None if note or session.recorder.missed.calls else _error(job, artifact)
                verified(path)  # a program that writes into its own folder changes its artifact
            # an error that the program has here as well is not the artifact's
            if error is not None and _run_once(job, job.recorded) is None:
                missing.append(error_text(error))
        except (ArtifactError, ProgramError) as error:
            missing.append(f"it will not load: {str(error).replace(f'{path}: ', '')}")
    notes += [_not_portable(reason) for reason in missing]
    if missing and portable:
        raise ArtifactError(f"{notes[-len(missing)]}. `portable=False` compiles nevertheless")
    for note in notes:
        session.progress.say(f"note: {note}")
    return notes


def require_portable(job: Job, path: Path) -> None:
    """Checks a job's artifact for what its runs read only after the rehearsal, or without one.

    Raises:
        ArtifactError: it needs files or modules that it does not contain.
    """
    missing = source_of(job.recorded.program, job.session.program_name, data=_data(job)).missing
    if missing:
        raise ArtifactError(f"{_not_portable(missing[0])}. The artifact and its report are in {path}")


def _not_portable(reason: str) -> str:
    return (
        f"the program's artifact will not run in another folder or on another machine: {reason}. Files of the "
        f"program's folder are copied; name them by `Path(__file__).parent`, or list them in {FILES}"
    )


def _models_left_out(job: Job, artifact: Artifact) -> list[str]:
    """A note on models of the program that its constructor does not make, so that the artifact has none of them."""
    if job.session.replace_lms:
        return []
    loaded = {name for name, predictor in artifact.program.named_predictors() if predictor.lm is None}
    own = [name for name, predictor in job.recorded.program.named_predictors() if predictor.lm is not None]
    if not (left_out := [name for name in own if name in loaded]):
        return []
    return [
        f"the artifact calls {job.session.lm.model} for {', '.join(left_out)}: it does not contain models that were "
        "set on the program after it was made. Make them in its constructor"
    ]


def _error(job: Job, artifact: Artifact) -> BaseException | None:
    """Error of the artifact's program on the first task."""
    copy = RecordedProgram(artifact.program, job.session, prompt_format=artifact.settings["adapter"])
    copy.set_parameters(artifact.settings["parameters"])
    return _run_once(job, copy)


def _run_once(job: Job, recorded: RecordedProgram) -> BaseException | None:
    with job.session.phase("preflight"), job.session.context():
        return recorded.run(job.splits.val[0]).error


def _data(job: Job) -> Path:
    return Path(job.config.data).resolve()


def _prompt_formats(job: Job, recorded: RecordedProgram) -> dict[str, str]:
    """The prompt format of a program's calls, and that of programs that set none.

    The format is read from a recorded run, because a program may set its own. Without one it is that of the settings.
    """
    version, store = program_version(recorded.program, recorded.settings["adapter"]), job.session.recorder.store
    default, sent = ambient_format(), Counter[str]()
    if store is not None:
        store.settle()
        runs = (row.id for row in store.rollouts(run_id=job.run_id) if row.program_version == version)
        sent = next((formats for run in runs if (formats := sent_formats(store.rollout(run).transitions))), sent)
    resolved = sent.most_common(1)[0][0] if sent else recorded.settings["adapter"] or default
    return {"prompt_format": resolved, "default_format": default}


def _program_manifest(job: Job, recorded: RecordedProgram, result: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of an artifact: where its program comes from, and the result.

    Args:
        result: the report of the job, JSON-ready.
    """
    config, rubric, engine = job.config, job.session.rubric, job.session.lm.recording.backend
    return {
        "assay": __version__,
        "dspy": dspy.__version__,
        **_program_names(job, recorded.program),
        "version": program_version(recorded.program, recorded.settings["adapter"]),
        "settings": recorded.settings,
        **_prompt_formats(job, recorded),
        "model": config.model_name,
        "api_base": config.api_base or job.session.lm.recording.address,
        "api_key_env": config.api_key_env,
        "weights": engine.weights,
        "adapters": list(engine.adapters),
        "rubric": {"name": rubric.name, "version": rubric.version, "criteria": [c.describe() for c in rubric.criteria]},
        "judge_model": config.judge_model if rubric.takes_model else None,
        "data": {
            "spec": config.data,
            "salt": job.splits.salt,
            "sha256": job.splits.manifest()["sha256"],
            "sizes": job.splits.sizes(),
        },
        "seed": config.seed,
        "run": job.run_id,
        "parent": str(job.artifact.path) if job.artifact else None,
        "state": config.state,  # the file that it started from; program.json has what was loaded
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "result": dict(result),
    }


def _program_names(job: Job, program: dspy.Module) -> dict[str, Any]:
    """The name by which the program is loaded; of an agent also its own, with the hashes of its files."""
    name = job.session.program_name
    if (agent := foreign_agent_in(program)) is None:
        return {"program": name}
    hashes = agent.files.hashes if agent.files is not None else {}
    return {"program": qualified_name(program), "agent": name, "texts_before": hashes}


_RETEST = 30  # test items that are judged a second time
_ANCHORS = 60  # val items whose verdicts are stored with a compiled judge


def judge_card(outcome: JudgeOutcome, splits: LabelSplits, session: Session) -> dict[str, Any]:
    """The reliability card of the result on the items that it was measured on; some of them are judged twice."""
    judge, judged, split = outcome.result, outcome.judged, outcome.split
    assert judged is not None
    assert outcome.agreement is not None
    assert outcome.ceiling is not None
    items: list[Item] = getattr(splits, split)
    retested = items[:_RETEST]
    with session.phase(split):
        second = judge_again(judge, retested, session, name=f"{split}: once more", split=split)
    first = Answers(judged.answers.verdicts[: len(retested)], judged.answers.places[: len(retested)])
    longer = None
    if all(output_name(item.fields) in item.fields for item in retested):
        with session.phase(split):
            filled = [replace(item, fields=padded(item.fields)) for item in retested]
            longer = judge_items(judge, filled, session, name=f"{split}: with words that say nothing", split=split)
    card = reliability_card(
        judged.answers, items, judge.spec, agreement=outcome.agreement, ceiling=outcome.ceiling,
        objective=outcome.objective, split=split,
        retest=(first, second.answers), padded=(first, longer.answers) if longer else None,
        masses=scale_masses(judged.raw),
        model=judge.model or session.lm.model,
        # cached answers were paid for when they were first requested
        cost_usd=None if (price := price_per_call(session.meter)) is None else price * judged.calls,
    )  # fmt: skip
    return {"judge": digest_of(made_by(judge, session)), **card}


def price_per_call(meter: Meter) -> float | None:
    """Mean dollars per call over the whole run; None if a price is unknown."""
    usage = meter.usage
    return None if usage.unpriced else usage.cost_usd / usage.calls if usage.calls else 0.0


def anchor_set(outcome: JudgeOutcome, splits: LabelSplits, session: Session) -> AnchorSet | None:
    """Anchor set of the result's verdicts on val items, for replays after a change of judge or model.

    The response cache has the verdicts from the search.
    """
    judge, items = outcome.result, splits.val[:_ANCHORS]
    if not judge.spec.graded:
        return None
    with session.phase(outcome.split):
        first = judge_items(judge, items, session, name="anchors", split="val")
        repeat = judge_again(judge, items, session, name="anchors: once more", split="val")
    return freeze(judge, items, first.answers, repeat.answers, session)


def items_of(artifact: str | Path) -> dict[str, list[str]]:
    """Keys of the items that a judge's artifact was made with, by split."""
    splits = json.loads((Path(artifact) / "splits.json").read_text(encoding="utf-8"))
    return dict(splits.get("items") or {})


def save_judge(
    judge: Judge, splits: LabelSplits, run: Run, folder: Path, *, config: Any, parents: Sequence[str],
    result: Mapping[str, Any], report: str, unproven: bool = False,
) -> tuple[Path, list[str]]:  # fmt: skip
    """Writes an artifact: the judge, its manifest and its report.

    Args:
        config: settings of the compile.
        result: the report for its manifest; `report`: the same as Markdown.
    Returns:
        Its folder, and notes on what it lacks.
    """
    raters = {
        person_digest(rating.rater) for name in SPLITS for item in getattr(splits, name) for rating in item.ratings
    }
    for parent in parents:  # the child contains what its parent learned from
        raters |= set(load_artifact(parent).manifest.get("raters", ()))
    manifest = {
        "assay": __version__,
        "dspy": dspy.__version__,
        "kind": "judge",
        "program": qualified_name(judge),
        "version": program_version(judge, None),
        "settings": {"adapter": None, "parameters": {}},
        "judge": asdict(judge.spec),
        "model": config.model_name,
        "api_base": config.api_base or run.lm.recording.address,
        "api_key_env": config.api_key_env,
        **({} if config.thinking is None else {"thinking": config.thinking}),
        "weights": run.lm.recording.backend.weights,
        "labels": {"spec": config.labels, "salt": config.salt, "sizes": splits.sizes()},
        "raters": sorted(raters),
        "parents": list(parents),
        "seed": config.seed,
        "run": run.run_id,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "result": dict(result),
        **({"unproven": True} if unproven else {}),
    }
    lists = {"ratings": splits.ratings(), "items": splits.keys()}
    earlier = of_earlier_attempt(folder.resolve(), run.recorder, run.store)
    path = save_artifact(folder.resolve(), judge, manifest, splits=lists, report=report, replaces=earlier)
    shown = run.store.labelled_subjects(key_of(judge)) if config.labels == "store" else ()
    run.store.put_artifact(str(path), sorted({*raters, *map(subject_digest, shown)}))
    _, note = loaded_again(path, judge)
    return path, [] if note is None else [note]
