"""The calculator agent as a LangGraph graph, trained on-policy as it is, as `any_agent` trains the one on OpenAI's SDK.

LangGraph is installed in an environment of its own, without assay: the agent is a process per task.
"""

import subprocess
import sys

from claims.any_agent import EXAMPLE, trained_agent
from claims.storing import Measured, Setting

PACKAGES = ("langgraph==1.2.24", "langchain-openai==1.7.4")


def measure(setting: Setting) -> Measured:
    python = setting.downloads / "langgraph" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return trained_agent(setting, "langgraph", agent=f"{python} {EXAMPLE / 'langgraph_agent.py'}")
