"""The commands by their words, with the class that declares each and a line of help; groups and short forms.

A class is `module.Name` of this package, or has its full name. The module is imported when its command
is used, never to list the commands.
"""

import importlib
from collections.abc import Sequence
from typing import Any

__all__ = ["COMMANDS", "GROUPS", "SHORT_FORMS", "command_class", "long_form", "short_form", "short_forms"]

COMMANDS = {
    "agent run": ("agent.RunAgent", "Execute tasks of a trainer with an agent."),
    "collect": ("collect.Collect", "Collect groups of scored rollouts."),
    "compare": ("compare.Compare", "Compare two programs or artifacts, paired, task by task."),
    "compile": ("compile.Compile", "Compile a program's prompts against a rubric."),
    "deploy advance": ("deploy.Advance", "Evaluate a deployment and take its next step if one is due."),
    "deploy history": ("deploy.History", "List the decisions of a deployment, oldest first."),
    "deploy pause": ("deploy.Pause", "Pause a deployment: the share does not change, and no step is taken."),
    "deploy promote": ("deploy.Promote", "Make the candidate of a deployment the champion now."),
    "deploy resume": ("deploy.Resume", "Continue a paused deployment."),
    "deploy rollback": ("deploy.Rollback", "Roll a deployment back to the champion, also after promotion."),
    "deploy simulate": ("deploy.Simulate", "Run a plan on simulated traffic, and count its decisions."),
    "deploy start": ("deploy.Start", "Roll a version out in stages in place of the agent's champion."),
    "deploy status": ("deploy.DeploymentStatus", "Show where a deployment stands, and the decision of its numbers."),
    "evaluate": ("evaluate.Evaluate", "Score a program or an artifact."),
    "export grpo": ("export.ExportGRPO", "Export prompts, and the rubric as a reward module for plain `trl grpo`."),
    "export preferences": ("export.ExportPreferences", "Export pairs of answers to the same prompt, for DPO or KTO."),
    "export sft": ("export.ExportSFT", "Export prompts and completions of good rollouts, one row per LM call."),
    "export transitions": (
        "export.ExportTransitions",
        "Export every LM call with token ids, logprobs, reward and advantage.",
    ),
    "improve": (
        "improve.Improve",
        "Alternate prompt compilation and weight training; keep a step only if it passes the gate.",
    ),
    "index": ("index.Index", "Index a folder of documents for agents that retrieve."),
    "init": ("init.Init", "Write a project: program, rubric, data and assay.toml."),
    "judge audit": ("judge_audit.AuditJudge", "Test a judge for known failure modes."),
    "judge card": ("judge.ShowCard", "Show the reliability card of a compiled judge."),
    "judge compile": ("judge_compile.CompileJudge", "Compile a judge against human labels."),
    "judge drift": ("judge_audit.ReplayAnchors", "Replay a frozen set of verdicts, and raise an alarm on drift."),
    "judge fidelity": ("judge_audit.AuditUser", "Audit the simulated user of conversations."),
    "judge lint": ("judge.Lint", "Report criteria that are likely mistakes."),
    "judge label": ("judge.Label", "Label rollouts of the store for a judge."),
    "judge forget": ("judge.ForgetRater", "Remove all labels of a rater from the store."),
    "judge score": ("judge_score.ScoreRows", "Judge every row of a dataset."),
    "loop install": ("loop.InstallLoop", "Write a systemd timer or a cron line that runs a loop. Installs nothing."),
    "loop pool": ("pool.Pool", "Write the rollouts of an agent in production as tasks."),
    "loop run": ("loop.RunLoop", "Advance the deployment of an agent, or pool, improve, register and deploy."),
    "loop start": ("loop.StartLoop", "Enable assay loop run for an agent. Starts no process."),
    "loop status": ("loop.LoopStatus", "Show where the loop of an agent stands, and seven figures."),
    "loop stop": ("loop.StopLoop", "End the loop of an agent. An active deployment continues."),
    "migrate": ("migrate.Migrate", "Move an artifact to another model or DSPy version, and cure a loss."),
    "models list": ("models.ListModels", "List embedded models and trained adapters, with their files."),
    "models pull": ("models.PullModel", "Download an embedded model and check its sha256."),
    "referee open": ("referee.OpenReferee", "Open a referee of a coding agent that improves an agent's texts."),
    "referee serve": ("referee.ServeReferee", "Serve a referee to a coding agent over MCP."),
    "referee skill": ("referee.ShowSkill", "Print the skill file for a coding agent that works with a referee."),
    "referee close": ("referee.CloseReferee", "Open the sealed test of a referee once, and report."),
    "registry register": ("registry.Register", "Register an artifact as the next version of an agent."),
    "registry list": ("registry.ListVersions", "List the versions of an agent, or of all agents."),
    "registry show": ("registry.ShowVersion", "Show a version, and the history of its agent."),
    "registry alias": ("registry.SetAlias", "Set an alias to a version."),
    "registry flag": ("registry.SetFlag", "Set or remove a feature flag of an agent."),
    "registry suite": ("registry.SetSuite", "Set or show the validation suite that every candidate must pass."),
    "registry route": ("registry.Route", "Let the measured quality per task type choose between versions."),
    "registry diff": ("registry.DiffVersions", "Show what differs between two versions."),
    "registry capabilities": ("registry.Capabilities", "Show the scores of versions in production, per task type."),
    "rubric checks": ("rubric.ListChecks", "List the shipped checks with their arguments."),
    "run": ("run.RunProgram", "Run a program or an artifact on one input, or on a file of inputs."),
    "runs list": ("runs.ListRuns", "List the newest runs, one per line."),
    "runs show": ("runs.ShowRun", "Show one run: its settings, rollouts by phase and result."),
    "serve": ("serve.Serve", "Start a gateway that records agents which use the OpenAI, Anthropic or Gemini APIs."),
    "traces list": ("traces.ListRollouts", "List the newest rollouts, one per line."),
    "traces show": ("traces.ShowRollout", "Show one rollout with every LM call."),
    "traces stats": ("traces.CountRollouts", "Show counts, tokens and dollars of the recorded rollouts."),
    "traces rate": ("traces.RateRollouts", "Rate one rollout from 0 to 1, or all that have no rating."),
    "traces close": ("traces.CloseRollouts", "End the rollouts that a killed gateway left open."),
    "traces score": ("scoring.ScoreRollouts", "Score stored rollouts by a rubric."),
    "traces forget": ("traces.ForgetSubject", "Delete the data of one person."),
    "traces import": ("traces.ImportRollouts", "Import OpenTelemetry spans, or an export of Langfuse or MLflow."),
    "traces export": ("traces.ExportRollouts", "Export rollouts as OpenTelemetry spans."),
    "tune": ("tune.TuneOrImpact", "Search the five agent parameters."),
    "train rl": ("train.TrainRL", "Train an adapter by reward, on rollouts of a program or on an export."),
    "train sft": ("train.TrainSFT", "Train an adapter by supervised fine-tuning on an export."),
    "trust list": ("trust.ListTrusted", "List what is trusted."),
    "trust add": ("trust.AddTrust", "Trust the content of artifacts and files as it is now."),
    "trust remove": ("trust.RemoveTrust", "Remove trust."),
    "view": ("assay.web.view.View", "Open the local page: runs, rollouts and comparisons in a browser."),
}
GROUPS = {
    "agent": "Run an agent for a training (`assay train … --agent remote`) on another machine.",
    "deploy": "Replace a version of an agent in stages, and roll back if the new one is worse.",
    "export": """Write training data, checked by gates: sft, grpo, preferences, transitions.

    An export that fails the gate of cleanliness or privacy is not written. Rollouts of the gate and test splits are
    never exported, nor other rollouts with the same inputs.
    """,
    "judge": "Compile judges against human labels, audit them, and score data with them.",
    "loop": "Improve an agent on its production data: pool tasks, improve, register, deploy, monitor.",
    "models": "List and fetch language models.",
    "referee": "Let a coding agent improve texts against a sealed gate and test.",
    "registry": "Manage versions of agents, their aliases and feature flags.",
    "rubric": "List what a rubric can use.",
    "runs": "List and inspect runs of commands: compile, evaluate, tune, …",
    "traces": "List, inspect, rate, score, import, export and delete recorded rollouts.",
    "train": "Train a LoRA adapter on exported traces, or on rollouts of a program.",
    "trust": """Manage which artifacts that others have compiled may run their code, and which project files are read.

    An artifact that you compiled is trusted. One that somebody else compiled, and that holds source files, is loaded
    only once you have trusted its content: with --trust on the command that loads it, or with `assay trust add`. The
    same holds for an assay.toml that is outside of your project, and for a file that sends keys or data to another host
    than the provider's.
    """,
}
_METHODS = ("grpo", "reinforce++", "reinforce++-turn", "ppo", "rloo")
SHORT_FORMS = {f"train {method}": f"train rl --method {method}" for method in _METHODS}


def long_form(words: str) -> tuple[str, dict[str, str]]:
    """The words of the command that a short form stands for, and the setting that it sets."""
    long, _, rest = SHORT_FORMS.get(words, words).partition(" --")
    if not rest:
        return words, {}
    from assay.support.options import options_of

    flag, value = rest.split()
    field = next(name for name, option in options_of(command_class(long)).items() if option.flag_name == f"--{flag}")
    return long, {field: value}


def short_form(words: str, arguments: Sequence[str]) -> str:
    """The short form of a command with these arguments, whose table of the project file holds; else its words."""
    line = f" {' '.join(arguments)} ".replace("=", " ")
    forms = {form: short for short, form in SHORT_FORMS.items() if form.startswith(f"{words} ")}
    return next((short for form, short in forms.items() if f" {form.removeprefix(words).strip()} " in line), words)


def command_class(words: str) -> Any:
    """The settings class of a command, or of what a short form stands for."""
    module, _, name = COMMANDS[SHORT_FORMS.get(words, words).partition(" --")[0]][0].rpartition(".")
    return getattr(importlib.import_module(module if "." in module else f"assay.commands.{module}"), name)


def short_forms(words: str) -> str:
    """The short forms of a command, or of the commands in a group, as one line; empty if there are none."""
    start = f"{words} "
    pairs = [(key, form) for key, form in SHORT_FORMS.items() if form.startswith(start)]
    listed = ", ".join(f"{key.removeprefix(start)} for {form.removeprefix(start)}" for key, form in pairs)
    return f"Short forms: {listed}." if pairs else ""
