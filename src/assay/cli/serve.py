"""`assay serve`: the gateway in front of a model."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from assay.cli.flags import command_settings, drop_unused_judge, is_set, settings_flags
from assay.cli.options import json_option, key_option, store_option
from assay.cli.shared import Console, print_json
from assay.runs.settings import ServeSettings
from assay.support.numbers import counted
from assay.support.terminal import echo

if TYPE_CHECKING:
    from assay.api.serve import Serving


@click.command("serve")
@settings_flags(ServeSettings)
@key_option(
    "API key sent to the upstream, or $ASSAY_UPSTREAM_KEY; by default the key that each caller sends.",
    "ASSAY_UPSTREAM_KEY",
    "--upstream-key",
)
@key_option(
    "Key that callers must send, or $ASSAY_KEY. Without it LM calls need no key, "
    "and a key for the other routes (rewards, feedback, model, counts) is generated and printed.",
    "ASSAY_KEY",
)
@store_option()
@json_option("Print the address at the start and the counts at the end as JSON lines.")
def command(upstream_key: str | None, key: str | None, store: str | None, as_json: bool, **values: Any) -> None:
    """Start a gateway that records an agent's LM calls. Set the agent's base URL to the gateway.

    It accepts the APIs of OpenAI (chat completions, Responses), Anthropic (messages) and Gemini. Ctrl-C stops it.

    \b
    OPENAI_BASE_URL=http://127.0.0.1:8321/v1   ANTHROPIC_BASE_URL=http://127.0.0.1:8321
    GOOGLE_GEMINI_BASE_URL=http://127.0.0.1:8321
    """
    from assay.api.serve import Serving, serve

    # aiohttp prints a traceback for each broken connection; the failed call is in the store.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)

    def show_start(serving: Serving) -> None:
        _show_start(serving, store=store, key=key, as_json=as_json)

    settings = command_settings(values, ServeSettings)
    if "agent_rubric" not in settings and not is_set("judge_model"):
        settings.pop("judge_model", None)  # the project file names it for other commands
    drop_unused_judge(settings)
    counts = serve(
        store=store, key=key, upstream_key=upstream_key, on_start=show_start, progress=Console(), **settings
    )  # fmt: skip
    if as_json:
        print_json(counts)
    Console().say(_summary(counts))


def _show_start(serving: "Serving", *, store: str | None, key: str | None, as_json: bool) -> None:
    """Prints address, model and the gateway's key, if it was generated because none was given (`key`)."""
    from assay.traces.store import store_url, url_without_password

    if as_json:
        generated = {"key": serving.key} if key is None else {}
        start = {"url": serving.url, "model": serving.model, "run": serving.run_id, **generated}
        print_json(start, with_key=True)
    console = Console()
    database = url_without_password(store_url(store)).removeprefix("sqlite:///")
    console.say(f"{serving.model} at {serving.url}, recorded in {database}; Ctrl-C ends it")
    for name, version in serving.agents.items():
        console.say(f"  agent {name}, now {version}: POST {serving.url}/agents/{name}")
    bases = f"OPENAI_BASE_URL={serving.url}/v1  ANTHROPIC_BASE_URL={serving.url}  GOOGLE_GEMINI_BASE_URL={serving.url}"
    console.say(f"  {bases}" + ("" if key is None else "  (callers must send the key)"))
    if key is None:
        line = f"  ASSAY_KEY={serving.key}  (for this run: rewards, feedback, the model, counts)"
        echo(line, err=True, with_key=True)


def _summary(counts: dict[str, Any]) -> str:
    """The counts of a gateway's run, in one sentence."""
    passed = ", ".join(f"{name} ({count})" for name, count in counts["passed_through"].items())
    unsupported = ", ".join(f"{path} ({count})" for path, count in counts["refused_paths"].items())
    agents = ", ".join(
        f"{version} {sum(statuses.values()):,}" + (f" ({failed:,} failed)" if (failed := _failed(statuses)) else "")
        for version, statuses in sorted(counts.get("agents", {}).items())
    )
    return (
        (f"rollouts of agents: {agents or 'none'}; " if "agents" in counts else "")
        + f"{counted(counts['calls'], 'calls')} to a model: {counts['stored']} stored, "
        f"{counts['unrecorded']} not recorded; rollouts never closed: {counts['unclosed']:,}"
        + (f"; passed on and not recorded: {passed}" if passed else "")
        + (f"; requested, but not supported by the gateway: {unsupported}" if unsupported else "")
    )


def _failed(statuses: Mapping[str, int]) -> int:
    """Rollouts that did not end with an answer."""
    return sum(count for status, count in statuses.items() if status != "done")
