"""Runs untrusted code, and tests of it, with bubblewrap or Landlock, without network, environment and host files."""

from assay.programs.sandbox.process import SandboxResult, available, run
from assay.programs.sandbox.runner import Case, CaseResult, Suite, SuiteResult, run_tests

__all__ = ["Case", "CaseResult", "SandboxResult", "Suite", "SuiteResult", "available", "run", "run_tests"]
