// The OpenAI SDK: `chat` completions, the SDK's own loop over them (`runner`), `responses` with the whole history, and `chained` by the id of the
// answer before.

import OpenAI from 'openai';
import { calculator, description, instructions, name, run, schema } from './driver.mjs';

async function chat(question, streamed) {
  const client = new OpenAI();
  const tools = [{ type: 'function', function: { name, description, parameters: schema, strict: true } }];
  const messages = [{ role: 'developer', content: instructions }, { role: 'user', content: question }];
  for (;;) {
    const asked = { model: 'gpt-4o', messages, tools };
    const answer = streamed ? await client.chat.completions.stream(asked).finalChatCompletion() : await client.chat.completions.create(asked);
    const said = answer.choices[0].message;
    if (!said.tool_calls?.length) return said.content;
    messages.push(said);
    for (const call of said.tool_calls)
      messages.push({ role: 'tool', tool_call_id: call.id, content: calculator(JSON.parse(call.function.arguments)) });
  }
}

function runner(question, streamed) {
  const called = { name, description, parameters: schema, parse: JSON.parse, function: calculator };
  const messages = [{ role: 'system', content: instructions }, { role: 'user', content: question }];
  const asked = { model: 'gpt-4o', messages, tools: [{ type: 'function', function: called }], stream: streamed };
  return new OpenAI().chat.completions.runTools(asked).finalContent();
}

async function responses(question, streamed, chained = false) {
  const client = new OpenAI();
  const tools = [{ type: 'function', name, description, parameters: schema, strict: true }];
  let input = [{ role: 'user', content: question }];
  let previous = {};
  for (;;) {
    const asked = { model: 'gpt-4o', instructions, tools, input, ...previous };
    const answer = streamed ? await client.responses.stream(asked).finalResponse() : await client.responses.create(asked);
    const calls = answer.output.filter((item) => item.type === 'function_call');
    if (!calls.length) return answer.output_text;
    const results = calls.map((call) => ({ type: 'function_call_output', call_id: call.call_id, output: calculator(JSON.parse(call.arguments)) }));
    input = chained ? results : [...input, ...answer.output, ...results];
    if (chained) previous = { previous_response_id: answer.id };
  }
}

await run({ chat, runner, responses, chained: (question, streamed) => responses(question, streamed, true) });
