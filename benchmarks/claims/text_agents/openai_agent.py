"""An agent on OpenAI's SDK: the model writes a calculation, the agent does it. Its instructions are in system.md."""

import re
from pathlib import Path

from openai import OpenAI

SYSTEM = (Path(__file__).parent / "system.md").read_text().strip()
EXAMPLE = [{"role": "user", "content": "What is 482 + 37?"}, {"role": "assistant", "content": "482 + 37"}]


def solve(task):
    client = OpenAI(base_url=task["base_url"], api_key=task["api_key"])
    question = {"role": "user", "content": task["inputs"]["question"]}
    messages = [{"role": "system", "content": SYSTEM}, *EXAMPLE, question]
    answer = client.chat.completions.create(model=task["model"], messages=messages, max_tokens=24)
    calculation = answer.choices[0].message.content.strip()
    return {"calculation": calculation, "answer": calculated(calculation)}


def calculated(text):
    """The result as text; an error for anything that is not digits and signs."""
    if re.fullmatch(r"[0-9+*() -]{1,60}", text) is None or "**" in text:
        return "error, this is not a calculation"
    try:
        return str(eval(text, {"__builtins__": {}}))
    except (SyntaxError, TypeError):
        return "error, this is not a calculation"
