"""Rollouts and arguments of the trainer, for tests of the policy gradient."""

from assay.optimizers.finetuning.rows import Row, Trajectory


def trajectory(name: str, group: str, *rewards: float) -> Trajectory:
    features = [{"turn": float(turn), "tools": float(turn)} for turn in range(len(rewards))]
    rows = [Row(turn=turn, prompt_ids=[1], completion_ids=[2], trained=[True]) for turn in range(len(rewards))]
    return Trajectory(group=group, rollout=name, rewards=list(rewards), features=features, rows=rows)
