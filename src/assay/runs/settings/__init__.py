"""The settings class of each command.

Imports no heavy package: the command line makes its flags from these classes at each start.
"""

from assay.runs.settings.commands import (
    ImproveSettings,
)
from assay.runs.settings.shared import DEFAULT_MODEL, CommonSettings, ProgramSettings

__all__ = [
    "DEFAULT_MODEL",
    "CommonSettings",
    "ImproveSettings",
    "ProgramSettings",
]
