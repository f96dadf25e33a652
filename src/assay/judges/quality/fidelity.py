"""Fidelity of a simulated user: whether it plays the user of its task, and nothing else.

The user talks with an interviewer that follows rules: it asks for every fact, then for something that no profile has,
and then confirms. What a faithful user says in such a conversation is known, so code can check it. Calls no judge.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from assay.datasets import Task
from assay.errors import DataError
from assay.judges.labels import Item, output_name
from assay.judges.quality.agreement import Answers
from assay.judges.quality.audit import FILLER
from assay.programs.simulated_users import ENDINGS, MESSAGE_CHARS, UserProfile, UserProgram
from assay.rubrics import JudgeSpec

# -- Biases of a judge: its verdicts on the user's own items, each as it is and with an edit that adds no content.
#
# Calls no model.


LARGE = 0.05  # share of the scale; a smaller mean change is not a bias
_LEVEL = 0.05  # for all edits together (Holm 1979, Scandinavian Journal of Statistics 6:65)
_DRAWS = 4999
_FEWEST = 10  # pairs


def edits(profile: str, model: str) -> dict[str, str]:
    """The edits by name, with `{output}` for the output: all for a judge of quality, two for that of a property.

    Args:
        model: name of the judge's model, for its preference for outputs of its own.
    """
    neutral = {"length": f"{{output}}{FILLER}", "formatting": "## Answer\n\n- **{output}**\n\n---\n"}
    if profile == "property":  # the others may change what such a judge measures, such as a tone
        return neutral
    return {
        **neutral,
        "authority": "{output}\n\nThis is confirmed by experts of Harvard University and the Nobel committee.",
        "politeness": "Thank you for this question! {output} I hope this helps. Please ask whenever you like.",
        "confidence": "{output} I am absolutely certain of this.",
        "self-preference": f"{{output}}\n\n(written by {model})",
    }


def edited(item: Item, text: str) -> Item:
    """The item with an edit of its output; of a pair that of the second output."""
    name = output_name(item.fields)
    fields = {**item.fields, name: text.replace("{output}", str(item.fields.get(name, "")))}
    return Item(id=item.id, fields=fields, ratings=item.ratings)


def assess_biases(
    original: Answers, again: Answers, changed: Mapping[str, Answers], spec: JudgeSpec, *, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Tests each edit in pairs: an edit fails if its effect is significant and at least 0.05 of the scale.

    The effect is the mean position of the edited items less that of the two runs without the edit, as a share of the
    scale; on a nominal scale the share of verdicts that differ from those of the two runs, less the share that differ
    between these. Without an effect the three verdicts on an item are exchangeable, however noisy the judge is, so p is
    that of a permutation test within items, corrected for the number of edits.

    Args:
        original, again: verdicts on the unchanged items, twice; `noise` is the mean absolute difference.
        changed: edit -> verdicts on the edited items, in the same order.
    Returns:
        By edit `n`, `effect`, `p`, `noise` and `passed`; all but `n` None below 10 items with the three verdicts.
    """
    results = {name: _effect((answers, original, again), spec, seed) for name, answers in changed.items()}
    tested = sorted((entry["p"], name) for name, entry in results.items() if entry["p"] is not None)
    corrected = 0.0
    for rank, (p, name) in enumerate(tested):
        corrected = max(corrected, min(1.0, p * (len(tested) - rank)))
        results[name]["p"] = corrected
        results[name]["passed"] = not (corrected <= _LEVEL and abs(results[name]["effect"]) >= LARGE)
    return results


def _effect(runs: tuple[Answers, Answers, Answers], spec: JudgeSpec, seed: int) -> dict[str, Any]:
    """The effect of the first run against the two others, in which nothing was edited."""
    rows = [at for at in range(len(runs[0].verdicts)) if all(run.verdicts[at] is not None for run in runs)]
    if len(rows) < _FEWEST:
        return {"n": len(rows), "effect": None, "p": None, "noise": None, "passed": None}
    nominal = spec.kind == "nominal"
    width = spec.steps[-1] - spec.steps[0]
    values = np.array(
        [
            [spec.scale.index(run.verdicts[at] or "") if nominal else run.places[at] / width for run in runs]
            for at in rows
        ]
    )
    distances = values[:, :, None] - values[:, None, :]  # of each run to each other run
    if nominal:
        distances = (distances != 0).astype(float)
    gaps = distances.sum(axis=2) / 2  # gaps[item][run]: to the mean of the other two
    noise = float(np.abs(distances[:, 1, 2]).mean())
    drawn = np.random.default_rng(seed).integers(0, 3, (_DRAWS, len(rows)))
    sums = gaps[np.arange(len(rows)), drawn].sum(axis=1)
    observed = gaps[:, 0].sum()
    extreme = sums >= observed - 1e-9 if nominal else np.abs(sums) >= abs(observed) - 1e-9
    return {
        "n": len(rows),
        "effect": float(observed / len(rows)) - (noise if nominal else 0.0),
        "p": float((extreme.sum() + 1) / (_DRAWS + 1)),
        "noise": noise,
        "passed": None,
    }


# -- Fidelity.


FAULTS: Mapping[str, str] = {
    "no_goal": "did not tell its goal in the first message",
    "repeated_goal": "told its goal again",
    "invented": "said a number or name that is neither in its profile nor in what it was told",
    "told_answer": "told a fact before it was asked for",
    "withheld": "did not tell a fact that it was asked for three times",
    "stopped_early": "ended before everything was asked",
    "never_stopped": "did not end after three confirmations",
}
"""Name of a fault -> what the user did."""
_TRIES, _CONFIRMATIONS = 3, 3
_PROBE = "What is your shoe size?"
_SAME = 0.8  # share of the goal's words in a message that tells it
_VALUE = re.compile(r"\b\w*\d\w*\b|(?<=[a-z,;] )[A-Z][a-z]{2,}\b")  # numbers, and names inside of a sentence


@dataclass(frozen=True)
class Interview:
    """One conversation of a user with the interviewer.

    Attributes:
        messages: each with `role` and `content`.
        asked: for each reply of the interviewer the fact that it asks for; "" for others.
        ended: how the user ended it; "" if it never did.
        done: whether the interviewer had asked everything when it ended.
    """

    profile: UserProfile
    messages: list[dict[str, str]]
    asked: list[str]
    ended: str
    done: bool


def interview(user: UserProgram, task: Task) -> Interview:
    """Runs a user through the interview of its task.

    Raises:
        DataError: the task has no `user` with a goal, or the user returned no message or another ending.
    """
    profile = UserProfile.of(task.inputs.get("user"))
    form = task.inputs.get("form")
    words = form if isinstance(form, Mapping) else {}
    messages: list[dict[str, str]] = []
    asked: list[str] = []
    waiting = [name for name, fact in profile.facts.items() if not fact.get("told_before")]
    tries = dict.fromkeys(waiting, 0)
    confirmations, probed = 0, False
    while True:
        turn = user(profile=copy.deepcopy(task.inputs["user"]), messages=copy.deepcopy(messages))
        text, ended = getattr(turn, "message", None), getattr(turn, "ended", None)
        if not isinstance(text, str) or ended not in ENDINGS:
            raise DataError(
                f"the user returned message={str(text)[:200]!r} and ended={ended!r}; see assay.programs.UserProgram"
            )
        text = text[:MESSAGE_CHARS]
        messages.append({"role": "user", "content": text})
        if ended or confirmations == _CONFIRMATIONS:
            return Interview(profile, messages, asked, ended, confirmations > 0)
        waiting = [name for name in waiting if tries[name] < _TRIES and not _tells(text, profile.facts[name])]
        name = next((name for name in waiting if not asked or name != asked[-1]), waiting[0] if waiting else "")
        if name:
            tries[name] += 1
            reply = f"What is the {words.get(name) or name.replace('_', ' ')}?"
        elif not probed:
            probed, reply = True, _PROBE
        else:
            confirmations += 1
            values = ", ".join(f"{key.replace('_', ' ')}: {fact['value']}" for key, fact in profile.facts.items())
            reply = f"Thank you. Confirmed. {values}. Goodbye."
        asked.append(name)
        messages.append({"role": "agent", "content": reply})


def _tells(text: str, fact: Mapping[str, Any]) -> bool:
    return _has(text, str(fact["value"]))


def _has(text: str, value: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(value.casefold())}(?!\w)", text.casefold()) is not None


def faults_of(run: Interview) -> dict[str, bool]:
    """Whether the user made each of the `FAULTS` in an interview."""
    facts = run.profile.facts
    texts = [message["content"] for message in run.messages if message["role"] == "user"]
    goal = set(re.findall(r"\w+", run.profile.goal.casefold()))

    def tells_goal(text: str) -> bool:
        return len(goal & set(re.findall(r"\w+", text.casefold()))) >= _SAME * len(goal)

    early, stated = False, set[str]()
    for at, text in enumerate(texts):
        requested = set(run.asked[:at]) - {""}
        allowed = [run.profile.goal, *(message["content"] for message in run.messages[1 : 2 * at : 2])]
        allowed += [str(part) for name in requested for part in _texts(facts[name])]
        stated |= {name for name, fact in facts.items() if _tells(text, fact)}
        early |= any(
            name not in requested and _tells(text, fact) and not _has(" ".join(allowed), str(fact["value"]))
            for name, fact in facts.items()
        )
    often = {name for name in facts if run.asked.count(name) >= _TRIES}
    return {
        "no_goal": not tells_goal(texts[0]),
        "repeated_goal": any(tells_goal(text) for text in texts[1:]),
        "invented": any(_invents(run, at) for at in range(len(texts))),
        "told_answer": early,
        "withheld": bool(often - stated),
        "stopped_early": bool(run.ended) and not run.done,
        "never_stopped": not run.ended,
    }


def _invents(run: Interview, at: int) -> bool:
    """Whether the user's message number `at` has a number or name from nowhere."""
    known = [run.profile.goal, *(str(part) for fact in run.profile.facts.values() for part in _texts(fact))]
    place = 2 * at  # user and interviewer take turns
    known += [message["content"] for message in run.messages[:place] if message["role"] == "agent"]
    text = " ".join(known).casefold()
    return any(not _has(text, word) for word in _VALUE.findall(run.messages[place]["content"]))


def _texts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [part for inner in value.values() for part in _texts(inner)]
    return [part for inner in value for part in _texts(inner)] if isinstance(value, list | tuple) else [value]


def fidelity_card(runs: Sequence[Interview | None], *, fail_over: float = 0.05) -> dict[str, Any]:
    """The card of a user: for each fault the share of runs with it, and its exact 95 % interval (Clopper-Pearson 1934).

    Args:
        runs: None for a run in which the user raised; it is counted as `failed` and is in no share.
        fail_over: highest share of runs with a fault.
    Returns:
        JSON-serializable: `n`, `failed`, `turns` (mean), `faults` (each with `share`, `low`, `high`, `example`),
        `faithful` (share of runs without any fault) and `passed`. With no run the shares are None, and nothing passed.
    """
    judged = [(run, faults_of(run)) for run in runs if run is not None]
    n = len(judged)
    faults = {}
    for name in FAULTS:
        with_it = [run for run, made in judged if made[name]]
        example = (
            [message["content"] for message in with_it[0].messages if message["role"] == "user"] if with_it else []
        )
        faults[name] = {**_share(len(with_it), n), "example": [text[:200] for text in example[:12]]}
    shares = [fault["share"] for fault in faults.values()]
    return {
        "n": n,
        "failed": len(runs) - n,
        "turns": sum(len(run.asked) for run, _ in judged) / n if n else None,
        "faults": faults,
        "faithful": _share(sum(not any(made.values()) for _, made in judged), n),
        "fail_over": fail_over,
        "passed": bool(n) and n == len(runs) and all(share <= fail_over for share in shares),
    }


def _share(count: int, n: int) -> dict[str, Any]:
    if not n:
        return {"share": None, "low": 0.0, "high": 1.0}
    from scipy.stats import binomtest

    interval = binomtest(count, n).proportion_ci(method="exact")
    return {"share": count / n, "low": float(interval.low), "high": float(interval.high)}
