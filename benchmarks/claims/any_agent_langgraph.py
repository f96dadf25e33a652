"""The calculator agent as a LangGraph graph, trained on-policy as it is, as `any_agent` trains the one on OpenAI's SDK.

LangGraph is installed into a folder of its own; where assay has a package too, assay's version is used.
"""

import subprocess
import sys

from claims.any_agent import EXAMPLE, trained_agent
from claims.storing import Measured, Setting

PACKAGES = ("langgraph==1.2.24", "langchain-openai==1.7.4")


def measure(setting: Setting) -> Measured:
    add_packages(setting)
    return trained_agent(setting, "langgraph", agent=f"{EXAMPLE / 'langgraph_agent.py'}:solve")


def add_packages(setting: Setting) -> None:
    """Makes LangGraph importable."""
    folder = setting.downloads / "langgraph"
    if not folder.exists():
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *PACKAGES], check=True
        )
    sys.path.append(str(folder))
