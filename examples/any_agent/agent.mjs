// The calculator agent of openai_agent.py as a Node program, without a package:
// --agent "node examples/any_agent/agent.mjs"
import { readFileSync } from "node:fs";

const SYSTEM = readFileSync(new URL("system.md", import.meta.url), "utf8").trim();
const EXAMPLES = [
  ["What is 482 + 37?", "482 + 37", "519"],
  ["Calculate 715 - 268 + 94.", "715 - 268 + 94", "541"],
  ["Work out 63 - 850.", "63 - 850", "-787"],
  ["How much is 29 + 401 - 76?", "29 + 401 - 76", "354"],
];

let text = "";
for await (const part of process.stdin) text += part;
const task = JSON.parse(text);
const messages = [{ role: "system", content: SYSTEM }];

async function ask() {
  const answer = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { "Content-Type": "application/json", Authorization: `Bearer ${process.env.OPENAI_API_KEY}` },
    body: JSON.stringify({ model: process.env.ASSAY_MODEL, messages, max_tokens: 40 }),
  });
  if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
  const content = (await answer.json()).choices[0].message.content;
  messages.push({ role: "assistant", content });
  return content.trim();
}

function calculated(said) {
  if (!/^[0-9+*() -]{1,60}$/.test(said) || said.includes("**")) return "error, this is no calculation";
  try {
    return String(Function(`return (${said})`)()); // digits and signs only
  } catch {
    return "error, this is no calculation";
  }
}

for (const [question, calculation, result] of EXAMPLES)
  messages.push(
    { role: "user", content: question },
    { role: "assistant", content: calculation },
    { role: "user", content: `Result: ${result}` },
    { role: "assistant", content: result },
  );
messages.push({ role: "user", content: task.inputs.question });
const calculation = await ask();
messages.push({ role: "user", content: `Result: ${calculated(calculation)}` });
console.log(JSON.stringify({ calculation, answer: await ask() }));
