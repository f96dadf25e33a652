"""What is kept and shipped: artifacts, and staged rollout."""

from typing import TYPE_CHECKING

from assay.support.lazy import attach

__all__ = ["FORMAT", "Artifact", "Metric", "Plan", "Step", "Traffic", "load_artifact", "load_plan", "save_artifact"]

if TYPE_CHECKING:
    from assay.deployment.artifact import Artifact, load_artifact, save_artifact
    from assay.deployment.plan import Metric, Plan, Step, load_plan
    from assay.deployment.settings import Traffic
    from assay.sources.artifact_files import FORMAT

__getattr__, __dir__ = attach(
    __name__,
    {
        "artifact": "Artifact FORMAT load_artifact save_artifact",
        "plan": "Metric Plan Step load_plan",
        "settings": "Traffic",
    },
)
