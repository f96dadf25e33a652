"""Runs untrusted code, and tests of it, with bubblewrap or Landlock, without network, environment and host files."""

from assay.programs.sandbox.execution import SandboxResult, available, run

__all__ = ["SandboxResult", "available", "run"]
