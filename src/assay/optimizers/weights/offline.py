"""Rows for a policy gradient from an export of transitions: what other weights did, with the ratio to them."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from assay.errors import ConfigError, DataError, Unscored
from assay.models.registry import spec
from assay.optimizers.weights.advantages import Credit, ValueMemory, assign_credit
from assay.optimizers.weights.base import Policy, tokenizer_sha
from assay.optimizers.weights.config import PolicyConfig
from assay.optimizers.weights.data import checked_manifest
from assay.optimizers.weights.rows import Row, Tally, Trajectory, spells, stored_transition, trajectory_of
from assay.optimizers.weights.work import rank
from assay.traces import Rollout, Transition
from assay.traces.dialects import chat_messages

__all__ = ["Recorded", "export_temperature"]

_FAR = 0.1  # nats a token between behaviour and policy from which data is called far off policy
_STRANGE = 0.02  # share of calls whose tokens do not spell their text from which the tokenizer is another one


class Recorded:
    """A source of rows: the groups of a transitions export. `items` is how many groups have spread.

    Raises:
        DataError: no such export, of another kind, changed since, or with nothing to learn from.
    """

    bench = engine = None
    of_what = "groups with spread"

    def __init__(self, folder: str | Path, config: PolicyConfig) -> None:
        self.folder, self.config = Path(folder), config
        self.manifest = checked_manifest(self.folder, "transitions")
        self.job = {"data": self.manifest["files"]["data.jsonl"]["sha256"]}
        self.tally, self.memory = Tally(), ValueMemory()
        self.rollouts = self._read()
        self.credit = self._credited()
        kept = defaultdict(list)
        for one in self.rollouts.values():
            if one.id in self.credit.advantages:
                kept[one.group_id].append(one.id)
        self.groups = [members for members in kept.values() if members]
        self.items = len(self.groups)
        self.trajectories: dict[str, Trajectory] = {}
        self.prompts = [chat_messages(one.transitions[0].request) for one in self.rollouts.values()][:4]
        if not self.items:
            raise DataError(f"{self.folder} has {self.credit.groups} groups, and none has rewards that differ: there is nothing to learn from it")

    def _read(self) -> dict[str, Rollout]:
        found: dict[str, Rollout] = {}
        known: dict[str, dict[int, tuple[Transition, float]]] = defaultdict(dict)
        with open(self.folder / "data.jsonl", "rb") as file:
            for line in file:
                row = orjson.loads(line)
                rollout = found.setdefault(row["rollout"], Rollout(id=row["rollout"], group_id=row["group"], task_id=row["task"], score=0.0))
                rollout.task_type = row["task_type"]
                known[rollout.id][row["t"]] = (stored_transition(row), self._reward(row))  # balancing by copies repeats rows
        for name, calls in known.items():
            turns = [calls[turn] for turn in sorted(calls)]
            credited = [value for _, value in turns]
            # a return less the next one is what was earned between, also by calls that the export left out
            earned = [now - after for now, after in zip(credited, [*credited[1:], 0.0], strict=True)] if self._to_go else credited
            for at, ((transition, _), reward) in enumerate(zip(turns, earned, strict=True)):
                transition.t, transition.step_rewards = at, {"reward": reward}
                found[name].transitions.append(transition)
        return found

    @property
    def _to_go(self) -> bool:
        told = self.manifest.get("config", {})
        return told.get("returns") == "to_go" and told.get("discount") == 1.0

    def _reward(self, row: dict[str, Any]) -> float:
        value = row["return" if self._to_go else "reward"]
        if not isinstance(value, int | float) or not np.isfinite(value):
            raise DataError(f"{self.folder}: rollout {row['rollout']} has a reward of {value!r}, which is no finite number")
        return float(value)

    def _credited(self) -> Credit:
        batch = [
            Trajectory(group=one.group_id, rollout=one.id, rewards=[call.step_rewards["reward"] for call in one.transitions],
                       features=[{"turn": float(call.t), "prompt_tokens": float(call.prompt_tokens or 0)} for call in one.transitions])
            for one in self.rollouts.values()
        ]  # fmt: skip
        return assign_credit(batch, self.config, self.memory)

    def made_from(self) -> dict[str, Any]:
        """What the adapter remembers of its data."""
        return {"export": str(self.folder.resolve())}

    def begin(self, trainer: Any, policy: Policy) -> list[str]:
        """Makes rows of the calls, and holds their behaviour against the policy; what there is to be noted.

        Raises:
            DataError: the tokens are another tokenizer's, or no call can be trained on.
        """
        self._check_tokenizer(policy)
        self.tally.left_out = Counter({"rollouts of groups without spread": len(self.rollouts) - len(self.credit.advantages)})  # anew at --resume
        stored, unknown = list[Row](), list[Row]()
        ours = (spec(policy.embedded).sha256, tuple(one.sha256 for one in policy.merged)) if policy.embedded else None
        strange, limited = Counter[bool](), 0
        for rollout in self.rollouts.values():
            if rollout.id not in self.credit.advantages:
                continue
            same = [(call.weights, call.adapters) == ours for call in rollout.transitions]
            for call in rollout.transitions:
                limited += policy.embedded is not None and _config(call).get("top_p") != 1
                if call.token_ids and call.output.strip():
                    strange[not spells(policy.tokenizer.decode(list(call.token_ids)), call.output)] += 1
            behaviour = self.config.temperature == 1.0
            try:
                made = trajectory_of(rollout, policy.tokenizer, max_length=self.config.max_length, behaviour=behaviour, left=self.tally.left_out)
            except Unscored:
                continue
            for row in list(made.rows):
                if row.logprobs is not None:
                    stored.append(row)
                elif same[row.turn]:
                    unknown.append(row)
                else:
                    made.rows.remove(row)
                    self.tally.left_out["calls of other weights, whose log-probabilities are not known at this temperature"] += 1
            self.trajectories[rollout.id] = made
        if strange[True] > _STRANGE * strange.total():
            raise DataError(f"{strange[True]} of {strange.total()} calls have tokens that do not spell their text: they are another tokenizer's")
        if not stored and not unknown:
            raise DataError(f"{self.folder} has no call to train on: {dict(self.tally.left_out)}")
        if rank():  # every process reads all of the export
            self.tally.left_out.clear()
        notes = self._behaviour(trainer, stored, unknown)
        if limited:
            notes.append(
                f"{limited} calls were sampled from llama.cpp's likeliest tokens, and the ratio is to the whole distribution: "
                "`assay collect --untruncated` samples from that"
            )
        return notes

    def _check_tokenizer(self, policy: Policy) -> None:
        told = {name for name in self.manifest.get("tokenizers", {}) if name != "not known"}
        mine = tokenizer_sha(policy.tokenizer)
        if other := sorted(told - {mine}):
            raise DataError(
                f"{self.folder} has tokens of another tokenizer ({other[0][:12]}…) than {policy.name} has ({mine[:12]}…): its token ids mean "
                "nothing there. Train the model that made them, or export sft"
            )

    def _behaviour(self, trainer: Any, stored: list[Row], unknown: list[Row]) -> list[str]:
        """Log-probabilities of the policy as it is before the first step: the behaviour of calls that it made itself, and how far the
        others are from it."""
        for row, odds in zip(unknown, trainer.logprobs_of(unknown), strict=True):
            row.logprobs = odds
        notes = []
        if unknown:
            notes.append(f"{len(unknown)} calls were made by these very weights: their log-probabilities were worked out again")
        if stored:
            gaps = [
                mine - theirs
                for row, odds in zip(stored, trainer.logprobs_of(stored), strict=True)
                for mine, theirs, chosen in zip(row.logprobs or [], odds, row.trained, strict=True) if chosen
            ]  # fmt: skip
            far = float(np.mean(gaps)) if gaps else 0.0
            low, high = self.config.clip
            least, most = {"cispo": (0.0, high), "sapo": (0.0, np.inf), "vespo": (0.0, np.inf)}.get(self.config.loss, (1 - low, 1 + high))
            outside = float(np.mean([not least <= np.exp(-gap) <= most for gap in gaps])) if gaps else 0.0
            notes.append(f"off policy by {far:.3f} nats a token; {100 * outside:.0f} % of the tokens begin outside the clip range")
            if abs(far) > _FAR or outside > 0.25:
                notes.append("warning: the data is far off policy: much of it is clipped away or weighs too much. Collect anew with these weights")
        return notes

    def collect(self, inputs: list[dict[str, Any]], trainer: Any) -> Any:
        """Rows of this process's share of a step. A group comes as often as `config.num_generations`; each time another part of it is taken."""
        from assay.optimizers.weights.trainer import Batch, over_ranks

        first, chosen = trainer.accelerator.process_index * len(inputs), list[str]()
        for at, given in enumerate(inputs):
            members = self.groups[given["index"]]
            chosen += members[(first + at) % self.config.num_generations :: self.config.num_generations]
        batch = [self.trajectories[name] for name in chosen if name in self.trajectories]
        rows, _ = self.credit.given_to(batch, Counter())
        self.tally.rollouts += len(batch)
        self.tally.calls += len(rows)
        totals = list(itertools.chain.from_iterable(over_ranks([[sum(one.rewards) for one in batch]])))
        told = {"reward": float(np.mean(totals)), "reward_std": float(np.std(totals))} if totals else {}
        return Batch(rows, metrics={**told, "rows": float(len(rows))})


def _config(call: Transition) -> Mapping[str, Any]:
    """How the call was sampled, as far as it says."""
    found: Mapping[str, Any] = call.request.get("config", call.request.get("body", {}))
    return found


def export_temperature(folder: str | Path, said: float | None = None) -> float:
    """The temperature that all calls of a transitions export were sampled at: as it is said where the calls do not say it.

    Raises:
        ConfigError: they were sampled at several, at another one than is said, or nothing says at which. DataError: it is no such export.
    """
    checked_manifest(Path(folder), "transitions")
    found = Counter[float | None]()
    with open(Path(folder) / "data.jsonl", "rb") as file:
        for line in file:
            found[_config(stored_transition(orjson.loads(line))).get("temperature")] += 1
    unsaid = found.pop(None, 0)
    if unsaid and said is None:
        raise ConfigError(f"{unsaid} calls of {folder} do not say at which temperature they were sampled: say it with --temperature")
    if len(found) > 1:
        told = ", ".join(f"{count} at {value:g}" for value, count in sorted(found.items()))
        raise ConfigError(f"{folder} was sampled at several temperatures ({told}): export them apart, one policy has one temperature")
    known = next(iter(found), said)
    if said is not None and known != said:
        raise ConfigError(f"{folder} was sampled at temperature {known:g}, not at {said:g}: the ratio would be to a policy that there never was")
    return float(known or 0.0)
