import dspy

from assay.programs import Agent


class Capital(Agent):
    input_names = ("country",)

    def __init__(self) -> None:
        super().__init__(adapter="lean")
        self.answer = dspy.Predict("country -> capital")

    def solve(self, country: str) -> dspy.Prediction:
        for _ in range(self.parameters.max_steps // 10):
            capital = self.answer(country=country).capital
        return dspy.Prediction(capital=capital, format=self.adapter)
