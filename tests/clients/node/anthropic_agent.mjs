// The Anthropic SDK: `messages` in a loop of the agent's own, and the SDK's tool `runner`.

import Anthropic from '@anthropic-ai/sdk';
import { calculator, description, instructions, name, run, schema } from './driver.mjs';

const asked = { model: 'claude-sonnet-5', max_tokens: 500, system: [{ type: 'text', text: instructions }] };
const textOf = (answer) => answer.content.map((part) => part.text ?? '').join('');

async function messages(question, streamed) {
  const client = new Anthropic();
  const tools = [{ name, description, input_schema: schema }];
  const conversation = [{ role: 'user', content: question }];
  for (;;) {
    const given = { ...asked, messages: conversation, tools };
    const answer = streamed ? await client.messages.stream(given).finalMessage() : await client.messages.create(given);
    if (answer.stop_reason !== 'tool_use') return textOf(answer);
    const calls = answer.content.filter((part) => part.type === 'tool_use');
    const results = calls.map((call) => ({ type: 'tool_result', tool_use_id: call.id, content: calculator(call.input) }));
    conversation.push({ role: 'assistant', content: answer.content }, { role: 'user', content: results });
  }
}

async function runner(question, streamed) {
  const tool = { type: 'custom', name, description, input_schema: schema, run: calculator, parse: (input) => input };
  const given = { ...asked, messages: [{ role: 'user', content: question }], tools: [tool], stream: streamed };
  return textOf(await new Anthropic().beta.messages.toolRunner(given).runUntilDone());
}

await run({ messages, runner });
