"""Asynchronous only: two predictors at once, a third one decides."""

import asyncio

import dspy


class Program(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = dspy.Predict("question -> opinion")
        self.other = dspy.ChainOfThought("question -> opinion")
        self.decide = dspy.Predict("question, opinions: list[str] -> answer")

    async def aforward(self, question: str) -> dspy.Prediction:
        opinions = await asyncio.gather(self.one.acall(question=question), self.other.acall(question=question))
        return await self.decide.acall(question=question, opinions=[each.opinion for each in opinions])
