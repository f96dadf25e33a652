"""A recursive language model: code that calls the model again, run by a local interpreter."""

import dspy

program = dspy.RLM("question -> answer", max_iters=3, interpreter_factory=dspy.LocalInterpreter)
