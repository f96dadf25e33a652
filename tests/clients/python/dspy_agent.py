"""DSPy: an agent that calls tools natively, over both of DSPy's clients, called and streamed."""

import os

import dspy
from driver import calculator, run


def program(engine: str) -> tuple[dspy.Module, dict]:
    options = {"api_base": os.environ["MODEL_BASE_URL"], "api_key": os.environ["MODEL_API_KEY"]}
    lm = dspy.LM("openai/gpt-4o", **options, engine=engine, cache=False)
    return dspy.ReActV2("question -> answer", tools=[calculator], max_iters=4), {
        "lm": lm,
        "adapter": dspy.JSONAdapter(),
    }


def called(engine: str, question: str) -> str:
    agent, settings = program(engine)
    with dspy.context(**settings):
        return agent(question=question).answer


async def streamed(engine: str, question: str) -> str:
    agent, settings = program(engine)
    with dspy.context(**settings):
        async for part in dspy.streamify(agent)(question=question):
            if isinstance(part, dspy.Prediction):
                return part.answer
    raise ValueError("no prediction came")


run(
    lm15=lambda question: called("lm15", question),
    lm15_stream=lambda question: streamed("lm15", question),
    litellm=lambda question: called("litellm", question),
    litellm_stream=lambda question: streamed("litellm", question),
)
