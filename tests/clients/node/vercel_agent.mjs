// The Vercel AI SDK: OpenAI `responses` (its default), `chat` completions, Anthropic `messages`, and an object as the answer (`typed`).

import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from 'ai';
import { calculator, description, instructions, run, schema } from './driver.mjs';

const server = { baseURL: process.env.MODEL_BASE_URL, apiKey: process.env.MODEL_API_KEY };
const product = {
  type: 'object',
  properties: { value: { type: 'integer' }, unit: { type: 'string' } },
  required: ['value', 'unit'],
  additionalProperties: false,
};

async function agent(model, prompt, streamed, also = {}) {
  const tools = { calculator: tool({ description, inputSchema: jsonSchema(schema), execute: calculator }) };
  const asked = { model, system: instructions, prompt, tools, stopWhen: stepCountIs(6), ...also };
  if (!streamed) return generateText(asked);
  const failures = [];
  const result = streamText({ ...asked, onError: ({ error }) => failures.push(error) });
  for await (const _ of result.textStream);
  if (failures.length) throw failures[0];
  return result;
}

const openai = createOpenAI(server);
const text = (model) => async (question, streamed) => (await agent(model, question, streamed)).text;

await run({
  responses: text(openai('gpt-4o')),
  chat: text(openai.chat('gpt-4o')),
  messages: text(createAnthropic(server)('claude-sonnet-5')),
  typed: async (question, streamed) => (await agent(openai.chat('gpt-4o'), question, streamed, { output: Output.object({ schema: jsonSchema(product) }) })).output,
});
