"""The calculator agent as a Node program, trained on-policy as it is, as `any_agent` trains the one on OpenAI's SDK."""

from claims.any_agent import EXAMPLE, trained_agent
from claims.storing import Measured, Setting


def measure(setting: Setting) -> Measured:
    return trained_agent(setting, "node", agent=f"node {EXAMPLE / 'agent.mjs'}")
