"""What is kept and shipped. So far: artifacts."""

from assay.deployment.artifact import FORMAT, Artifact, load_artifact, save_artifact

__all__ = ["FORMAT", "Artifact", "load_artifact", "save_artifact"]
