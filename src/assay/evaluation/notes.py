"""Notes on what runs did that their score does not show: tools that all failed, verifiers that did not
decide, budgets that were not kept, users that tell the answer."""

from collections import Counter
from collections.abc import Collection

from assay.evaluation.metrics import TaskRun

_REASON_CHARS = 300


def run_notes(runs: Collection[TaskRun]) -> list[str]:
    """The notes on some runs of one program; none where nothing is to be said."""
    notes = (_without_tools(runs), _undecided(runs), _over_budget(runs), _not_reported(runs), _told_unasked(runs))
    return [note for note in notes if note]


def overridden_format(asked: str | None, sent: Collection[str]) -> list[str]:
    """A note where a program was run with a prompt format and its calls were sent in others."""
    if asked is None or not sent or asked in sent:
        return []
    return [f"the prompt format {asked!r} has no effect: the program sets its own, {', '.join(map(repr, sent))}"]


def _without_tools(runs: Collection[TaskRun]) -> str:
    """In how many runs each tool call failed: an agent whose tools are down may answer, and be scored, without them."""
    called = [run for run in runs if run.tools_made]
    failed = [run for run in called if len(run.tool_errors) == run.tools_made]
    if not failed:
        return ""
    reason, _ = Counter(error for run in failed for error in run.tool_errors).most_common(1)[0]
    return (
        f"in {len(failed)} of {len(called)} runs that called tools every call failed; the commonest reason: "
        f"{reason[:_REASON_CHARS]}"
    )


def _undecided(runs: Collection[TaskRun]) -> str:
    """How many answers of a `Refine` program its verifier could not grade: these are not revised."""
    verified = [run.rounds for run in runs if run.rounds]
    reasons = Counter(str(rounds[0]["reason"]) for rounds in verified if rounds[0]["probability"] is None)
    if not reasons:
        return ""
    return (
        f"the verifier could not grade {reasons.total()} of {len(verified)} answers, which were therefore not revised; "
        f"the commonest reason: {reasons.most_common(1)[0][0]}"
    )


def _over_budget(runs: Collection[TaskRun]) -> str:
    uses = [run.thinking for run in runs if run.thinking is not None and run.thinking.tokens is not None]
    shares = [use.budget_share for use in uses if use.budget_share is not None]
    over = [share for share in shares if share > 1]
    if not over:
        return ""
    return (
        f"{len(over)} of {len(shares)} runs thought more than their budget (of thinking or reasoning_depth), up to "
        f"{100 * max(over):.0f} % of it: the server keeps no limit, or the thoughts are of digits, which have fewer "
        "characters a token"
    )


def _not_reported(runs: Collection[TaskRun]) -> str:
    uses = [run.thinking for run in runs if run.thinking is not None]
    unknown = sum(use.tokens is None for use in uses)
    if not unknown:
        return ""
    return (
        f"the thinking tokens of {unknown} of {len(uses)} runs are unknown: the model thought, and the server did not "
        "report how many tokens that took"
    )


def _told_unasked(runs: Collection[TaskRun]) -> str:
    told = [run.told for run in runs if run.told]
    if not told:
        return ""
    name, _ = Counter(name for names in told for name in names).most_common(1)[0]
    return (
        f"in {len(told)} of {len(runs)} runs the simulated user told facts before they were asked for, such "
        f"as {name!r}: the score may be too high; test the user with `assay judge fidelity`"
    )
