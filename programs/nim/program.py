"""The shipped program `nim`: a game against an opponent, in which the win is the reward."""

import random
from collections.abc import Callable
from typing import ClassVar

from assay.datasets import Task
from assay.errors import EnvironmentFailed
from assay.programs.environments import (
    Environment,
    EnvironmentStep,
    InvalidAction,
    ShippedEnvironmentAgent,
    environment_seed,
)

from .tasks import NimRules, best_take

Opponent = Callable[[int, int, random.Random], int]
"""`opponent(sticks left, most, rng)` returns how many it takes."""


class Nim(Environment):
    """Nim (see `assay.shipped.programs.nim.tasks`). The agent moves first; its reward is 1 for a win, otherwise 0.

    The task's inputs are `sticks`, `most`, `skill` and `seed`. Every move of the opponent is checked: one that is
    against the rules ends the game with `EnvironmentFailed`. `info` has the opponent's move (`opponent`, None if it
    made none) and the number of sticks `left`, so that the check `nim_won` can replay the game.

    Args:
        opponent: by default one that makes the best move in the share `skill` of its moves, and any other time a random
            one.
    """

    def __init__(self, opponent: Opponent | None = None) -> None:
        self._opponent = opponent
        self._rules = NimRules(1)
        self._left = 0

    def reset(self, task: Task) -> EnvironmentStep:
        self._rules = NimRules.of(task.inputs)
        self._skill = float(task.inputs.get("skill", 0.5))
        self._rng, self._left = random.Random(environment_seed(task)), self._rules.sticks
        return self._seen("", 0.0, None)

    def step(self, action: str) -> EnvironmentStep:
        taken = int(action) if action.isascii() and action.isdigit() and len(action) <= 2 else 0
        if not self._rules.is_legal(taken, self._left):
            if not self._left:
                raise InvalidAction("the game is over")
            raise InvalidAction(f"take 1 to {min(self._rules.most, self._left)} sticks")
        self._left -= taken
        if not self._left:
            return self._seen("You took the last stick and won.", 1.0, None)
        reply = self._reply()
        self._left -= reply
        lost = " It took the last stick and won." if not self._left else ""
        return self._seen(f"The opponent took {reply}.{lost}", 0.0, reply)

    def _reply(self) -> int:
        """The opponent's move.

        Raises:
            EnvironmentFailed: it is against the rules.
        """
        left = self._left
        reply = (self._opponent or self._partly_best)(left, self._rules.most, self._rng)
        if self._left != left:
            raise EnvironmentFailed(
                f"the opponent cheated: it changed the sticks that are left, {left} to {self._left}"
            )
        if not self._rules.is_legal(reply, self._left):
            raise EnvironmentFailed(
                f"the opponent cheated: it took {reply!r} of {self._left} sticks, and a player may take 1 to "
                f"{min(self._rules.most, self._left)}"
            )
        return reply

    def _partly_best(self, left: int, most: int, rng: random.Random) -> int:
        best, drawn = best_take(left, most), rng.randint(1, min(most, left))
        return best if rng.random() < self._skill and best is not None else drawn

    def _seen(self, happened: str, reward: float, reply: int | None) -> EnvironmentStep:
        sticks = f"{self._left} stick{'' if self._left == 1 else 's'} left."
        return EnvironmentStep(
            observation=f"{happened} {sticks if self._left else ''}".strip(),
            reward=reward,
            done=not self._left,
            actions=tuple(str(taken) for taken in range(1, min(self._rules.most, self._left) + 1)),
            info={"opponent": reply, "left": self._left},
        )


class NimPlayer(ShippedEnvironmentAgent):
    """Plays Nim. Inputs are those of `nim:` data; the prompt has the number of sticks left."""

    input_names: ClassVar = ("sticks", "most", "skill", "seed")
    environment: ClassVar = Nim
    instructions: ClassVar = (
        "You and an opponent take sticks in turn. Who takes the last stick wins. Write how many you take."
    )
    shows_past: ClassVar = False
