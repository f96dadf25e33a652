"""Two turns of plain chat on the OpenAI SDK, without tools: the first is streamed and read only up to its finish."""

import json
import sys

from openai import OpenAI

client = OpenAI()
messages = [{"role": "user", "content": sys.argv[1]}]
parts = client.chat.completions.create(model="any", messages=messages, max_tokens=12, temperature=0, stream=True)
text = ""
for part in parts:
    text += part.choices[0].delta.content or ""
    if part.choices[0].finish_reason:
        break
messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And goodbye."}]
answer = client.chat.completions.create(model="any", messages=messages, max_tokens=12, temperature=0)
print(json.dumps({"answer": answer.choices[0].message.content}))
