import dspy

import assay.recording
from assay import tuning
from assay.judges.ranking import win_rates
from assay.optimizers.weights import TRLProvider
from assay.programs import Agent


class Capital(Agent):
    input_names = ("country",)
    used = (assay.recording.record, tuning.tune, win_rates, TRLProvider)

    def __init__(self) -> None:
        super().__init__(None, "lean")
        self.answer = dspy.Predict("country -> capital")

    def solve(self, country: str) -> dspy.Prediction:
        return dspy.Prediction(capital=self.answer(country=country).capital, format=self.adapter)
