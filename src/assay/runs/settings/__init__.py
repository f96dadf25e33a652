"""The settings class of each command.

Imports no heavy package: the command line makes its flags from these classes at each start.
"""

from assay.runs.settings.commands import (
    CompileSettings,
    ImproveSettings,
    RunSettings,
)
from assay.runs.settings.deploy import (
    AdvanceSettings,
    RegisterSettings,
    RouteSettings,
    SimulateSettings,
    StartSettings,
    SuiteSettings,
)
from assay.runs.settings.judge import (
    FidelitySettings,
    JudgeAuditSettings,
    JudgeCompileSettings,
    JudgeDriftSettings,
    JudgeScoreSettings,
)
from assay.runs.settings.loop import LoopInstallSettings
from assay.runs.settings.shared import DEFAULT_MODEL, CommonSettings, ProgramSettings
from assay.runs.settings.traces import (
    OfRunSettings,
    StoredJudgeSettings,
)
from assay.runs.settings.tune import ImpactSettings, TuneSettings

__all__ = [
    "DEFAULT_MODEL",
    "AdvanceSettings",
    "CommonSettings",
    "CompileSettings",
    "FidelitySettings",
    "ImpactSettings",
    "ImproveSettings",
    "JudgeAuditSettings",
    "JudgeCompileSettings",
    "JudgeDriftSettings",
    "JudgeScoreSettings",
    "LoopInstallSettings",
    "OfRunSettings",
    "ProgramSettings",
    "RegisterSettings",
    "RouteSettings",
    "RunSettings",
    "SimulateSettings",
    "StartSettings",
    "StoredJudgeSettings",
    "SuiteSettings",
    "TuneSettings",
]
