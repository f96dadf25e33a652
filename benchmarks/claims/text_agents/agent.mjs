// The agent of openai_agent.py as a Node program, without a package.
import { readFileSync } from "node:fs";

const SYSTEM = readFileSync(new URL("system.md", import.meta.url), "utf8").trim();
let text = "";
for await (const part of process.stdin) text += part;
const messages = [
  { role: "system", content: SYSTEM },
  { role: "user", content: "What is 482 + 37?" },
  { role: "assistant", content: "482 + 37" },
  { role: "user", content: JSON.parse(text).inputs.question },
];
const answer = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
  method: "POST",
  headers: { "Content-Type": "application/json", Authorization: `Bearer ${process.env.OPENAI_API_KEY}` },
  body: JSON.stringify({ model: process.env.ASSAY_MODEL, messages, max_tokens: 24 }),
});
if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
const calculation = (await answer.json()).choices[0].message.content.trim();
console.log(JSON.stringify({ calculation, answer: calculated(calculation) }));

function calculated(said) {
  if (!/^[0-9+*() -]{1,60}$/.test(said) || said.includes("**")) return "error, this is not a calculation";
  try {
    return String(Function(`return (${said})`)()); // digits and signs only
  } catch {
    return "error, this is not a calculation";
  }
}
