"""A DSPy agent: `react_v2` calls tools natively in one conversation, `react` repeats its trajectory in every prompt."""

import json
import os
import sys

import dspy


def calculator(expression: str) -> str:
    """Calculates a product such as 2*3."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


lm = dspy.LM(
    "openai/gpt-4o",
    api_base=os.environ["MODEL_BASE_URL"],
    api_key=os.environ["MODEL_API_KEY"],
    engine=sys.argv[1],
    cache=False,
)
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
prediction = dspy.ReActV2("question -> answer", tools=[calculator], max_iters=4)(question=sys.argv[2])
typed = dspy.Predict("question -> value: int, unit: str")(question="as a product, please")
print(json.dumps({"answer": {"value": typed.value, "unit": typed.unit}, "agent": prediction.answer}))
