import dspy

from assay.programs import Agent, AgentParameters


class Capital(Agent):
    input_names = ("country",)

    def __init__(self, parameters: AgentParameters | None = None, adapter: str = "lean") -> None:
        super().__init__(parameters, adapter=adapter)
        self.answer = dspy.Predict("country -> capital")

    def solve(self, country: str) -> dspy.Prediction:
        return dspy.Prediction(capital=self.answer(country=country).capital, format=self.adapter)
