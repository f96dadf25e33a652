"""Nim against an opponent that makes the best move half of the time: games won, plain and trained on its own wins."""

from claims.acting import Acting, measured
from claims.storing import Measured, Setting

NIM = Acting(
    name="nim",
    data="nim:size=400&sticks=5-11",
    figures={"won": "won"},
    least=1.0,
    blocks=20,
    block=12,
    epochs=3,
    test=60,
)


def measure(setting: Setting) -> Measured:
    return measured(setting, NIM)
