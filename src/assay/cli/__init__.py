"""The command line."""

from assay.cli.main import main

__all__ = ["main"]
