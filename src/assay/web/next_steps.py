"""What a person does next with a run or a judge, as commands that work when they are copied. Runs nothing."""

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
import sqlalchemy as sa

from assay.commands.repeat import rollout_command, run_command
from assay.sources.artifact_files import is_artifact
from assay.traces.store import Store, tables as schema
from assay.traces.store.listing import list_runs
from assay.web.rendering import link

_SEARCHED, _OFFERED = 100, 3  # newest evaluations that are searched, and how many of anything are offered
_ONE_RUN = ("sizes", "max_calls", "max_tokens", "max_cost_usd", "split", "samples")  # settings that others do not take


def next_steps(
    store: Store, run: Mapping[str, Any], report: Mapping[str, Any], judges: Mapping[str, str], store_flag: str | None
) -> Iterator[tuple[str, str]]:
    """Words and commands for a finished run.

    Args:
        judges: as from `judges_of`.
    """
    if run["kind"] in ("compile", "tune") and report.get("artifact"):
        yield from _of_result(store, run, report)
    elif run["kind"] == "train" and report.get("name"):
        yield _of_training(run, str(report["name"]))
    elif run["kind"] == "evaluate" and run["config"].get("rubric"):
        yield from _of_evaluation(run, judges, store_flag)
    elif run["kind"].startswith("judge "):
        artifact = str(report.get("artifact") or "")
        source = str(run["config"].get("judge") or "")
        yield from judge_commands(artifact or source, source, run["config"], store_flag, without=run["kind"])


def _of_result(store: Store, run: Mapping[str, Any], report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    artifact, kept = str(report["artifact"]), report.get("unproven")  # then the artifact is the baseline
    proof = "" if report.get("replaces") else ", the baseline," if kept else ", which was not shown to be better,"
    inputs = _inputs(store, run["id"])
    command = rollout_command(artifact, inputs, "") if inputs else None
    if command is not None:
        yield f"Run the result{proof} on the inputs of a task, or on your own", command
    else:
        yield f"Run the result{proof} on an input of your own", f"assay run {shlex.quote(artifact)} FIELD=VALUE"


def _inputs(store: Store, run_id: str) -> dict[str, Any]:
    """The inputs of one task of val; empty if the run has none."""
    table = schema.rollouts
    query = sa.select(table.c.inputs_json).where(
        table.c.run_id == run_id, table.c.split == "val", table.c.source == "program", table.c.task_id != ""
    )
    with store.engine.connect() as connection:
        text = connection.execute(query.limit(1)).scalar()
    inputs: dict[str, Any] = orjson.loads(text) if text else {}
    return inputs


def _of_training(run: Mapping[str, Any], model: str) -> tuple[str, str]:
    config = {name: run["config"].get(name) for name in ("program", "rubric", "data", "prompt_format")}
    command = run_command("evaluate", {**config, "model": model}) if config["program"] else None
    return (
        "Use the trained model, here in an evaluation",
        command or f"assay evaluate PROGRAM --model {shlex.quote(model)}",
    )


def _of_evaluation(
    run: Mapping[str, Any], judges: Mapping[str, str], store_flag: str | None
) -> Iterator[tuple[str, str]]:
    config = {name: value for name, value in run["config"].items() if name not in _ONE_RUN}
    compiled = is_artifact(str(config.get("program") or ""))
    if not compiled:
        command, words = run_command("compile", config, store=store_flag), "Compile the program against this rubric"
    elif run["config"].get("split", "val") in ("train", "val"):
        command = run_command("evaluate", {**config, "split": "gate"}, store=store_flag)
        words = "Evaluate it on tasks that its compile has not seen"
    else:
        command, words = None, ""
    if command is not None:
        yield words, command
    for source in itertools.islice(judges.values(), _OFFERED):
        name = source.rpartition(":")[2]
        for text, command in judge_commands(source, source, run["config"], store_flag, without="judge compile"):
            yield f"{text}: {name}", command


def judge_commands(
    judge: str, source: str, config: Mapping[str, Any], store_flag: str | None, *, without: str = ""
) -> Iterator[tuple[str, str]]:
    """Words and commands for a judge.

    Args:
        judge: its artifact; its source if it was not compiled.
        source: what it was loaded from: a file, a rubric's criterion, or a sentence.
        config: settings of a run in which it judged, with its model and scale.
        without: the kind of a run that is not offered.
    """
    role = {name: config.get(f"judge_{name}") or config.get(name) for name in ("model", "api_base", "api_key_env")}
    scale, store = config.get("scale"), "" if store_flag is None else f" --store {shlex.quote(store_flag)}"
    own: dict[str, Any] = {} if is_artifact(judge) else {**role, "scale": scale}  # a compiled judge has its model
    labelled = f" --scale {shlex.quote(','.join(map(str, scale)))}" if scale else ""
    if source and not is_artifact(source):
        yield "Label outputs for the judge in a terminal", f"assay judge label {shlex.quote(source)}{labelled}{store}"
    offered: Sequence[tuple[str, str, dict[str, Any]]] = (
        ("judge compile", "Compile the judge with the labels of the store",
         {"judge": source, **role, "scale": scale, "labels": "store"}),
        ("judge audit", "Test the judge for known failure modes", {"judge": judge, **own}),
        *([("judge drift", "Look for drift of the judge", {"judge": judge})] if is_artifact(judge) else []),
    )  # fmt: skip
    for kind, words, settings in offered:
        is_twice = kind == "judge compile" and is_artifact(source)
        command = None if kind == without or is_twice else run_command(kind, settings, store=store_flag)
        if command is not None:
            yield words, command
    if is_artifact(judge):
        yield "Send the card of the judge", f"assay judge card {shlex.quote(judge)} --report card.html"


def judges_of(store: Store, run: Mapping[str, Any]) -> dict[str, str]:
    """Keys of the judges of the rubric of a run of `evaluate`, with their sources."""
    rubric = run["config"].get("rubric")
    if run["kind"] != "evaluate" or not rubric:
        return {}
    from assay.judges.questions import known_questions

    found = (
        (question.key, source)
        for question in known_questions(store).values()
        for source in question.sources
        if source.rpartition(":")[0] == rubric
    )
    return dict(itertools.islice(found, _OFFERED))


def comparable(store: Store, run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Words and addresses of comparisons with the newest evaluations of the same data by the same rubric, of which
    program or model is another."""
    if run["kind"] != "evaluate":
        return []
    same = ("rubric", "data", "split", "sizes")
    others = (
        other
        for other in list_runs(store, limit=_SEARCHED, kind="evaluate")
        if all(other["config"].get(name) == run["config"].get(name) for name in same)
        and (other["program"], other["model"]) != (run["program"], run["model"])
        and other["status"] == "done"
    )
    found: dict[tuple[Any, Any], tuple[str, str]] = {}
    for other in others:
        first, second = sorted((run, other), key=lambda one: one["started_at"])
        words = f"{other['program']}" + (f" with {other['model']}" if other["model"] != run["model"] else "")
        found.setdefault(
            (other["program"], other["model"]), (words[:120], link("compare", a=first["id"], b=second["id"]))
        )
        if len(found) == _OFFERED:
            break
    return list(found.values())
