"""A calculator agent on OpenAI's SDK, without assay: asks for a calculation, does it, and asks for the answer.

    assay train grpo --agent examples/any_agent/openai_agent.py:solve --name sums \
      --rubric examples/any_agent/sums.yaml --data "arithmetic:terms=2-3&digits=2-3&size=600"

Its system message is in system.md, which a compile improves:

    assay compile --agent examples/any_agent/openai_agent.py:solve --text examples/any_agent/system.md \
      --rubric examples/any_agent/sums.yaml --data "arithmetic:terms=2-3&digits=2-3&size=600"

As a command it reads the task from standard input, and the address of the model from the environment.
"""

import json
import re
import sys
from pathlib import Path

from openai import OpenAI

SYSTEM = (Path(__file__).parent / "system.md").read_text().strip()
CALCULATION = re.compile(r"[0-9+*() -]{1,60}")
EXAMPLES = (
    ("What is 482 + 37?", "482 + 37", "519"),
    ("Calculate 715 - 268 + 94.", "715 - 268 + 94", "541"),
    ("Work out 63 - 850.", "63 - 850", "-787"),
    ("How much is 29 + 401 - 76?", "29 + 401 - 76", "354"),
)


def solve(task):
    client = OpenAI(base_url=task["base_url"], api_key=task["api_key"])

    def ask():
        answer = client.chat.completions.create(model=task["model"], messages=messages, max_tokens=40)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return messages[-1]["content"].strip()

    messages = [{"role": "system", "content": SYSTEM}]
    for question, calculation, result in EXAMPLES:
        turns = (("user", question), ("assistant", calculation), ("user", f"Result: {result}"), ("assistant", result))
        messages += [{"role": role, "content": content} for role, content in turns]
    messages.append({"role": "user", "content": task["inputs"]["question"]})
    calculation = ask()
    messages.append({"role": "user", "content": f"Result: {calculated(calculation)}"})
    return {"calculation": calculation, "answer": ask()}


def calculated(text):
    if CALCULATION.fullmatch(text) is None or "**" in text:
        return "error, this is not a calculation"
    try:
        return str(eval(text, {"__builtins__": {}}))  # digits and signs only
    except (SyntaxError, TypeError, ZeroDivisionError):
        return "error, this is not a calculation"


if __name__ == "__main__":
    received = json.load(sys.stdin)
    print(json.dumps(solve(received)))
