"""Thoughts in the text of an answer: what a reasoning model writes between `<think>` and `</think>`.

Servers that know a model's marks return its thoughts apart; the others leave them in the text.
"""

import re

__all__ = ["without_thoughts"]

_NAMES = "think|thinking|thoughts?|reasoning|reflection|scratchpad|seed:think"
# marks of DeepSeek, Qwen and Seed; Mistral; OpenThoughts; Kimi; Cohere; gpt-oss; Gemma. A quoted mark is a mention.
_MARK = re.compile(
    rf"(?<!['\"`])(?:(?P<opens><(?:{_NAMES})(?:\s[^<>]*)?>|\[THINK\]|<\|begin_of_thought\|>|◁think▷"
    r"|<\|START_THINKING\|>|<\|channel\|>(?:analysis|commentary)\b|<unused94>)"
    rf"|</(?:{_NAMES})\s*>|\[/THINK\]|<\|end_of_thought\|>|◁/think▷|<\|END_THINKING\|>"
    r"|<\|channel\|>final(?:<\|message\|>)?|<unused95>)",
    re.IGNORECASE,
)


def without_thoughts(text: str) -> str:
    """The text outside of thoughts.

    A thought that is not closed reaches to the end of the text: an answer that was cut within it is empty. What comes
    before a closing mark without an opening one is a thought too, because some templates open it in the prompt.
    """
    kept, depth, at = list[str](), 0, 0
    for mark in _MARK.finditer(text):
        if depth == 0:
            kept.append(text[at : mark.start()])
        if mark["opens"]:
            depth += not mark["opens"].startswith("<|channel|>") or depth == 0  # channels follow each other
        elif depth == 0:
            kept.clear()
        else:
            depth = 0 if mark[0].startswith("<|channel|>") else depth - 1
        at = mark.end()
    return text if at == 0 else "".join([*kept, text[at:] if depth == 0 else ""]).strip()
