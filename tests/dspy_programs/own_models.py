"""Models of its own beside the job's: by set_lm, by dspy.context and by an argument of a call."""

import os

import dspy


def model(name: str) -> dspy.LM:
    return dspy.LM(f"openai/{name}", api_base=os.environ["PROGRAMS_SERVER"], api_key="k", cache=False)


class Program(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plan = dspy.Predict("question -> plan")
        self.plan.set_lm(model("planner"))
        self.check = dspy.Predict("question, plan -> remark")
        self.critic = dspy.Predict("question, plan -> criticism")
        self.respond = dspy.Predict("question, plan, remark, criticism -> answer")

    def forward(self, question: str) -> dspy.Prediction:
        plan = self.plan(question=question).plan
        with dspy.context(lm=model("checker")):
            remark = self.check(question=question, plan=plan).remark
        criticism = self.critic(question=question, plan=plan, lm=model("critic")).criticism
        return self.respond(question=question, plan=plan, remark=remark, criticism=criticism)
