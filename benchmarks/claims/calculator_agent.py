"""What a person writes for the compiled agent of `sums`, with `calculator_agent.yaml` and one command."""

import dspy

from assay.programs import ToolAgent
from assay.programs.calculator import calculator


class Sums(ToolAgent):
    def __init__(self, **options):
        arguments = {"calculator": {"expression": (str, dspy.OutputField(pattern=r"^[0-9+* ()-]{1,60}$"))}}
        super().__init__("question -> answer", [calculator], arguments=arguments, **options)
