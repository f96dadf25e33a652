"""The oven with noisy outcomes: yield of the last plan, plain and trained on its own best experiments."""

from claims.acting import Acting, measured
from claims.storing import Measured, Setting

OVEN = Acting(
    name="experiment",
    data="experiment:size=400&trials=3",
    figures={"yield": "yield_share", "feasible": "feasible"},
    least=0.75,
    blocks=12,
    block=16,
    epochs=3,
    test=30,
)


def measure(setting: Setting) -> Measured:
    return measured(setting, OVEN)
