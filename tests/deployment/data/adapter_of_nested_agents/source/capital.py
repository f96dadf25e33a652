import dspy

import assay
from assay.programs.shipped import MathQA


class Inner(assay.Agent):
    def __init__(self) -> None:
        super().__init__()
        self.adapter = "lean"
        self.answer = dspy.Predict("country -> capital")

    def solve(self, country: str) -> dspy.Prediction:
        return self.answer(country=country)


class Capital(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.sums = MathQA(adapter="lean")

    def forward(self, country: str) -> dspy.Prediction:
        return dspy.Prediction(capital=self.inner(country=country).capital, format=self.sums.adapter)
