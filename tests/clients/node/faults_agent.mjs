// Clients on Node against a server that fails. `NAME` sends one request and leaves retries to the client; `NAME_stream` does the same with a
// streamed answer; `NAME_abort` cancels a stream with an AbortController and sends the text read so far in the next request.

import Anthropic from '@anthropic-ai/sdk';
import { createOpenAI } from '@ai-sdk/openai';
import { ChatOpenAI } from '@langchain/openai';
import { streamText, generateText } from 'ai';
import OpenAI from 'openai';
import { run } from './driver.mjs';

const user = (content) => ({ role: 'user', content });
const server = { baseURL: process.env.MODEL_BASE_URL, apiKey: process.env.MODEL_API_KEY };

// Each yields the pieces of text of a streamed answer.
const texts = {
  async *openai(messages, signal) {
    for await (const part of await new OpenAI().chat.completions.create({ model: 'gpt-4o', messages, stream: true }, { signal }))
      yield part.choices[0]?.delta?.content ?? '';
  },
  async *anthropic(messages, signal) {
    const stream = new Anthropic().messages.stream({ model: 'claude-sonnet-5', max_tokens: 500, messages }, { signal });
    for await (const event of stream) yield event.delta?.text ?? '';
  },
  async *vercel(messages, signal) {
    const failures = [];
    const result = streamText({ model: createOpenAI(server).chat('gpt-4o'), messages, abortSignal: signal, onError: ({ error }) => failures.push(error) });
    for await (const text of result.textStream) yield text;
    if (failures.length) throw failures[0];
  },
  async *langchain(messages, signal) {
    for await (const part of await new ChatOpenAI({ model: 'gpt-4o' }).stream(messages, { signal })) yield part.text;
  },
};

const whole = {
  openai: async (messages) => (await new OpenAI().chat.completions.create({ model: 'gpt-4o', messages })).choices[0].message.content,
  anthropic: async (messages) => (await new Anthropic().messages.create({ model: 'claude-sonnet-5', max_tokens: 500, messages })).content[0].text,
  vercel: async (messages) => (await generateText({ model: createOpenAI(server).chat('gpt-4o'), messages })).text,
  langchain: async (messages) => (await new ChatOpenAI({ model: 'gpt-4o', maxRetries: 2 }).invoke(messages)).text,
};

async function read(name, question) {
  let said = '';
  for await (const text of texts[name]([user(question)])) said += text;
  return said;
}

async function abort(name, question) {
  const stop = new AbortController();
  let said = '';
  try {
    for await (const text of texts[name]([user(question)], stop.signal)) if ((said += text).length > 5) stop.abort();
  } catch (error) {
    if (!stop.signal.aborted) throw error;
  }
  return whole[name]([user(question), { role: 'assistant', content: said }, user('never mind')]);
}

const modes = Object.keys(texts).flatMap((name) => [
  [name, (question, streamed) => (streamed ? read(name, question) : whole[name]([user(question)]))],
  [`${name}_abort`, (question) => abort(name, question)],
]);
await run(Object.fromEntries(modes));
