"""The command line: one file a command, loaded when the command is called, so that `--help` stays quick."""

from assay.cli.main import main

__all__ = ["main"]
