"""`assay traces show`: one rollout with its LM calls."""

from dataclasses import asdict
from typing import Any

import click

from assay.cli.options import json_option, store_option
from assay.cli.shared import open_store, print_json
from assay.support.terminal import echo
from assay.support.values import json_text, value_text


@click.command("show")
@click.argument("rollout_id")
@store_option()
@json_option()
def show_command(rollout_id: str, store: str | None, as_json: bool) -> None:
    """Show one rollout with every LM call.

    A request that continues a conversation stored on the server is shown with it; --json has each request as it was
    sent. ROLLOUT_ID may be the first characters of the id.
    """
    from assay.traces.messages.chaining import requests_of
    from assay.traces.messages.dialects import answer_of, chat_messages
    from assay.traces.messages.endings import ending_of

    with open_store(store) as opened:
        rollout = opened.rollout(rollout_id)
    if as_json:
        print_json(asdict(rollout))
        return
    score = "unscored" if rollout.score is None else f"{rollout.score:.3f}"
    program = "@".join(part for part in (rollout.program, rollout.program_version) if part) or f"from {rollout.source}"
    task = ", ".join(part for part in (rollout.task_type, rollout.split) if part)
    echo(f"{rollout.id}  {program}  {rollout.model}  {rollout.status}  score {score}")
    echo(f"task {rollout.task_id or '–'} ({task}): {json_text(rollout.inputs)}")
    _show_tools(rollout.early_tools)
    for t, request in zip(rollout.transitions, requests_of(rollout.transitions), strict=True):
        marks = [word for word, on in (("cached", t.cached), ("constrained", t.constrained)) if on]
        if t.failure is not None:
            marks.append(f"failure {t.failure}")
        tokens = f"{_counted(t.prompt_tokens)}+{_counted(t.completion_tokens)} tokens, {t.latency_ms:.0f} ms"
        named = f"{t.agent}: " if t.agent else ""
        echo(f"\n[{t.t}] {named}{tokens}{', ' + ', '.join(marks) if marks else ''}")
        if request is None:
            echo("  (continues a conversation that is not on record)")
        for message in chat_messages(request or t.request):
            calls = "".join(
                f" [calls {c['function']['name']}({c['function']['arguments']})]"
                for c in message.get("tool_calls") or ()
            )
            echo(f"  {message['role']}: {_flat(message.get('content') or '')}{calls}")
        response = t.response or {}
        answer = answer_of(t.request.get("dialect"), response.get("body", response))
        if answer.reasoning:
            echo(f"  reasoning: {_flat(answer.reasoning)}")
        ending = "refusal" if answer.refusal else "" if t.error else ending_of(t)
        echo(f"  -> {_flat(t.output or t.error or '')}{f' ({ending})' if ending else ''}")
        if t.error and t.output:
            echo(f"  error: {_flat(t.error)}")
        _show_tools(t.tools)
        if t.step_rewards:
            echo(f"  step rewards: {', '.join(f'{name} {value:g}' for name, value in t.step_rewards.items())}")
    echo(f"\nprediction: {rollout.error if rollout.prediction is None else json_text(rollout.prediction)}")
    if rollout.human_rating is not None:
        echo(f"human rating: {rollout.human_rating:g}")
    for v in rollout.verdicts:
        grade = "not counted" if not v.applies else "unscored" if v.grade is None else f"{v.grade:.2f}"
        echo(f"  {v.criterion} (weight {v.weight:g}): {grade} {v.reason}")


def _show_tools(tools: list[Any]) -> None:
    for tool in tools:
        result = tool.result if tool.error is None else f"error: {tool.error}"
        isolation = "" if tool.isolation is None else f" [isolation {tool.isolation}]"
        echo(f"  tool {tool.name}({value_text(tool.arguments)}){isolation} = {value_text(result)}")


def _counted(tokens: int | None) -> str:
    return "?" if tokens is None else str(tokens)


def _flat(text: Any) -> str:
    return str(text).replace("\n", "\n      ")
