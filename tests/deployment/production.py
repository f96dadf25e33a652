"""Agents in production for tests: artifacts of programs that call no model, registered in a store."""

from pathlib import Path

from assay.deployment import save_artifact
from assay.deployment.deployments import Deployments
from assay.programs import load_program
from assay.traces import Store

AGENT = """
import dspy

class Answer(dspy.Module):
    def forward(self, question):
        {body}
"""


def artifact(folder: Path, body: str = "return dspy.Prediction(answer='yes')") -> Path:
    """An artifact of the user's own program; `body` is that of its `forward`."""
    source = folder.with_name(f"{folder.name}-source") / "agent.py"
    source.parent.mkdir(parents=True)
    source.write_text(AGENT.format(body=body))
    name = f"{source}:Answer"
    manifest = {"program": name, "model": "openai/none", "settings": {"adapter": None, "parameters": {}}}
    return save_artifact(folder, load_program(name), manifest, splits={}, report="")


def two_versions(store: Store, folder: Path, candidate: str = "return dspy.Prediction(answer='better')") -> Deployments:
    """The agent `support` with two versions, the first of them its champion."""
    deployments = Deployments(store.engine)
    deployments.registry.register("support", artifact(folder / "one"))
    deployments.registry.register("support", artifact(folder / "two", candidate))
    deployments.registry.set_alias("support@1", "champion", why="the first")
    return deployments
